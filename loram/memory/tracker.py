"""The bytes of tensors alive while something runs: the measurement that the memory model is checked against.

`LiveBytes` counts storages as they are created and freed, with the operation that created them. It does not see what
a kernel allocates for itself, and while it is on, autograd never adds gradients in place
(torch/csrc/autograd/input_buffer.cpp), so a backward may hold one more than without it. `AllocatedBytes` asks the
CPU allocator: no names, but every byte and nothing changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Note = Callable[[str, int], None]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages created since entry, in forward and backward alike.

    `current` are those alive now, `peak` the most at any moment since entry or the last `reset_peak`. A storage is
    counted once however many tensors and views share it, and leaves the count when its last user does. Storages
    that existed at entry are not counted.

    Args:
        note: called after every operation that created a storage, with the operation's name and `current`.
    """

    def __init__(self, note: Note | None = None) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self._note = note
        self._sizes: dict[int, int] = {}

    def reset_peak(self) -> None:
        """Starts a new peak at what is alive now."""
        self.peak = self.current

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {_key(tensor) for tensor in _tensors((args, kwargs))}
        out = self._run(func, args, kwargs or {})
        created = [tensor for tensor in _tensors(out) if _key(tensor) not in before]
        if sum([self._add(tensor) for tensor in created]):
            self.peak = max(self.peak, self.current)
            if self._note is not None:
                self._note(str(func), self.current)
        return out

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operation; with this mode still on for operators of other packages, whose kernels call torch again."""
        if func.namespace in ("aten", "prim", "prims") or not (device := _device((args, kwargs))):
            return func(*args, **kwargs)
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA if device == "cuda" else torch._C.DispatchKey.CPU)
        with self:
            return func.redispatch(keys, *args, **kwargs)

    def _add(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or not storage.nbytes():
            return False
        self._sizes[key] = storage.nbytes()
        self.current += storage.nbytes()
        weakref.finalize(storage, self._free, key)
        return True

    def _free(self, key: int) -> None:
        self.current -= self._sizes.pop(key)


class AllocatedBytes:
    """What torch's CPU allocator handed out within a block, from the profiler's record of it.

    After the block, `peak` is the most that was out at any moment, of what was allocated within, and `current` what
    is still out.
    """

    def __init__(self) -> None:
        self.peak = 0
        self.current = 0
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )

    def __enter__(self) -> AllocatedBytes:
        self._profile.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._profile.__exit__(*exception)
        sizes: dict[int, int] = {}
        for address, size in self._events():
            if size > 0:
                sizes[address] = size
                self.current += size
            else:
                self.current -= sizes.pop(address, 0)  # 0: allocated before the block
            self.peak = max(self.peak, self.current)

    def _events(self) -> Iterator[tuple[int, int]]:
        """(address, bytes) of each allocation, and of each release with negative bytes, in order of time."""
        results: Any = self._profile.profiler and self._profile.profiler.kineto_results
        pending = list(results.experimental_event_tree())
        found = []
        while pending:
            event = pending.pop()
            pending += event.children
            if event.tag == torch._C._profiler._EventType.Allocation:
                found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        for _, address, size in sorted(found, key=lambda item: item[0]):
            yield address, size


@dataclass
class SavedBytes:
    """What autograd keeps for the backward pass: distinct storages, without parameters and buffers."""

    total: int = 0
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)
    """Of the tensor that first brought each storage along."""


@contextmanager
def saved_bytes(model: nn.Module, *ignored: torch.Tensor) -> Iterator[SavedBytes]:
    """Counts the storages that operations within the block save for backward.

    Args:
        model: its parameters and buffers are not counted, nor what quantized weights carry along.
        ignored: tensors not to count, such as the batch.
    """
    known = {_key(tensor) for tensor in (*model.parameters(), *model.buffers(), *ignored)}
    saved = SavedBytes()
    kept: list[torch.Tensor] = []  # keeps every storage alive, so that none can take the place of another

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if _key(tensor) not in known:
            known.add(_key(tensor))
            kept.append(tensor.detach())
            saved.total += tensor.untyped_storage().nbytes()
            saved.shapes.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
    kept.clear()


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    return sum({_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _device(tree: Any) -> str | None:
    return next((tensor.device.type for tensor in _tensors(tree)), None)
