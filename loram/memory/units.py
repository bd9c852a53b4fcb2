"""Bytes as people write them."""

from __future__ import annotations

import re

from loram.errors import RecipeError

_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS = {"": 1, "b": 1, **_DECIMAL, **_BINARY}


def parse_size(text: str) -> int:
    """Bytes of `20GiB`, `24 GB`, `512MiB` or a plain number; binary and decimal units are told apart.

    Raises:
        RecipeError: no number with a known unit, or less than a byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    unit = _UNITS.get(match[2].lower()) if match else None
    count = 0 if match is None or unit is None else int(float(match[1]) * unit)
    if count < 1:
        raise RecipeError(f"'{text}' is no size.", fix="Write it as 20GiB, 24GB, 512MiB or in bytes.")
    return count


def size(count: int) -> str:
    """`8.54 GiB`: three digits or more, in the largest binary unit of which there is one."""
    for name, unit in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= unit:
            value = count / unit
            return f"{value:.2f} {name}" if value < 100 else f"{value:,.1f} {name}"
    return f"{count} B"
