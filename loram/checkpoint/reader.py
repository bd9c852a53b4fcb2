"""Reading a model folder tensor by tensor, or only some rows or columns of one."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from loram.checkpoint.format import (
    BLOCK_BYTES,
    DTYPES,
    INDEX_NAME,
    MAX_HEADER_BYTES,
    SINGLE_NAME,
    Block,
    byte_view,
    read_at,
)
from loram.errors import CheckpointError

# Content samples per tensor for the model's identity: any training moves nearly every weight, so a few are enough.
_SAMPLES = 8
_SAMPLE_BYTES = 256
# Holes of sparse files begin and end at disk blocks, on common file systems of this many bytes.
_PAGE = 4096
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `shard` file name, dtype, shape, and `[begin, end)` bytes in the file."""

    name: str
    shard: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class CheckpointReader:
    """A model folder of safetensors files.

    Opening reads only the headers and refuses a folder that is incomplete: a shard the index names but is not
    there, a tensor the index lists but no shard holds, a file shorter than its header says.

    Tensors are read with `pread` into memory of their own, whole or as a stream of blocks, and nothing of the file
    stays mapped. Several threads may read at once.

    Args:
        folder: the model folder.
        single: name of the file when the weights are in one.

    Raises:
        CheckpointError: the folder is not a complete safetensors model.
    """

    def __init__(self, folder: Path, single: str = SINGLE_NAME) -> None:
        self.folder = folder
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._files: dict[str, int] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for shard, expected in _shards(folder, single).items():
            found = {info.name: info for info in _read_header(folder, shard)}
            missing = [] if expected is None else sorted(expected - found.keys())
            if missing:
                raise CheckpointError(
                    f"{folder / shard} lacks the tensor '{missing[0]}' that {INDEX_NAME} lists there"
                    + (f" ({len(missing)} in all)." if len(missing) > 1 else "."),
                    fix="Download or copy the model again.",
                )
            self.tensors.update(found)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the shard files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(info.nbytes // info.dtype.itemsize for info in self.tensors.values())

    @property
    def shards(self) -> dict[str, list[TensorInfo]]:
        """Shard name → its tensors in file order."""
        grouped: dict[str, list[TensorInfo]] = {}
        for info in sorted(self.tensors.values(), key=lambda info: (info.shard, info.begin)):
            grouped.setdefault(info.shard, []).append(info)
        return grouped

    def info(self, name: str) -> TensorInfo:
        """The tensor's place and shape; CheckpointError if the folder has no such tensor."""
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(
                f"{self.folder} has no tensor '{name}'.",
                fix="Check that the folder holds the whole model of the architecture its config.json names.",
            ) from None

    def read(self, name: str, index: Sequence[int] | None = None, axis: int = 0) -> torch.Tensor:
        """The tensor, or its rows (axis 0) or columns (axis 1) at `index`, in the stored dtype."""
        info = self.info(name)
        if index is None:
            return self._bytes(info, 0, info.nbytes).view(info.dtype).view(info.shape)
        out = torch.empty(kept_shape(info.shape, index, axis), dtype=info.dtype)
        start = 0
        for part in self.parts(name, index, axis, once=False):
            data = part().data
            out[start : start + len(data)] = data
            start += len(data)
        return out

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` of a tensor, and nothing else of it."""
        info = self.info(name)
        row_bytes = info.nbytes // info.shape[0]
        raw = self._bytes(info, start * row_bytes, (stop - start) * row_bytes)
        return raw.view(info.dtype).view(stop - start, *info.shape[1:])

    def parts(
        self, name: str, index: Sequence[int] | None = None, axis: int = 0, once: bool = True
    ) -> Iterator[Callable[[], Block]]:
        """The same as `read`, a few rows at a time (about `BLOCK_BYTES`): functions that each read one block.

        Whole stretches are read and the rest dropped: reading around the rows that are not wanted is slower, down to
        one row in twenty. Stretches without a wanted row, and holes of a sparse file, are not read at all.
        `once`: the system need not keep what was read in its cache.
        """
        info = self.info(name)
        rows = info.shape[0] if info.shape else 1
        step = self.block_rows(name)
        chosen = None if index is None else torch.as_tensor(index, dtype=torch.int64)
        if rows == 0:
            yield lambda: Block(torch.empty(kept_shape(info.shape, index, axis), dtype=info.dtype))
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            here = chosen
            if chosen is not None and axis == 0:
                here = chosen[(chosen >= start) & (chosen < stop)] - start
                if not len(here):
                    continue
            yield functools.partial(self._part, info, start, stop, here, axis, once)

    def block_rows(self, name: str) -> int:
        """Rows in a full block of a tensor."""
        info = self.info(name)
        return max(1, BLOCK_BYTES * (info.shape[0] if info.shape else 1) // max(1, info.nbytes))

    def _part(
        self, info: TensorInfo, start: int, stop: int, chosen: torch.Tensor | None, axis: int, once: bool
    ) -> Block:
        row_bytes = info.nbytes // (info.shape[0] if info.shape else 1)
        shape = (stop - start, *info.shape[1:])
        if self._is_hole(info, start * row_bytes, stop * row_bytes):
            return Block(torch.zeros((), dtype=info.dtype).expand(kept_shape(shape, chosen, axis)), hole=True)
        raw = self._bytes(info, start * row_bytes, (stop - start) * row_bytes, once).view(info.dtype).view(shape)
        return Block(raw if chosen is None else _take(raw, chosen, axis))

    def equal(self, one: str, other: str) -> bool:
        """Whether two tensors have the same shape and values; two blocks in memory."""
        return self.info(one).shape == self.info(other).shape and all(
            torch.equal(a().data, b().data) for a, b in zip(self.parts(one), self.parts(other), strict=True)
        )

    def _is_hole(self, info: TensorInfo, begin: int, end: int) -> bool:
        """True where the file system keeps no data between two byte offsets of the tensor.

        A tensor seldom begins where a disk block does: what lies in its neighbours' blocks has to be zero.
        """
        first, last = -(-(info.begin + begin) // _PAGE) * _PAGE, (info.begin + end) // _PAGE * _PAGE
        if not hasattr(os, "SEEK_DATA") or first >= last:
            return False
        try:
            found = os.lseek(self._descriptor(info.shard), first, os.SEEK_DATA)
        except OSError as error:
            found = last if error.errno == errno.ENXIO else first  # ENXIO: a hole up to the end of the file
        edges = ((begin, first - info.begin), (last - info.begin, end))
        return found >= last and not any(bool(self._bytes(info, a, b - a).any()) for a, b in edges)

    def _descriptor(self, shard: str) -> int:
        descriptor = self._files.get(shard)
        if descriptor is None:
            descriptor = self._files[shard] = os.open(self.folder / shard, os.O_RDONLY)
        return descriptor

    def _bytes(self, info: TensorInfo, offset: int, nbytes: int, once: bool = False) -> torch.Tensor:
        out = torch.empty(nbytes, dtype=torch.uint8)
        if not read_at(self._descriptor(info.shard), byte_view(out), info.begin + offset, once):
            raise CheckpointError(
                f"{self.folder / info.shard} ended inside '{info.name}'.", fix="Download or copy the model again."
            )
        with self._lock:
            self.bytes_read += nbytes
        return out

    def header(self, shard: str) -> bytes:
        """The bytes of a shard before its first tensor."""
        start = min((info.begin for info in self.shards[shard]), default=0)
        return os.pread(self._descriptor(shard), start, 0)

    def identity(self) -> dict[str, str]:
        """What tells this model from any other: digests of the structure and of sampled content.

        `structure` covers every tensor's name, dtype and shape; `content` a few hundred bytes at evenly spaced
        places of every tensor. It reads about 2 KiB a tensor, so it takes the same short time for 70B. It tells
        models apart; it is no checksum against tampering.
        """
        structure, content = hashlib.sha256(), hashlib.sha256()
        for name in sorted(self.tensors):
            info = self.tensors[name]
            structure.update(f"{name}:{info.dtype}:{list(info.shape)}\n".encode())
            last = max(0, info.nbytes - _SAMPLE_BYTES)
            for place in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
                content.update(self._bytes(info, place, min(_SAMPLE_BYTES, info.nbytes)).numpy().tobytes())
        return {"structure": structure.hexdigest(), "content": content.hexdigest()}


def kept_shape(shape: tuple[int, ...], index: Sized | None, axis: int) -> tuple[int, ...]:
    """Shape of what `index` keeps of a tensor along an axis; None keeps all."""
    return shape if index is None else tuple(len(index) if i == axis else size for i, size in enumerate(shape))


def _take(block: torch.Tensor, index: torch.Tensor, axis: int) -> torch.Tensor:
    """`index_select`; numpy's `take` moves the same bits three times as fast."""
    if block.dtype.itemsize not in _INTEGERS:
        return block.index_select(axis, index)
    raw = block.view(_INTEGERS[block.dtype.itemsize]).numpy()
    return torch.from_numpy(raw.take(index.numpy(), axis=axis)).view(block.dtype)


def _shards(folder: Path, single: str) -> dict[str, set[str] | None]:
    """Shard file → tensors the index expects in it (None for a single file, which needs no index)."""
    index = folder / INDEX_NAME
    if index.is_file():
        weight_map = _json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map.", fix="Download or copy the model again.")
        shards: dict[str, set[str] | None] = {}
        for tensor, shard in weight_map.items():
            names = shards.setdefault(str(shard), set())
            assert names is not None
            names.add(str(tensor))
        for shard in shards:
            if Path(shard).name != shard:
                raise CheckpointError(f"{index} names a shard outside the folder: '{shard}'.", fix="Repair the index.")
            if not (folder / shard).is_file():
                raise CheckpointError(
                    f"{index} names the shard '{shard}', which is not there.", fix="Download or copy the model again."
                )
        return shards
    if (folder / single).is_file():
        return {single: None}
    if not folder.is_dir():
        raise CheckpointError(f"No model folder at {folder}.", fix="Check the path.")
    if any(folder.glob("*.bin")) or any(folder.glob("*.gguf")):
        raise CheckpointError(
            f"{folder} has weights, but not as safetensors.", fix="Load it with transformers and save_pretrained it."
        )
    raise CheckpointError(f"{folder} has neither {single} nor {INDEX_NAME}.", fix="Check the path.")


def _json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}", fix="Download or copy the model again.") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path} is not a JSON object.", fix="Download or copy the model again.")
    return parsed


def _read_header(folder: Path, shard: str) -> list[TensorInfo]:
    path = folder / shard

    def corrupt(reason: str) -> CheckpointError:
        return CheckpointError(f"{path} is corrupt: {reason}.", fix="Download or copy the model again.")

    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise corrupt("it has no safetensors header")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = [
                (name, str(item["dtype"]), tuple(int(n) for n in item["shape"]), *map(int, item["data_offsets"]))
                for name, item in header.items()
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise corrupt("its header is not safetensors JSON") from error
    start = 8 + length
    tensors = []
    for name, dtype, shape, begin, end in entries:
        if dtype not in DTYPES:
            raise CheckpointError(f"{path}: '{name}' has dtype {dtype}, which is not supported.")
        if not 0 <= begin <= end or end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
            raise corrupt(f"the bytes of '{name}' do not match its shape {list(shape)}")
        if start + end > size:
            raise corrupt(f"'{name}' should end at byte {start + end}, but the file has {size}")
        tensors.append(TensorInfo(name, shard, DTYPES[dtype], shape, start + begin, start + end))
    return tensors
