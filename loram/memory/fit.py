"""Whether something fits, and what would make it: before anything costly begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loram.errors import NoRoomError, RecipeError
from loram.memory.devices import DEVICE_LINES, Sharding, per_device
from loram.memory.disk import free_disk
from loram.memory.plan import COMPONENTS, components, pruned_widths
from loram.memory.setup import TrainingSetup
from loram.memory.training import training_memory
from loram.memory.units import size
from loram.models.shape import ModelShape, Widths
from loram.recipe import PruneSection

ALLOWANCE_BYTES = 614 << 20
"""0.6 GiB on a card for what the memory model leaves out: the CUDA context, what the allocator rounds up and cannot
use again, and what kernels allocate. An estimate, not measured."""

_MOST_ROWS = 1 << 16
_MOST_TOKENS = 1 << 20
_STEPS = 1000  # ratios are searched in thousandths


@dataclass(frozen=True)
class Fit:
    """A training step against the memory of a device; `needed` includes the allowance.

    `smallest_ratio`, `largest_batch` and `largest_length` are each the least change that fits, all else as it is;
    None: no value does.
    """

    needed: int
    available: int
    allowance: int
    largest_component: str
    largest_component_bytes: int
    smallest_ratio: float | None
    largest_batch: int | None
    largest_length: int | None

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}

    def require(self, section: str, device: str, hint: str = "") -> None:
        """Refuses what does not fit (NoRoomError).

        Args:
            section: the recipe's, `align` or `train`.
            device: what people call it.
            hint: what else can be done.
        """
        if self.fits:
            return
        allowance = f", {size(self.allowance)} of it for context and allocator" if self.allowance else ""
        raise NoRoomError(
            f"{section}: a step needs {size(self.needed)}{allowance}, and {device} has {size(self.available)}. "
            f"The largest part: {self.largest_component}, {size(self.largest_component_bytes)}.",
            fix=f"{self.remedy(section)} {hint}".rstrip(),
        )

    def remedy(self, section: str) -> str:
        """What to set in the recipe."""
        ways = []
        if self.smallest_ratio is not None:
            ways.append(f"prune.ratio={self.smallest_ratio:g} or more")
        if self.largest_batch is not None:
            ways.append(f"{section}.per_device_train_batch_size={self.largest_batch}")
        if self.largest_length is not None:
            ways.append(f"{section}.max_length={self.largest_length}")
        if not ways:
            return "No ratio, batch or length alone makes it fit; lower several, or use a larger device."
        return f"Any of these makes it fit: {', '.join(ways)}."


def fit(
    shape: ModelShape,
    widths: Widths,
    setup: TrainingSetup,
    available: int,
    prune: PruneSection,
    devices: int = 1,
    sharding: Sharding = "fsdp",
) -> Fit:
    """Holds a step against `available` bytes.

    Args:
        shape: the base.
        widths: of the model that trains.
        setup: how it trains.
        available: bytes of a device.
        prune: where ratios are searched.
        devices: how many train together.
        sharding: how they share the model.
    """
    allowance = ALLOWANCE_BYTES if setup.device == "cuda" else 0

    def needed(widths: Widths, setup: TrainingSetup) -> int:
        return per_device(shape, widths, setup, devices, sharding).peak + allowance

    def with_ratio(ratio: float) -> bool:
        return needed(pruned_widths(shape.architecture, prune, ratio), setup) <= available

    parts = {COMPONENTS[name]: count for name, count in components(training_memory(shape, widths, setup)).items()}
    if devices > 1:
        lines = per_device(shape, widths, setup, devices, sharding)
        parts = {DEVICE_LINES[name]: count for name, count in lines.to_dict().items() if name != "peak"}
    largest = max(parts, key=lambda name: parts[name])
    return Fit(
        needed=needed(widths, setup),
        available=available,
        allowance=allowance,
        largest_component=largest,
        largest_component_bytes=parts[largest],
        smallest_ratio=smallest_ratio(with_ratio),
        largest_batch=largest_count(lambda n: needed(widths, replace(setup, batch=n)) <= available, 1, _MOST_ROWS),
        largest_length=largest_count(lambda n: needed(widths, replace(setup, length=n)) <= available, 2, _MOST_TOKENS),
    )


def smallest_ratio(good: Callable[[float], bool]) -> float | None:
    """The smallest ratio, in thousandths, for which `good` holds; None if it holds for none.

    Units kept fall with the ratio in steps, and sizes with them, so `good` holds from some ratio on. The search ends
    on a ratio that holds and the thousandth below it that does not, both evaluated.
    """
    try:
        if not good((_STEPS - 1) / _STEPS):
            return None
    except RecipeError:  # the layers that stay whole leave none to cut
        return 0.0 if good(0.0) else None
    bad = largest_count(lambda n: not good(n / _STEPS), 0, _STEPS - 1)
    return 0.0 if bad is None else (bad + 1) / _STEPS


def largest_count(good: Callable[[int], bool], least: int, most: int) -> int | None:
    """The largest whole number for which `good` holds, where it holds up to some number; None if not for `least`."""
    if not good(least):
        return None
    if good(most):
        return most
    step = 1
    while least + step < most and good(least + step):
        least, step = least + step, 2 * step
    bad = min(least + step, most)
    while bad - least > 1:
        middle = (least + bad) // 2
        least, bad = (middle, bad) if good(middle) else (least, middle)
    return least


def require_disk(folder: Path, needed: int, what: str) -> None:
    """Refuses to begin what would fill the disk (NoRoomError)."""
    free = free_disk(folder)
    if needed > free:
        raise NoRoomError(
            f"{what}: writes up to {size(needed)} below {folder}, and {size(free)} are free there.",
            fix="Free some, choose another --artifacts folder, or give --force to go on all the same.",
        )
