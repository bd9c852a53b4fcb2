"""loram sweep RECIPE key=a,b,c …: a grid of recipes through the cache, and one table of what came out.

Points share every stage that their settings share, since equal fingerprints are one artifact. What is made stays, so a
sweep that was interrupted goes on, and one that is done only prints its table.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from loram.artifact import fingerprint
from loram.errors import Interrupted, LoramError, RecipeError
from loram.recipe import Recipe, load_recipe

from .graph import final_role
from .pipeline import Made, Pipeline, check

VARIANT = "variant"
"""The axis of `--variants`."""


@dataclass(frozen=True)
class Point:
    """One recipe of the grid, what makes it, and what tells it from the others: axis → value as written."""

    labels: Mapping[str, str]
    overrides: list[str]
    recipe: Recipe


def split(text: str) -> list[str]:
    """The items of a list without brackets: commas within brackets, braces or quotes belong to an item."""
    items, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and not depth:
            items.append("")
            continue
        items[-1] += character
    return [item.strip() for item in items]


def grid(path: Path, arguments: Sequence[str], variants: Path | None = None) -> list[Point]:
    """Every combination of the arguments' values and the variants, each a valid recipe; equal ones once.

    Args:
        path: the recipe.
        arguments: `section.key=a,b,c` is an axis, with one value an override of all points.
        variants: a YAML file of name → {dotted key: value}, an axis that changes several keys at once.

    Raises:
        RecipeError: a value or key that a recipe does not have, an axis given twice, or nothing to compare by.
    """
    fixed, axes = [], dict[str, list[str]]()
    for argument in arguments:
        key, separator, text = argument.partition("=")
        values = split(text)
        if not separator or len(values) == 1:
            fixed.append(argument)
        elif key in axes:
            raise RecipeError(f"'{key}' is given twice.", fix="Put all its values into one list.")
        elif "" in values:
            raise RecipeError(f"'{argument}' has an empty value.", fix="Separate values by single commas.")
        else:
            axes[key] = values
    named = {} if variants is None else _read_variants(variants)
    steps: list[list[tuple[str, str, list[str]]]] = []
    if named:
        steps.append([(VARIANT, name, overrides) for name, overrides in named.items()])
    steps += [[(key, value, [f"{key}={value}"]) for value in values] for key, values in axes.items()]
    points: dict[str, Point] = {}
    for chosen in itertools.product(*steps):
        overrides = [*fixed, *(override for _, _, of in chosen for override in of)]
        recipe = load_recipe(path, overrides)
        points.setdefault(recipe.to_yaml(), Point({axis: value for axis, value, _ in chosen}, overrides, recipe))
    for point in points.values():
        if not point.recipe.evaluate.datasets:
            raise RecipeError("A sweep compares evaluations, and evaluate.datasets is empty.", fix="Name a set there.")
        final = final_role(point.recipe)
        if final not in point.recipe.evaluate.variants:
            raise RecipeError(
                "A sweep compares the adapters that are merged, and evaluate.variants leaves them out.",
                fix=f"Add '{final}'.",
            )
        check(point.recipe)
    return list(points.values())


def _read_variants(path: Path) -> dict[str, list[str]]:
    form = "Write it as NAME: {section.key: value}."
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"{path} cannot be read: {error}", fix=form) from error
    if not isinstance(raw, dict) or not raw or not all(isinstance(of, dict) for of in raw.values()):
        raise RecipeError(f"{path} holds no variants.", fix=form)
    return {
        str(name): [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in of.items()]
        for name, of in raw.items()
    }


def folder_of(points: Sequence[Point]) -> str:
    """The name of the result's folder, by the grid."""
    return f"sweep-{fingerprint([point.recipe.to_yaml() for point in points])[:12]}"


def outstanding(points: Sequence[Point], pipeline: Callable[[Recipe], Pipeline]) -> dict[str, tuple[int, int]]:
    """Stage → (artifacts that are there, artifacts to make), each counted once however many points share it."""
    found: dict[str, dict[str, bool]] = {}
    for point in points:
        made = pipeline(point.recipe)
        for node in made.nodes():
            found.setdefault(node.label, {})[made.key(node).fingerprint] = made.find(node) is not None
    return {stage: (sum(of.values()), len(of) - sum(of.values())) for stage, of in found.items()}


def run(
    points: Sequence[Point], pipeline: Callable[[Recipe], Pipeline], done: Callable[[Point, Made], None]
) -> list[dict[str, Any]]:
    """Runs every point and collects what its artifacts say, as plain JSON; a point that fails keeps its message.

    Raises:
        Interrupted: a training run was; the same sweep goes on from there.
    """
    results = []
    for point in points:
        made: list[Made] = []
        error = None
        try:
            made = pipeline(point.recipe).run(lambda one, point=point: done(point, one))  # type: ignore[misc]
        except Interrupted:
            raise
        except LoramError as failure:
            error = failure.what
        results.append({"labels": dict(point.labels), "error": error, **_collected(made)})
    return results


def _collected(made: Sequence[Made]) -> dict[str, Any]:
    """Evaluation and, of each stage, its seconds and measured numbers; as recorded where it was there already."""
    evaluation = made[-1].artifact.manifest.metrics if made else {}
    stages = {}
    for one in made:
        manifest = one.artifact.manifest
        numbers = {name: value for name, value in manifest.metrics.items() if isinstance(value, int | float)}
        stages[one.node.label] = {"seconds": manifest.seconds, "folder": one.artifact.path.name, **numbers}
    return {
        "variants": evaluation.get("variants", {}),
        "share_of_full_lora_gain": evaluation.get("share_of_full_lora_gain", {}),
        "stages": stages,
    }
