"""Recipes: typed, frozen, strict, with overrides; and every shipped one is sound."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from loram.errors import RecipeError
from loram.recipe import load_recipe
from tests.conftest import ROOT

SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_are_valid_and_named_after_their_file(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert load_recipe(path).to_yaml() == recipe.to_yaml()


def test_a_resolved_recipe_is_a_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / "tiny.yaml")
    (tmp_path / "again.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path / "again.yaml") == recipe


def test_overrides_reach_any_depth_and_keep_their_type() -> None:
    recipe = load_recipe(
        ROOT / "recipes" / "tiny.yaml",
        [
            "prune.ratio=0.25",
            "train.learning_rate=1e-3",
            "train.datasets.0.limit=5",
            "train.datasets.1={path: b.jsonl, weight: 0.5}",
            "evaluate.datasets.more={path: a.jsonl}",
        ],
    )
    assert recipe.prune.ratio == 0.25
    assert recipe.train.learning_rate == 1e-3
    assert [(dataset.limit, dataset.weight) for dataset in recipe.train.datasets] == [(5, 1), (None, 0.5)]
    assert recipe.evaluate.datasets["more"].path == "a.jsonl"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("prune.ration=0.5", ["prune.ration", "did you mean 'ratio'"]),
        ("trian.max_steps=3", ["trian", "did you mean 'train'"]),
        ("evaluate.datasets.docstrings.pth=x", ["datasets.docstrings.pth", "did you mean 'path'"]),
        ("train.datasets.0.lmit=3", ["train.datasets.0.lmit", "did you mean 'limit'"]),
        ("train.dataset=rows.jsonl", ["train.dataset:", "did you mean 'datasets'"]),
        ("train.datasets.2.path=x", ["'2'", "list of 1", "Count from 0"]),
        ("train.datasets.path=x", ["'path'", "list of 1"]),
        ("train.datasets.0.weight=0", ["train.datasets.0.weight", "greater than 0"]),
        ("prune.calibration.weight=2", ["prune.calibration", "weight only counts"]),
        ("evaluate.datasets.docstrings.weight=2", ["evaluate.datasets.docstrings", "weight only counts"]),
        ("train.eval_datasets={a b: x.jsonl}", ["train.eval_datasets", "set's name"]),
        ("data.loss=last_turn", ["data.loss", "'last_assistant_turn'"]),
        ("name=tokens", ["name", "all recipes share"]),
        ("prune.ratio=1.0", ["prune.ratio", "less than 1"]),
        ("prune.ratio=-0.1", ["prune.ratio", "greater than or equal to 0"]),
        ("prune.criterion=magnitud", ["prune.criterion", "'magnitude'"]),
        ("prune.calibration=null", ["activation", "prune.calibration"]),
        ("train.lr_scheduler_type=cosin", ["did you mean 'cosine'"]),
        ("train.max_steps=0", ["train nothing"]),
        ("align.datasets=null", ["align.datasets"]),
        ("name=a/b", ["folder"]),
        ("prune.ratio", ["section.key=value"]),
        ("name.x=1", ["no keys below it"]),
        ("prune.ratio={", ["not valid YAML"]),
    ],
)
def test_wrong_values_are_refused_by_name(override: str, words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(ROOT / "recipes" / "tiny.yaml", [override])
    assert caught.value.exit_code == 2
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.datasets=a.jsonl"], [("a.jsonl", None)]),
        (["train.datasets={path: a.jsonl, limit: 2}"], [("a.jsonl", 2)]),
        (["train.datasets=[a.jsonl, {path: b.jsonl, limit: 3}]"], [("a.jsonl", None), ("b.jsonl", 3)]),
        (["train.datasets.0.path=a.jsonl"], [("a.jsonl", 16)]),
        (["train.datasets=a.jsonl", "train.datasets.0.limit=2"], [("a.jsonl", 2)]),
        (["train.datasets={path: a.jsonl}", "train.datasets.1=b.jsonl"], [("a.jsonl", None), ("b.jsonl", None)]),
        (["train.datasets=null", "train.datasets.0.path=a.jsonl"], [("a.jsonl", None)]),
    ],
)
def test_data_sets_are_a_list_however_they_are_written(
    overrides: list[str], expected: list[tuple[str, int | None]]
) -> None:
    recipe = load_recipe(ROOT / "recipes" / "tiny.yaml", overrides)
    assert [(dataset.path, dataset.limit) for dataset in recipe.train.datasets] == expected


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "\xff\xfe", ""])
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(RecipeError):
        load_recipe(tmp_path / "bad.yaml")


def test_a_missing_recipe_names_the_ones_beside_it(tmp_path: Path) -> None:
    (tmp_path / "near.yaml").write_text("x: 1")
    with pytest.raises(RecipeError, match=r"near\.yaml"):
        load_recipe(tmp_path / "far.yaml")


def test_recipes_are_frozen() -> None:
    recipe = load_recipe(ROOT / "recipes" / "tiny.yaml")
    with pytest.raises(ValidationError):
        recipe.prune.ratio = 0.9  # type: ignore[misc]


def test_watching_fields_stay_out_of_the_settings() -> None:
    plain = load_recipe(ROOT / "recipes" / "tiny.yaml").train.settings()
    watched = load_recipe(
        ROOT / "recipes" / "tiny.yaml", ["train.save_steps=7", "train.logging_steps=9"]
    ).train.settings()
    assert plain == watched
    assert "learning_rate" in plain
    assert "save_steps" not in plain


def test_the_baseline_prunes_and_aligns_nothing() -> None:
    baseline = load_recipe(ROOT / "recipes" / "tiny.yaml", ["evaluate.baseline=true"]).baseline()
    assert baseline.prune.ratio == 0
    assert baseline.align.max_steps == 0
    assert not baseline.evaluate.baseline
    assert yaml.safe_load(baseline.to_yaml())["train"]["max_steps"] == 3
