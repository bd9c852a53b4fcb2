"""loram data show RECIPE: what a recipe's data become, token by token, through the cache that the stages use."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from loram.data.cache import tokenized
from loram.data.encode import Encoder, resolve_template
from loram.data.mixture import epoch_examples
from loram.data.tokens import Tokens, TokenSet
from loram.errors import RecipeError, did_you_mean
from loram.models import source
from loram.models.loading import load_tokenizer
from loram.recipe import DatasetSection, LossOn, Recipe

from .pipeline import Pipeline

# Shares of the examples whose greatest length is told.
_QUANTILES = {"shortest": 0.0, "median": 0.5, "90%": 0.9, "99%": 0.99, "longest": 1.0}


@dataclass(frozen=True)
class _Set:
    """A data set of the recipe: its place there, and how its section reads it."""

    place: str
    dataset: DatasetSection
    max_length: int
    loss: LossOn
    mixed: bool = False


def describe(
    recipe: Recipe, pipeline: Pipeline, section: str, name: str | None, rows: int, given: Path | None
) -> list[dict[str, Any]]:
    """Counts, lengths and the first examples of each set of a section, as plain JSON.

    Args:
        recipe: the experiment.
        pipeline: its artifacts; the token cache lies beside them.
        section: `train`, `align`, `calibration`, `scale` or `eval`.
        name: of one evaluation set; None: all of them.
        rows: how many examples.
        given: a model folder whose tokenizer to use instead of the base's.

    Raises:
        RecipeError: the recipe has no such set.
        DataError: unreadable, or no usable row.
    """
    chosen = _sets(recipe, section, name)
    tokenizer = load_tokenizer(given or _tokenizer_folder(recipe, pipeline))
    template = resolve_template(recipe.data.chat_template, tokenizer)
    described = []
    for each in chosen:
        tokens = tokenized(each.dataset, Encoder(tokenizer, template, each.max_length, each.loss), pipeline.tokens)
        shown = [_example(tokens[number], tokenizer) for number in range(min(rows, len(tokens)))]
        described.append({**_summary(each, tokens), "shown": shown})
    return described


def _sets(recipe: Recipe, section: str, name: str | None) -> list[_Set]:
    loss = recipe.data.loss
    if section == "calibration":
        calibration = recipe.prune.calibration
        # As the stage: activations are of all tokens, so which of them are learnt makes no difference.
        length = recipe.prune.calibration_length
        sets = [] if calibration is None else [_Set("prune.calibration", calibration, length, "all_assistant_turns")]
    elif section == "scale":
        scale = recipe.scale
        sets = [] if scale.dataset is None else [_Set("scale.dataset", scale.dataset, scale.max_length, loss)]
    elif section == "eval":
        named = [
            (f"evaluate.datasets.{key}", of, recipe.evaluate.max_length) for key, of in recipe.evaluate.datasets.items()
        ]
        for part, training in (("train", recipe.train), ("align", recipe.align)):
            named += [
                (f"{part}.eval_datasets.{key}", of, training.max_length) for key, of in training.eval_datasets.items()
            ]
        sets = [_Set(place, of, length, loss) for place, of, length in named]
        if name is not None:
            names = [each.place.rpartition(".")[2] for each in sets]
            sets = [each for each, of in zip(sets, names, strict=True) if of == name]
            if not sets:
                raise RecipeError(f"The recipe has no evaluation set '{name}'{did_you_mean(name, names)}.")
    else:
        training = recipe.align if section == "align" else recipe.train
        sets = [
            _Set(f"{section}.datasets.{number}", dataset, training.max_length, loss, mixed=True)
            for number, dataset in enumerate(training.datasets)
        ]
    if not sets:
        raise RecipeError(f"The recipe has no data set for '{section}'.", fix="Choose another with --section.")
    return sets


def _tokenizer_folder(recipe: Recipe, pipeline: Pipeline) -> Path:
    """The base's folder; of a Hub model only the small files are fetched."""
    if source.needs_conversion(recipe.model):
        return pipeline.folder(pipeline.node("base"))
    return source.find_folder(recipe.model, download=True, weights=False)


def _summary(each: _Set, tokens: TokenSet) -> dict[str, Any]:
    counts = tokens.counts
    lengths = np.quantile(tokens.lengths, list(_QUANTILES.values()), method="higher").tolist()
    summary: dict[str, Any] = {
        "set": each.place,
        "path": each.dataset.path,
        "split": each.dataset.split,
        "rows": counts.rows,
        "examples": counts.examples,
        "tokens": counts.tokens,
        "loss_tokens": counts.loss_tokens,
        "dropped": {reason: {"count": of.count, "first": of.first} for reason, of in counts.dropped.items()},
        "lengths": dict(zip(_QUANTILES, lengths, strict=True)),
        "max_length": each.max_length,
    }
    if each.mixed:
        drawn = epoch_examples(len(tokens), each.dataset.weight, each.dataset.seed)
        summary |= {"weight": each.dataset.weight, "examples_per_epoch": len(drawn)}
    return summary


def _example(tokens: Tokens, tokenizer: Any) -> dict[str, Any]:
    """Ids, which of them are in the loss, and the text of each stretch of equal tokens."""
    ids, loss = tokens.ids.tolist(), tokens.loss.tolist()
    edges = [0, *(place for place in range(1, len(ids)) if loss[place] != loss[place - 1]), len(ids)]
    runs = [
        {"loss": loss[start], "text": tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False)}
        for start, end in pairwise(edges)
    ]
    return {"input_ids": ids, "loss": loss, "runs": runs}
