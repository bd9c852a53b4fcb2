"""What to do with a device of some memory, as far as it was measured (docs/quality.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from loram.errors import RecipeError
from loram.memory.devices import Sharding, per_device
from loram.memory.fit import ALLOWANCE_BYTES, smallest_ratio
from loram.memory.plan import pruned_widths, rows_per_step, train_setup
from loram.memory.polish import polish_memory, polish_setup
from loram.models.shape import ModelShape, Widths
from loram.recipe import Recipe, TrainingSection

Overrides = tuple[str, ...]

# Settings of `train` that are not those of `polish`: how many steps is said apart, its data sets are taken anyway, and
# its layers are always computed again.
_NOT_POLISH = ("max_steps", "datasets", "activation_checkpointing", "checkpoint_every", "activation_offloading")
# What trains outside the projections, or starts elsewhere, with what it is without.
_PLAIN = {"lora_lm_head": False, "lora_embedding": False, "modules_to_save": [], "init_lora_weights": "default"}
# How a small model may be made: as the recipe says, or as can be where its own way needs what it has not.
_CUTS: tuple[Overrides, ...] = (
    (), ("prune.method=cut",), ("prune.method=cut", "prune.criterion=random", "prune.budget=layer")
)  # fmt: skip
# Which ratio it is makes no difference to whether a recipe is valid.
_ANY_RATIO = 0.5


@dataclass(frozen=True)
class Advice:
    """Overrides of the recipe, and the reason; no overrides where nothing but another device helps."""

    overrides: Overrides
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def advise(shape: ModelShape, recipe: Recipe, available: int, devices: int = 1, sharding: Sharding = "fsdp") -> Advice:
    """How to train with `available` bytes on each of the devices: whole, small, or layer by layer.

    The whole model comes first, in as many bits as fit, since no small one was seen to do better, and 8 bits as well
    as 16. Where it does not fit, the small model is as large as fits in 4 bits. What trains in 4 bits is anchored, if
    the recipe allows it: after a sixth of the layers, hardly worth less than all of them, for a sixth of the disk.
    Before layer by layer, rows go through one at a time, and embedding and head are left as they are.
    """

    architecture = shape.architecture
    whole, four = Widths.whole(architecture), _four(recipe)
    unpolished = ("polish.max_steps=0",) if recipe.small else ("polish.start=recovered", "polish.max_steps=0")

    def fits(way: Recipe, widths: Widths) -> bool:
        setup = train_setup(way.train, architecture)
        return per_device(shape, widths, setup, devices, sharding).peak + ALLOWANCE_BYTES <= available

    def ratio_that_fits(way: Recipe) -> float | None:
        return smallest_ratio(lambda ratio: fits(way, pruned_widths(architecture, way.prune, ratio)))

    for eased in _easier(recipe):
        for quantizer, held in (("none", "as it is"), ("int8", "in 8 bits"), (four, f"in {four}")):
            packed = _held_in(quantizer, recipe)
            overrides = (*eased, "prune.ratio=0", "align.max_steps=0", *unpolished, *packed)
            way = _changed(recipe, overrides)
            if way is not None and fits(way, whole):
                reason = f"the whole model fits {held}, and no small model was seen to train a better adapter"
                return _anchored(recipe, way, overrides, architecture.layers, reason)
        for cut in _CUTS:
            chosen = (*cut, *_held_in(four, recipe), *(() if recipe.small else unpolished))
            way = _changed(recipe, (*eased, f"prune.ratio={_ANY_RATIO}", *chosen))
            if way is not None and (ratio := ratio_that_fits(way)) is not None:
                reason = "the least that goes is best"
                if recipe.prune.criterion != "adapter_gradient":
                    reason += (
                        "; units chosen by prune.criterion=adapter_gradient, on calibration rows of the task, were "
                        "the best"
                    )
                overrides = (*eased, f"prune.ratio={ratio:g}", *chosen)
                return _anchored(recipe, way, overrides, architecture.layers, reason)
    return _layer_by_layer(shape, recipe, available)


def _easier(recipe: Recipe) -> Iterator[Overrides]:
    """The recipe as it is; with rows one at a time, as many to a step; with nothing but a plain LoRA besides."""
    one_row = () if recipe.train.per_device_train_batch_size == 1 else _one_row("train", recipe)
    yield from dict.fromkeys([(), one_row, (*one_row, *_plain(recipe))])


def _one_row(section: str, recipe: Recipe) -> Overrides:
    """The rows of a step of `train`, one at a time."""
    one_row: Overrides = (f"{section}.per_device_train_batch_size=1",)
    if recipe.train.tokens_per_step is not None:
        return one_row
    return (*one_row, f"{section}.gradient_accumulation_steps={rows_per_step(recipe.train)}")


def _plain(recipe: Recipe) -> Overrides:
    """Nothing but a LoRA on the projections trains."""
    return tuple(f"train.{k}={json.dumps(v)}" for k, v in _PLAIN.items() if getattr(recipe.train, k) != v)


def _anchored(recipe: Recipe, way: Recipe, overrides: Overrides, layers: int, reason: str) -> Advice:
    """With anchors where 4 bits train and the recipe allows it; a small model without them is better aligned.

    `way` is the recipe with the overrides, but for its ratio, if that is not 0.
    """
    whole = way.prune.ratio == 0
    if whole and way.train.quantizer in ("none", "int8"):
        return Advice((*overrides, "train.anchors=0"), reason)
    some = (*overrides, *(() if whole else ("align.max_steps=0",)), f"train.anchors={-(-layers // 6)}")
    if _changed(recipe, some) is None:
        without = "a setting of the recipe rules anchors out, without which the adapter is worse"
        return Advice((*overrides, "train.anchors=0"), f"{reason}; {without}")
    if whole:
        return Advice(
            some, f"{reason}; anchors keep what quantization changes out of the adapter, for a pass over the rows"
        )
    return Advice(some, f"{reason}; anchors make up for it, and after every layer do a little more")


def _layer_by_layer(shape: ModelShape, recipe: Recipe, available: int) -> Advice:
    """The steps of `train` on the full model, one layer in memory; rows one at a time, and 4 bits, if need be."""
    made: Overrides = ("polish.start=fresh", f"polish.max_steps={recipe.train.max_steps}", *_plain(recipe))
    before, after = (section.model_dump(mode="json") for section in (recipe.polish, recipe.train))
    steps = (name for name in TrainingSection.model_fields if name not in _NOT_POLISH)
    made += tuple(f"polish.{name}={json.dumps(after[name])}" for name in steps if after[name] != before[name])
    if not set(recipe.evaluate.variants) & {"polished", "scaled", "merged"}:
        made += ("evaluate.variants=[polished]",)
    if recipe.recover.correction != "none":
        made += ("recover.correction=none",)
    one_row = _one_row("polish", recipe)
    for fewer in ((), one_row, (*one_row, "polish.quantizer=nf4")):
        overrides = (*(text for text in made if not _keys((text,)) & _keys(fewer)), *fewer)
        way = _changed(recipe, overrides)
        if way is None:
            continue
        needed = polish_memory(shape, polish_setup(way, shape.architecture), rows_per_step(way.polish)).device
        if needed + ALLOWANCE_BYTES <= available:
            return Advice(
                overrides, "no ratio fits; plain LoRA steps on the full model, one layer in memory, need no small one"
            )
    return Advice((), "not even one layer of the full model and its work fit; a larger device helps, or shorter rows")


def _four(recipe: Recipe) -> str:
    """The recipe's quantizer of 4 bits, or NF4."""
    return recipe.train.quantizer if recipe.train.quantizer in ("nf4", "fp4", "hqq4") else "nf4"


def _held_in(quantizer: str, recipe: Recipe) -> Overrides:
    """What changes in a recipe so that its frozen linears are held in this format."""
    train = recipe.train
    changes: Overrides = () if train.quantizer == quantizer else (f"train.quantizer={quantizer}",)
    if train.quantize_embeddings and quantizer not in ("nf4", "fp4"):
        changes += ("train.quantize_embeddings=false",)
    return changes


def _keys(overrides: Overrides) -> set[str]:
    return {text.partition("=")[0] for text in overrides}


def _changed(recipe: Recipe, overrides: Overrides) -> Recipe | None:
    """The recipe with these overrides, without anchors unless they have some; None where that is no recipe."""
    anchors = () if "train.anchors" in _keys(overrides) else ("train.anchors=0",)
    try:
        return recipe.changed((*overrides, *anchors))
    except RecipeError:
        return None
