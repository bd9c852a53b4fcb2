"""What to do with a device of some memory, as far as it was measured (docs/quality.md)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from loram.memory.devices import Sharding, per_device
from loram.memory.fit import ALLOWANCE_BYTES, smallest_ratio
from loram.memory.plan import pruned_widths, train_setup
from loram.memory.setup import TrainingSetup
from loram.models.shape import ModelShape, Widths
from loram.recipe import Recipe


@dataclass(frozen=True)
class Advice:
    """Overrides of the recipe, and the reason; no overrides where nothing but another device helps."""

    overrides: tuple[str, ...]
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def advise(shape: ModelShape, recipe: Recipe, available: int, devices: int = 1, sharding: Sharding = "fsdp") -> Advice:
    """How to train with `available` bytes on each of the devices: whole, small, or layer by layer.

    The whole model in the recipe's quantizer comes first, since no small one was seen to do better. Where it does not
    fit, the small model is as large as fits, and anchored after every layer.
    """
    architecture, train = shape.architecture, recipe.train
    setup = train_setup(train, architecture)
    quantized = replace(setup, quantizer="nf4") if setup.quantizer == "none" else setup

    def fits(widths: Widths, setup: TrainingSetup) -> bool:
        return per_device(shape, widths, setup, devices, sharding).peak + ALLOWANCE_BYTES <= available

    whole = Widths.whole(architecture)
    plainly = ("prune.ratio=0", "align.max_steps=0", "train.anchors=0", "polish.max_steps=0")
    for way in dict.fromkeys((setup, quantized)):
        if fits(whole, way):
            how = () if way == setup else (f"train.quantizer={way.quantizer}",)
            held = "as it is" if way.quantizer == "none" else f"in {way.quantizer}"
            reason = f"the whole model fits {held}, and no small model was seen to train a better adapter"
            return Advice((*plainly, *how), reason)
    ratio = smallest_ratio(lambda ratio: fits(pruned_widths(architecture, recipe.prune, ratio), quantized))
    if ratio is None:
        vocabulary = (("lora_lm_head", "false"), ("lora_embedding", "false"), ("modules_to_save", "[]"))
        without = tuple(f"train.{name}={off}" for name, off in vocabulary if getattr(train, name))
        return Advice(
            ("polish.start=fresh", "polish.max_steps=-1", *without),
            "no ratio fits; plain LoRA steps on the full model, one layer in memory, need no small one",
        )
    how = () if quantized == setup else (f"train.quantizer={quantized.quantizer}",)
    return Advice(
        (f"prune.ratio={ratio:g}", "align.max_steps=0", f"train.anchors={architecture.layers}", *how),
        "the least that goes is best; anchors after every layer make up for it, or where the disk is short after fewer",
    )
