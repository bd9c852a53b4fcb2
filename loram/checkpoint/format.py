"""The safetensors file layout: 8 bytes of header length, a JSON header, then the tensors' bytes.

https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# A header above this is refused by the reference implementation too.
MAX_HEADER_BYTES = 100_000_000
# What is read, computed and written at a time. Small enough to stay in the processor's caches and for the allocator
# to hand the same memory out again; measured on 2 cores, 4 to 16 MiB are equally fast and 64 MiB a third slower.
BLOCK_BYTES = 8 << 20

# linux/fs.h, RWF_DONTCACHE (Linux 6.14): read or write without leaving pages behind. A stream of many GB gains nothing
# from the page cache, and filling it costs more than the disk does. Measured here: writes 2 to 7 times as fast.
_DONTCACHE = 0x80
_dontcache_works = hasattr(os, "pwritev") and hasattr(os, "RWF_DSYNC")

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Block:
    """Consecutive rows of a tensor on their way from one file to another.

    `hole`: zeros that no disk block holds in the source, to stay so. `unchanged`: the same bytes as in the base's
    file at the same tensor, so a cloned shard has them already.
    """

    data: torch.Tensor
    hole: bool = False
    unchanged: bool = False


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def byte_view(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous uint8 CPU tensor, without copying."""
    array: Any = flat.numpy()
    return memoryview(array)


def read_at(descriptor: int, out: memoryview, offset: int, once: bool) -> bool:
    """Fills `out` from a file; False where the file ends too early.

    `once`: leave nothing in the page cache that was not there, where the system can.
    """
    while out:
        count = _uncached(os.preadv, descriptor, out, offset) if once else os.preadv(descriptor, [out], offset)
        if count == 0:
            return False
        out, offset = out[count:], offset + count
    return True


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Writes all of `data`, leaving nothing in the page cache where the system can."""
    while data:
        count = _uncached(os.pwritev, descriptor, data, offset)
        data, offset = data[count:], offset + count


def _uncached(call: Callable[..., int], descriptor: int, data: memoryview, offset: int) -> int:
    global _dontcache_works
    if _dontcache_works:
        try:
            return call(descriptor, [data], offset, _DONTCACHE)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            _dontcache_works = False  # an older kernel, or a file system that cannot
    return call(descriptor, [data], offset)
