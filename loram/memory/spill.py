"""Tensors kept in memory up to a budget, and in files beyond it."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import torch

from loram.checkpoint.format import byte_view, read_at, write_at
from loram.errors import InputError

_PREFIX = "spill-"


@dataclass(frozen=True)
class _OnDisk:
    path: Path
    dtype: torch.dtype
    shape: torch.Size


class Spill:
    """Holds detached CPU copies of tensors by key.

    Args:
        budget: bytes to hold in memory; a tensor that would exceed them goes to a file of its own.
        folder: where files go, of this spill alone; made when the first one is written.

    `spilled` counts the bytes that went to files.
    """

    def __init__(self, budget: int, folder: Path) -> None:
        self.budget = budget
        self._folder = folder
        self._held: dict[Hashable, torch.Tensor | _OnDisk] = {}
        self._in_memory = 0
        self._files = 0
        self.spilled = 0
        for left in folder.glob(f"{_PREFIX}*"):  # by a process that was killed
            left.unlink(missing_ok=True)

    def put(self, key: Hashable, tensor: torch.Tensor) -> None:
        """Keeps a tensor, replacing what the key held.

        Raises:
            InputError: a file cannot be written.
        """
        self.drop(key)
        tensor = tensor.detach().cpu()
        if self._in_memory + tensor.nbytes <= self.budget:
            # A view would keep all of what it looks at.
            self._held[key] = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
            self._in_memory += tensor.nbytes
            return
        path = self._folder / f"{_PREFIX}{self._files}"
        self._files += 1
        self._held[key] = _OnDisk(path, tensor.dtype, tensor.shape)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("wb", buffering=0) as file:
                write_at(file.fileno(), byte_view(tensor.contiguous().view(-1).view(torch.uint8)), 0)
        except OSError as error:
            raise InputError(
                f"Cannot keep hidden states in {self._folder}: {error.strerror}.",
                fix="Make room there, or allow more memory with --memory.",
            ) from error
        self.spilled += tensor.nbytes

    def get(self, key: Hashable) -> torch.Tensor:
        """The tensor; it stays."""
        held = self._held[key]
        if isinstance(held, torch.Tensor):
            return held
        out = torch.empty(held.shape, dtype=held.dtype)
        with held.path.open("rb", buffering=0) as file:
            if not read_at(file.fileno(), byte_view(out.view(-1).view(torch.uint8)), 0, once=True):
                raise InputError(f"{held.path} is shorter than it was written.", fix="Run the stage again.")
        return out

    def take(self, key: Hashable) -> torch.Tensor:
        """The tensor, which is not kept any longer."""
        tensor = self.get(key)
        self.drop(key)
        return tensor

    def drop(self, key: Hashable) -> None:
        """Forgets a key, if it is there."""
        held = self._held.pop(key, None)
        if isinstance(held, torch.Tensor):
            self._in_memory -= held.nbytes
        elif held is not None:
            held.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Forgets everything and removes the files."""
        for key in list(self._held):
            self.drop(key)
        with contextlib.suppress(OSError):
            self._folder.rmdir()
