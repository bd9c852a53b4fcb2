"""What to do with a device of some memory, as far as it was measured (docs/quality.md)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from loram.errors import RecipeError
from loram.memory.devices import Sharding, per_device
from loram.memory.fit import ALLOWANCE_BYTES, smallest_ratio
from loram.memory.plan import pruned_widths, train_setup
from loram.models.shape import ModelShape, Widths
from loram.recipe import Recipe, TrainSection


@dataclass(frozen=True)
class Advice:
    """Overrides of the recipe, and the reason; no overrides where nothing but another device helps."""

    overrides: tuple[str, ...]
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def advise(shape: ModelShape, recipe: Recipe, available: int, devices: int = 1, sharding: Sharding = "fsdp") -> Advice:
    """How to train with `available` bytes on each of the devices: whole, small, or layer by layer.

    The whole model comes first, in as many bits as fit, since no small one was seen to do better, and 8 bits as well
    as 16. Where it does not fit, the small model is as large as fits in 4 bits. What trains in 4 bits is anchored, if
    the recipe allows it: after a sixth of the layers, hardly worth less than all of them, for a sixth of the disk.
    """
    architecture = shape.architecture
    four = recipe.train.quantizer if recipe.train.quantizer in ("nf4", "fp4", "hqq4") else "nf4"
    unpolished = ("polish.max_steps=0",) if recipe.small else ("polish.start=recovered", "polish.max_steps=0")

    def fits(train: TrainSection, widths: Widths) -> bool:
        setup = train_setup(train, architecture)
        return per_device(shape, widths, setup, devices, sharding).peak + ALLOWANCE_BYTES <= available

    def anchored(overrides: tuple[str, ...], reason: str, what_for: str) -> Advice:
        some = f"train.anchors={-(-architecture.layers // 6)}"
        if _goes_together(recipe, (*overrides, some)):
            return Advice((*overrides, some), f"{reason}; anchors {what_for}")
        return Advice((*overrides, "train.anchors=0"), f"{reason}; anchors, which the recipe rules out, {what_for}")

    wholly = ("prune.ratio=0", "align.max_steps=0", *unpolished)
    for quantizer, held in (("none", "as it is"), ("int8", "in 8 bits"), (four, f"in {four}")):
        way = (*wholly, *_held_in(quantizer, recipe.train))
        plain = (*way, "train.anchors=0")
        if not _goes_together(recipe, plain) or not fits(recipe.changed(plain).train, Widths.whole(architecture)):
            continue
        reason = f"the whole model fits {held}, and no small model was seen to train a better adapter"
        if quantizer != four:
            return Advice(plain, reason)
        return anchored(way, reason, "keep what quantization changes out of the adapter, for a pass over the rows")
    packed = _held_in(four, recipe.train)
    train = recipe.changed((*packed, "train.anchors=0")).train
    ratio = smallest_ratio(lambda ratio: fits(train, pruned_widths(architecture, recipe.prune, ratio)))
    if ratio is None:
        plainly = {
            "lora_lm_head": False, "lora_embedding": False, "modules_to_save": [], "init_lora_weights": "default"
        }  # fmt: skip
        without = tuple(f"train.{k}={json.dumps(v)}" for k, v in plainly.items() if getattr(recipe.train, k) != v)
        return Advice(
            ("polish.start=fresh", "polish.max_steps=-1", *without),
            "no ratio fits; plain LoRA steps on the full model, one layer in memory, need no small one",
        )
    return anchored(
        (f"prune.ratio={ratio:g}", "align.max_steps=0", *packed, *(() if recipe.small else unpolished)),
        "the least that goes is best",
        "make up for it; after every layer they do a little more",
    )


def _held_in(quantizer: str, train: TrainSection) -> tuple[str, ...]:
    """What changes in a recipe so that its frozen linears are held in this format."""
    changes: tuple[str, ...] = () if train.quantizer == quantizer else (f"train.quantizer={quantizer}",)
    if train.quantize_embeddings and quantizer not in ("nf4", "fp4"):
        changes += ("train.quantize_embeddings=false",)
    return changes


def _goes_together(recipe: Recipe, overrides: tuple[str, ...]) -> bool:
    try:
        recipe.changed(overrides)
    except RecipeError:
        return False
    return True
