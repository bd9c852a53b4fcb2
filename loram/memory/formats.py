"""The forms in which a frozen weight takes fewer bits, as bytes: what is stored, and what unpacking needs.

`loram.models.quantizers` makes them; a test holds both equal. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

FLOAT64 = 8
FLOAT32 = 4
FLOAT16 = 2

# bitsandbytes' 4-bit format (`functional.quantize_4bit`).
BLOCK = 64
NESTED_BLOCK = 256
_CODE_BYTES = 16 * FLOAT32  # the 16 values of the format, one table a tensor
_NESTED_CODE_BYTES = 256 * FLOAT32  # the 8-bit values of the constants, a table copied for every tensor too

# HQQ's groups (`hqq.core.quantize.Quantizer`): values with a scale and a zero of their own.
GROUP = 64
GROUPS = 4
"""Groups come in fours, so that 2 and 4 bits fill whole bytes."""
PER_INT32 = 10
"""3-bit values in an int32."""


class Format(Protocol):
    """A form of a weight [rows, columns]."""

    @property
    def bits(self) -> int:
        """Of one weight, without constants."""

    @property
    def package(self) -> str:
        """The library whose format it is."""

    def nbytes(self, rows: int, columns: int, double_quant: bool) -> int:
        """Stored, with constants and tables. `double_quant`: constants quantized too, where the format can."""

    def unpacking(self, rows: int, columns: int, itemsize: int, double_quant: bool) -> int:
        """The most alive while the weight is unpacked, itself at `itemsize` included."""


@dataclass(frozen=True)
class Blockwise4:
    """NF4 and FP4: 4-bit codes with a constant for every 64 (QLoRA, arXiv 2305.14314)."""

    bits: int = 4
    package: str = "bitsandbytes"

    def nbytes(self, rows: int, columns: int, double_quant: bool) -> int:
        blocks = -(-rows * columns // BLOCK)
        constants = blocks * FLOAT32
        if double_quant:
            offset = FLOAT32
            constants = blocks + -(-blocks // NESTED_BLOCK) * FLOAT32 + offset + _NESTED_CODE_BYTES
        return blocks * BLOCK // 2 + constants + _CODE_BYTES

    def unpacking(self, rows: int, columns: int, itemsize: int, double_quant: bool) -> int:
        blocks = -(-rows * columns // BLOCK)
        return blocks * BLOCK * itemsize + (blocks * FLOAT32 if double_quant else 0)


@dataclass(frozen=True)
class Rowwise8:
    """int8 with a float32 scale for every row (LLM.int8's weights, arXiv 2208.07339)."""

    bits: int = 8
    package: str = "bitsandbytes"

    def nbytes(self, rows: int, columns: int, double_quant: bool) -> int:
        return rows * columns + rows * FLOAT32

    def unpacking(self, rows: int, columns: int, itemsize: int, double_quant: bool) -> int:
        return rows * columns * itemsize + rows * itemsize


@dataclass(frozen=True)
class Grouped:
    """HQQ: unsigned integers with a float16 scale and zero for every 64, found without data."""

    bits: int
    package: str = "hqq"

    def nbytes(self, rows: int, columns: int, double_quant: bool) -> int:
        groups = self.groups(rows, columns)
        packed = -(-groups // PER_INT32) * GROUP * 4 if self.bits == 3 else groups * GROUP * self.bits // 8
        return packed + 2 * groups * FLOAT16

    def unpacking(self, rows: int, columns: int, itemsize: int, double_quant: bool) -> int:
        groups = self.groups(rows, columns)
        if self.bits == 3:
            rest = -(-groups // PER_INT32)  # the last int32 may hold groups that are not there; masks are int32
            return rest * PER_INT32 * GROUP * itemsize + 2 * rest * GROUP * 4
        return groups * GROUP * itemsize + 2 * groups * GROUP * self.bits // 8

    def groups(self, rows: int, columns: int) -> int:
        """Groups of a weight, the last ones filled up with zeros."""
        return -(-rows * columns // (GROUP * GROUPS)) * GROUPS


FORMATS: Mapping[str, Format] = {
    "nf4": Blockwise4(),
    "fp4": Blockwise4(),
    "int8": Rowwise8(),
    "hqq4": Grouped(4),
    "hqq3": Grouped(3),
    "hqq2": Grouped(2),
}
