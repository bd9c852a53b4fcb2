"""Sizes as people write and read them."""

from __future__ import annotations

import re

from loram.errors import RecipeError

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def parse_size(text: str) -> int:
    """Bytes of `20GiB`, `24 GB`, `512MiB` or a plain number.

    Raises:
        RecipeError: it is none of these.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise RecipeError(f"'{text}' is not a size.", fix="Write it like 20GiB, 24GB or 512MiB.")
    return round(float(match[1]) * units[match[2].lower()])


def size(count: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1: `19.3 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
