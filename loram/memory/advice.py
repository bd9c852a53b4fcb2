"""What to do with a device of some memory, as far as it was measured (docs/quality.md)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from loram.errors import RecipeError
from loram.memory.devices import Sharding, per_device
from loram.memory.fit import ALLOWANCE_BYTES, smallest_ratio
from loram.memory.plan import pruned_widths, rows_per_step, train_setup
from loram.memory.polish import polish_memory, polish_setup
from loram.models.shape import ModelShape, Widths
from loram.recipe import Recipe

Overrides = tuple[str, ...]

# What each step of a training is made of; the same for `train` and `polish`.
_STEP = (
    "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "tokens_per_step", "max_length",
    "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "optim", "seed", "dtype",
)  # fmt: skip
# What trains outside the projections, or starts elsewhere, with what it is without.
_PLAIN = {"lora_lm_head": False, "lora_embedding": False, "modules_to_save": [], "init_lora_weights": "default"}


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

    def fits(way: Recipe, widths: Widths) -> bool:
        setup = train_setup(way.train, shape.architecture)
        return per_device(shape, widths, setup, devices, sharding).peak + ALLOWANCE_BYTES <= available

    for changes in _easier(recipe):
        eased = _changed(recipe, changes)
        if eased is None:
            continue
        for overrides, reason in _whole(eased):
            way = _changed(eased, overrides)
            if way is not None and fits(way, Widths.whole(shape.architecture)):
                return _anchored(recipe, (*changes, *overrides), shape.architecture.layers, reason)
        for overrides, reason in _small(eased):
            way = _changed(eased, overrides)
            ratio = None if way is None else _ratio_that_fits(shape, way, fits)
            if ratio is not None:
                # The first override is the ratio.
                found = (*changes, f"prune.ratio={ratio:g}", *overrides[1:])
                return _anchored(recipe, found, shape.architecture.layers, reason)
    return _layer_by_layer(shape, recipe, available)


def _ratio_that_fits(shape: ModelShape, way: Recipe, fits: Callable[[Recipe, Widths], bool]) -> float | None:
    return smallest_ratio(lambda ratio: fits(way, pruned_widths(shape.architecture, way.prune, ratio)))


def _easier(recipe: Recipe) -> Iterator[Overrides]:
    """The recipe as it is; with rows one at a time, as many to a step; with nothing but a plain LoRA besides."""
    train = recipe.train
    one_row: Overrides = ()
    if train.per_device_train_batch_size > 1:
        one_row = ("train.per_device_train_batch_size=1",)
        if train.tokens_per_step is None:
            one_row += (f"train.gradient_accumulation_steps={rows_per_step(train)}",)
    plain = tuple(f"train.{k}={json.dumps(v)}" for k, v in _PLAIN.items() if getattr(train, k) != v)
    yield from dict.fromkeys([(), one_row, (*one_row, *plain)])


def _whole(recipe: Recipe) -> Iterator[tuple[Overrides, str]]:
    """The whole model, from most bits to fewest."""
    for quantizer, held in (("none", "as it is"), ("int8", "in 8 bits"), (_four(recipe), f"in {_four(recipe)}")):
        overrides = ("prune.ratio=0", "align.max_steps=0", *_unpolished(recipe), *_held_in(quantizer, recipe))
        yield overrides, f"the whole model fits {held}, and no small model was seen to train a better adapter"


def _small(recipe: Recipe) -> Iterator[tuple[Overrides, str]]:
    """A small one in 4 bits: chosen as the recipe says, or as can be where its own way needs what it has not."""
    packed = _held_in(_four(recipe), recipe)
    unpolished = () if recipe.small else _unpolished(recipe)
    best = "the least that goes is best"
    if recipe.prune.criterion != "adapter_gradient":
        best += "; units chosen by prune.criterion=adapter_gradient, on calibration rows of the task, were the best"
    cuts: tuple[Overrides, ...] = (
        (), ("prune.method=cut",), ("prune.method=cut", "prune.criterion=random", "prune.budget=layer")
    )  # fmt: skip
    for cut in cuts:
        yield ("prune.ratio=0.5", *cut, *packed, *unpolished), best


def _anchored(recipe: Recipe, overrides: Overrides, layers: int, reason: str) -> Advice:
    """With anchors where 4 bits train and the recipe allows it; a small model without them is better aligned."""
    whole = "prune.ratio=0" in overrides
    if whole and _changed(recipe, overrides).train.quantizer in ("none", "int8"):  # type: ignore[union-attr]
        return Advice((*overrides, "train.anchors=0"), reason)
    unaligned = () if whole else ("align.max_steps=0",)
    some = (*overrides, *unaligned, f"train.anchors={-(-layers // 6)}")
    if _changed(recipe, some) is not None:
        gain = (
            "keep what quantization changes out of the adapter, for a pass over the rows"
            if whole
            else "make up for it, and after every layer do a little more"
        )
        return Advice(some, f"{reason}; anchors {gain}")
    without = "a setting of the recipe rules anchors out, without which the adapter is worse"
    return Advice((*overrides, "train.anchors=0"), f"{reason}; {without}")


def _layer_by_layer(shape: ModelShape, recipe: Recipe, available: int) -> Advice:
    """The steps of `train` on the full model, one layer in memory; rows one at a time, and 4 bits, if need be."""
    train, polish = recipe.train, recipe.polish
    plain = [f"train.{k}={json.dumps(v)}" for k, v in _PLAIN.items() if getattr(train, k) != v]
    steps = [
        f"polish.{name}={json.dumps(getattr(train, name))}"
        for name in _STEP
        if getattr(train, name) != getattr(polish, name)
    ]
    made = (
        "polish.start=fresh", f"polish.max_steps={train.max_steps}", *plain, *steps, *_evaluating_polished(recipe),
        *(("recover.correction=none",) if recipe.recover.correction != "none" else ()),
    )  # fmt: skip
    one_row: Overrides = ("polish.per_device_train_batch_size=1",)
    if train.tokens_per_step is None:
        one_row += (f"polish.gradient_accumulation_steps={rows_per_step(train)}",)
    for more in ((), one_row, (*one_row, "polish.quantizer=nf4")):
        overrides = (*(text for text in made if text.partition("=")[0] not in _keys(more)), *more)
        way = _changed(recipe, overrides)
        if way is None:
            continue
        needed = polish_memory(shape, polish_setup(way, shape.architecture), rows_per_step(way.polish)).device
        if needed + ALLOWANCE_BYTES <= available:
            return Advice(
                overrides, "no ratio fits; plain LoRA steps on the full model, one layer in memory, need no small one"
            )
    return Advice((), "not even one layer of the full model and its work fit; a larger device helps, or shorter rows")


def _evaluating_polished(recipe: Recipe) -> Overrides:
    """Without a small model there are no evaluations of one."""
    asked = set(recipe.evaluate.variants) & {"polished", "scaled", "merged"}
    return () if asked else ("evaluate.variants=[polished]",)


def _four(recipe: Recipe) -> str:
    """The recipe's quantizer of 4 bits, or NF4."""
    return recipe.train.quantizer if recipe.train.quantizer in ("nf4", "fp4", "hqq4") else "nf4"


def _unpolished(recipe: Recipe) -> Overrides:
    return ("polish.max_steps=0",) if recipe.small else ("polish.start=recovered", "polish.max_steps=0")


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
