"""The one way to write shards: layout first, then tensors in that order, never a whole shard in memory."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch

from loram.checkpoint.format import DTYPE_NAMES, INDEX_NAME, byte_view

# Weights in any form: what a stage writes itself, so never copied along from a base folder.
_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", INDEX_NAME)


# What says something about one folder only: never copied along either.
_OWN_FILES = {"config.json", "manifest.json", "plan.json", "history.jsonl", "adapter_config.json"}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class CheckpointWriter:
    """Writes a model folder whose layout is known beforehand.

    Args:
        folder: where to write; created.
        layout: shard name → its tensors in the order in which `write` will be called.

    Every shard carries `format: pt` (transformers refuses others). An index is written when there is more than
    one shard, or when the only one has a numbered name. `digests` holds each shard's sha256, computed on the way.
    """

    def __init__(self, folder: Path, layout: Mapping[str, Sequence[TensorSpec]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.digests: dict[str, str] = {}
        self._layout = {shard: list(specs) for shard, specs in layout.items() if specs}
        self._queue = [(shard, spec) for shard, specs in self._layout.items() for spec in specs]
        self._next = 0
        self._shard: str | None = None
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._file is not None:
            self._file.close()

    @property
    def specs(self) -> list[TensorSpec]:
        """All tensors in the order in which they are written."""
        return [spec for _, spec in self._queue]

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes the next tensor of the layout; a wrong name, dtype or shape is a programming error."""
        shard, spec = self._queue[self._next]
        if (name, tensor.dtype, tuple(tensor.shape)) != (spec.name, spec.dtype, spec.shape):
            raise ValueError(f"expected {spec}, got {name} {tensor.dtype} {tuple(tensor.shape)}")
        if shard != self._shard:
            self._finish_shard()
            self._start_shard(shard)
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        self._put(byte_view(flat))
        self._next += 1

    def close(self) -> None:
        """Finishes the last shard and writes the index."""
        if self._next != len(self._queue):
            raise ValueError(f"only {self._next} of {len(self._queue)} tensors were written")
        self._finish_shard()
        if len(self._layout) > 1 or any("-of-" in shard for shard in self._layout):
            index = {
                "metadata": {"total_size": sum(spec.nbytes for _, spec in self._queue)},
                "weight_map": {spec.name: shard for shard, spec in self._queue},
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self.folder / INDEX_NAME).write_text(text, encoding="utf-8")

    def _start_shard(self, shard: str) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for spec in self._layout[shard]:
            header[spec.name] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.nbytes],
            }
            offset += spec.nbytes
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)  # the format asks for tensors to start 8-byte aligned
        self._shard, self._hash = shard, hashlib.sha256()
        self._file = (self.folder / shard).open("wb", buffering=0)
        self._put(memoryview(len(encoded).to_bytes(8, "little") + encoded))

    def _put(self, data: memoryview) -> None:
        assert self._file is not None
        self._hash.update(data)
        while data:
            data = data[self._file.write(data) :]

    def _finish_shard(self) -> None:
        if self._file is None or self._shard is None:
            return
        self._file.close()
        self._file = None
        self.digests[self._shard] = self._hash.hexdigest()


def side_files(folder: Path) -> list[Path]:
    """The files of a folder that are neither weights nor hidden, by name."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.startswith(".") and not any(path.match(p) for p in _WEIGHT_PATTERNS)
    ]


def copy_side_files(source: Path, target: Path) -> None:
    """Copies what a model folder holds beside weights, byte for byte: tokenizer, template, generation config, licence.

    config.json and what belongs to the artifact (manifest, plan, history) are the caller's to write.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in side_files(source):
        if path.name not in _OWN_FILES:
            shutil.copyfile(path, target / path.name)
