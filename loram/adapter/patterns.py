"""PEFT's rank_pattern and alpha_pattern, without PEFT."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

Value = TypeVar("Value", int, float)


def matched(patterns: Iterable[tuple[str, Value]], module: str, default: Value) -> Value:
    """The value of the first pattern that is the module's name or a dotted end of it, as a regular expression."""
    for pattern, value in patterns:
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
