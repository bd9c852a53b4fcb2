"""A plan as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loram.errors import MissingPackageError, RecipeError
from loram.memory.devices import DEVICE_LINES
from loram.memory.units import size
from loram.report.picture import save

_GIB = 2**30
_COLOURS = {
    "weights": "#4c78a8",
    "adapter": "#72b7b2",
    "gradients": "#eeca3b",
    "optimizer": "#f58518",
    "buckets": "#b279a2",
    "gathered": "#9d755d",
    "working": "#54a24b",
}


def require_picture(path: Path) -> None:
    """Refuses a picture that could not be drawn, before the work.

    Raises:
        RecipeError: another kind of file than .svg or .png.
        MissingPackageError: matplotlib is not installed.
    """
    if path.suffix.lower() not in (".svg", ".png"):
        raise RecipeError(f"'{path}' is neither .svg nor .png.", fix="Give the picture one of these endings.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            f"--picture needs matplotlib ({error}).", fix='pip install matplotlib, or pip install "loram[plots]".'
        ) from error


def draw_memory(planned: dict[str, Any], path: Path) -> None:
    """Where the memory of one device goes for each way to train, as stacked bars; they end at the peak.

    Raises:
        InputError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    ways = list(planned["training"].values())
    labels = [f"{way['label']}\n{size(way['per_device']['peak'])}" for way in ways]
    figure = Figure(figsize=(9, 0.8 + 0.6 * len(ways)), layout="constrained")
    axes = figure.add_subplot()
    left = [0.0] * len(ways)
    for key, colour in _COLOURS.items():
        values = [way["per_device"][key] / _GIB for way in ways]
        if any(values):
            axes.barh(labels, values, left=left, label=DEVICE_LINES[key], color=colour)
            left = [start + value for start, value in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("GiB on a device")
    axes.set_title(f"{planned['recipe']}: memory of a training step")
    axes.legend(loc="lower right", frameon=False)
    save(figure, path, "--picture")
