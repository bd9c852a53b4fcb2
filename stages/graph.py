"""The stages as data: what each is made from, and which settings change its result.

Light on purpose: fingerprints, `loram status` and a run with nothing to do import neither torch nor transformers. The
work of a stage is `run` in the module of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from loram.data import sources
from loram.data.templates import known_template
from loram.errors import RecipeError
from loram.models import source
from loram.recipe import Evaluated, Recipe, TrainingSection

# A role filled by a stage of the baseline recipe (ratio 0) is written with this prefix.
BASELINE = "baseline:"


@dataclass(frozen=True)
class Stage:
    """A stage.

    `version` is raised when the code's results change. `inputs` maps a role to the stage it comes from, given the
    recipe; `main` is the role that `--from` replaces. `settings` are what changes the result, as plain JSON.
    """

    name: str
    version: int
    main: str
    inputs: Callable[[Recipe], Mapping[str, str]]
    settings: Callable[[Recipe], dict[str, Any]]


def small_model(recipe: Recipe) -> str:
    """The stage whose model is trained: align, or prune where alignment is skipped."""
    return "prune" if recipe.align.max_steps == 0 else "align"


def full_adapter(recipe: Recipe) -> str:
    """The stage whose adapter is for the full model and is merged."""
    return trained_adapter(recipe) if recipe.scale.dataset is None else "scale"


def trained_adapter(recipe: Recipe) -> str:
    """The stage whose adapter for the full model is the last that training changed."""
    return "recover" if recipe.polish.max_steps == 0 else "polish"


def _base(recipe: Recipe) -> dict[str, Any]:
    settings = recipe.model.settings()
    if recipe.model.path.startswith(source.PACKAGE):
        settings["package_version"] = source.package_version(recipe.model)
    elif recipe.model.path.endswith(source.GGUF):
        settings["content"] = source.gguf_identity(recipe.model)
    return settings


def _score(recipe: Recipe) -> dict[str, Any]:
    prune = recipe.prune
    settings: dict[str, Any] = {"criterion": prune.criterion}
    if prune.criterion == "random":
        settings["seed"] = prune.seed
    return settings | _calibration(recipe) if prune.scores_rows else settings


def _calibration(recipe: Recipe) -> dict[str, Any]:
    prune = recipe.prune
    assert prune.calibration is not None  # the recipe refuses what needs it without
    return {
        "calibration": sources.identity(prune.calibration),
        "calibration_rows": prune.calibration_rows,
        "calibration_length": prune.calibration_length,
        **_text(recipe),
    }


def _prune(recipe: Recipe) -> dict[str, Any]:
    prune = recipe.prune
    if prune.ratio == 0:
        return {"ratio": 0}
    names = ("ratio", "method", "budget", "keep_first_layers", "keep_last_layers", "multiple_of")
    settings = {name: value for name, value in prune.settings().items() if name in names}
    if prune.factors:
        settings |= {"criterion": prune.criterion} | (_calibration(recipe) if prune.runs_model else {})
    return settings


def _prune_inputs(recipe: Recipe) -> dict[str, str]:
    return {"base": "base", "scores": "score"} if recipe.prune.cuts else {"base": "base"}


def _training(recipe: Recipe, section: TrainingSection) -> dict[str, Any]:
    settings = section.settings()
    settings["datasets"] = [sources.identity(dataset) | {"weight": dataset.weight} for dataset in section.datasets]
    if section.selects:
        settings["eval_datasets"] = {name: sources.identity(each) for name, each in section.eval_datasets.items()}
    return settings | _text(recipe)


def _train_inputs(recipe: Recipe) -> dict[str, str]:
    inputs = {"model": small_model(recipe)}
    return inputs | {"anchors": "anchor"} if recipe.train.anchors else inputs


def _anchor(recipe: Recipe) -> dict[str, Any]:
    """What says which rows there are and which of them are used, and how the small model computes."""
    train, settings = recipe.train, _training(recipe, recipe.train)
    names = ("datasets", "max_steps", "tokens_per_step", "max_length", "seed", "dtype")
    used: dict[str, Any] = {"anchors": train.anchors}
    if train.tokens_per_step is None:
        used["rows_per_step"] = train.per_device_train_batch_size * train.gradient_accumulation_steps
    if train.max_steps < 0:
        used["num_train_epochs"] = min(1.0, train.num_train_epochs)  # later ones see the same rows
    return {name: settings[name] for name in names} | used | _text(recipe) | {"quantizer": _quantizer(recipe)}


def _polish(recipe: Recipe) -> dict[str, Any]:
    settings = _training(recipe, recipe.polishing)
    if recipe.small:
        return settings
    train = recipe.train
    names = (
        "lora_r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern",
        "init_lora_weights", "target_modules",
    )  # fmt: skip
    return settings | {name: getattr(train, name) for name in names} | {"init_seed": train.seed}


def _text(recipe: Recipe) -> dict[str, Any]:
    """How conversations become tokens and labels."""
    return {"chat_template": known_template(recipe.data.chat_template), "loss": recipe.data.loss}


def _recover(recipe: Recipe) -> dict[str, Any]:
    if recipe.recover.correction == "none":
        return {}
    return recipe.recover.settings() | {"quantizer": _quantizer(recipe), "dtype": recipe.train.dtype}


def _recover_inputs(recipe: Recipe) -> dict[str, str]:
    inputs = {"adapter": "train", "base": "base"}
    return inputs if recipe.recover.correction == "none" else inputs | {"model": small_model(recipe)}


def _scale(recipe: Recipe) -> dict[str, Any]:
    settings = recipe.scale.settings()
    if recipe.scale.dataset is not None:
        settings["dataset"] = sources.identity(recipe.scale.dataset)
    return settings | _text(recipe)


def _quantizer(recipe: Recipe) -> list[Any]:
    """How the small model is held while its adapter trains, and wherever it is used."""
    train = recipe.train
    return [train.quantizer, train.bnb_4bit_use_double_quant, train.quantize_embeddings]


def _evaluate(recipe: Recipe) -> dict[str, Any]:
    return recipe.evaluate.settings() | {
        "datasets": {name: sources.identity(data) for name, data in recipe.evaluate.datasets.items()},
        **_text(recipe),
        "quantizer": _quantizer(recipe),
    }


def _evaluate_inputs(recipe: Recipe) -> dict[str, str]:
    inputs = {"base": "base"}
    if recipe.small:
        inputs |= {"pruned": "prune", "adapter": "train", "recovered": "recover"}
        if small_model(recipe) == "align":
            inputs["aligned"] = "align"
    if recipe.polish.max_steps != 0:
        inputs["polished"] = "polish"
    if recipe.scale.dataset is not None:
        inputs["scaled"] = "scale"
    if recipe.evaluate.baseline:
        inputs["baseline"] = f"{BASELINE}recover"
    return inputs | {"merged": "merge"}


def evaluated(recipe: Recipe) -> list[Evaluated]:
    """The roles of `evaluate.variants` that the recipe makes.

    Raises:
        RecipeError: it makes none of them.
    """
    inputs, wanted = _evaluate_inputs(recipe), recipe.evaluate.variants
    found = [role for role in wanted if role in inputs]
    if wanted and not found:
        raise RecipeError(
            f"The recipe makes none of evaluate.variants ({', '.join(wanted)}).",
            fix=f"It makes {', '.join(role for role in get_args(Evaluated) if role in inputs)}.",
        )
    return found


def final_role(recipe: Recipe) -> str:
    """What evaluation calls the adapter that is merged."""
    return next(role for role, stage in _evaluate_inputs(recipe).items() if stage == full_adapter(recipe))


STAGES = {
    stage.name: stage
    for stage in (
        Stage("base", 1, main="", inputs=lambda _: {}, settings=_base),
        Stage("score", 1, main="base", inputs=lambda _: {"base": "base"}, settings=_score),
        Stage("prune", 4, main="base", inputs=_prune_inputs, settings=_prune),
        Stage("align", 2, main="model", inputs=lambda _: {"model": "prune"}, settings=lambda r: _training(r, r.align)),
        Stage(
            "anchor",
            3,
            main="model",
            inputs=lambda r: {"model": small_model(r), "base": "base"},
            settings=_anchor,
        ),
        Stage("train", 2, main="model", inputs=_train_inputs, settings=lambda r: _training(r, r.train)),
        Stage("recover", 2, main="adapter", inputs=_recover_inputs, settings=_recover),
        Stage(
            "polish",
            1,
            main="adapter",
            inputs=lambda r: {"adapter": "recover", "base": "base"} if r.small else {"base": "base"},
            settings=_polish,
        ),
        Stage(
            "scale",
            1,
            main="adapter",
            inputs=lambda r: {"adapter": trained_adapter(r), "base": "base"},
            settings=_scale,
        ),
        Stage(
            "merge",
            1,
            main="adapter",
            inputs=lambda r: {"adapter": full_adapter(r), "base": "base"},
            settings=lambda _: {},
        ),
        Stage("evaluate", 4, main="", inputs=_evaluate_inputs, settings=_evaluate),
    )
}
