"""The one way to write shards: layout first, then tensors in that order, never a whole shard in memory."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch

from loram.checkpoint.format import DTYPE_NAMES, INDEX_NAME, Block, TensorSpec, byte_view, write_at
from loram.checkpoint.overlap import Worker
from loram.checkpoint.reader import CheckpointReader
from loram.errors import InputError

# Weights in any form: what a stage writes itself, so never copied along from a base folder.
_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", INDEX_NAME)

# What says something about one folder only: never copied along either.
_OWN_FILES = {"config.json", "manifest.json", "plan.json", "history.jsonl", "adapter_config.json"}
# linux/fs.h: _IOW(0x94, 9, int)
_FICLONE = 0x40049409
_ZEROS = memoryview(bytes(1 << 20))


class CheckpointWriter:
    """Writes a model folder whose layout is known beforehand.

    Writing and hashing have a thread each, so the caller goes on reading and computing meanwhile.

    Args:
        folder: where to write; created.
        layout: shard name → its tensors in the order in which they will be written.
        base: a model whose shards may be cloned where the layout is its own and the file system shares blocks; then
            only blocks that are not `unchanged` are written.

    Every shard carries `format: pt` (transformers refuses others). An index is written when there is more than
    one shard, or when the only one has a numbered name. `digests` holds each shard's sha256, computed on the way;
    `written` counts the bytes that really went to the disk.

    Raises:
        InputError: the disk is full or the folder cannot be written.
    """

    def __init__(
        self, folder: Path, layout: Mapping[str, Sequence[TensorSpec]], base: CheckpointReader | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.digests: dict[str, str] = {}
        self.written = 0
        self._base = base
        self._layout = {shard: list(specs) for shard, specs in layout.items() if specs}
        self._queue = [(shard, spec) for shard, specs in self._layout.items() for spec in specs]
        self._next = 0
        self._shard: str | None = None
        self._file: BinaryIO | None = None
        self._cloned = False
        self._offset = 0
        self._hash = hashlib.sha256()
        self._hashing, self._writing = Worker("hash"), Worker("write")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self._hashing.stop()
            self._writing.stop()
            if self._file is not None:
                self._file.close()

    @property
    def specs(self) -> list[TensorSpec]:
        """All tensors in the order in which they are written."""
        return [spec for _, spec in self._queue]

    def write(self, name: str, content: torch.Tensor | Iterable[Block]) -> None:
        """Writes the next tensor of the layout, whole or as blocks of rows.

        The content must not change afterwards. A wrong name, dtype or shape is a programming error (ValueError).
        """
        shard, spec = self._queue[self._next]
        if isinstance(content, torch.Tensor):
            content = [Block(content.detach().cpu())]
        if name != spec.name:
            raise ValueError(f"expected {spec}, got {name}")
        if shard != self._shard:
            self._finish_shard()
            self._start_shard(shard)
        rest = spec.nbytes
        for block in content:
            if block.data.dtype != spec.dtype or block.data.shape[1:] != spec.shape[1:]:
                raise ValueError(f"expected {spec}, got {block.data.dtype} {tuple(block.data.shape)}")
            rest -= self._put(block)
        if rest:
            raise ValueError(f"expected {spec}, got {rest} bytes less")
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
        start = len(encoded).to_bytes(8, "little") + encoded
        self._shard, self._hash, self._offset = shard, hashlib.sha256(), 0
        self._file = (self.folder / shard).open("w+b", buffering=0)
        self._cloned = self._clone(shard, header)
        if self._cloned:
            assert self._base is not None
            start = self._base.header(shard)
        self._file.truncate(len(start) + offset)  # what is never written below stays a hole
        prefix = torch.frombuffer(bytearray(start), dtype=torch.uint8)
        self._put(Block(prefix, unchanged=True))

    def _clone(self, shard: str, header: Mapping[str, object]) -> bool:
        """Shares the base shard's disk blocks if it has this very layout and the file system can."""
        if self._base is None or shard not in self._base.shards or self._file is None:
            return False
        theirs = json.loads(self._base.header(shard)[8:])
        if (theirs.get("__metadata__") or {}).get("format") != "pt" or theirs | {"__metadata__": None} != {
            **header,
            "__metadata__": None,
        }:
            return False
        return clone_file(self._base.folder / shard, self._file)

    def _put(self, block: Block) -> int:
        """Hands bytes to both threads; returns how many."""
        assert self._file is not None
        data = _ZEROS if block.hole else byte_view(block.data.contiguous().view(-1).view(torch.uint8))
        count = block.data.numel() * block.data.element_size()
        digest, file, offset = self._hash, self._file, self._offset
        if block.hole:
            self._hashing.do(lambda: _hash_zeros(digest, count))
        else:
            self._hashing.do(lambda: digest.update(data))
        there_already = block.unchanged if self._cloned else block.hole
        if not there_already:
            source = data if not block.hole else memoryview(bytes(count))
            self._writing.do(lambda: self._write_at(file, source, offset))
            self.written += count
        self._offset += count
        return count

    def _write_at(self, file: BinaryIO, data: memoryview, offset: int) -> None:
        try:
            write_at(file.fileno(), data, offset)
        except OSError as error:
            raise InputError(
                f"Cannot write {self.folder / str(self._shard)}: {error.strerror}.",
                fix="Make room, or choose another --artifacts folder.",
            ) from error

    def _finish_shard(self) -> None:
        if self._file is None or self._shard is None:
            return
        self._hashing.finish()
        self._writing.finish()
        self._file.close()
        self._file = None
        self.digests[self._shard] = self._hash.hexdigest()


def clone_file(source: Path, target: BinaryIO) -> bool:
    """Makes `target` share all disk blocks of `source` (Linux FICLONE: btrfs, XFS, bcachefs); False where not."""
    if not sys.platform.startswith("linux"):
        return False
    import fcntl

    with source.open("rb") as file:
        try:
            fcntl.ioctl(target.fileno(), _FICLONE, file.fileno())
        except OSError:
            return False
    return True


def _hash_zeros(digest: hashlib._Hash, count: int) -> None:
    while count > 0:
        digest.update(_ZEROS[:count])
        count -= len(_ZEROS)


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
