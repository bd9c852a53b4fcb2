"""Operations written down in order, and the bytes alive while they and their gradients are computed.

The rules are autograd's: a tensor lives until its last use, or, if an operation saves it, until that operation's
backward; a gradient lives from the first operation that adds to it until its tensor's own operation has run
backward; gradients of parameters stay. Views and tensors passed through share a storage and are counted once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Storage:
    """Memory behind one or several tensors; `bytes` 0 for what is counted elsewhere (parameters)."""

    bytes: int


@dataclass(eq=False)
class Tensor:
    """Of `elements` with `itemsize` bytes each, which its gradient has as well."""

    elements: int
    itemsize: int
    storage: Storage
    needs_grad: bool

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize


@dataclass(frozen=True)
class Profile:
    """One stretch of a step in bytes, its input counted in each number where it is alive.

    `saved`: kept from its forward to its backward. `forward_peak`: the most while it runs and saves;
    `forward_peak_unsaved`: while it runs and saves nothing (under activation checkpointing). `backward_peak`: the
    most during its backward, what it saved and the gradient that comes in included. `gradients`: of parameters,
    left over by its backward.
    """

    saved: int
    forward_peak: int
    forward_peak_unsaved: int
    backward_peak: int
    gradients: int


@dataclass(eq=False)
class _Operation:
    inputs: tuple[Tensor, ...]
    output: Tensor
    saves: tuple[Storage, ...]
    passes: bool
    work: int
    backward_work: int
    trains: int
    keeps: list[Storage] = field(default_factory=list)

    @property
    def uses(self) -> tuple[Storage, ...]:
        """What has to be alive until it is done."""
        return (*(tensor.storage for tensor in (*self.inputs, self.output)), *self.keeps)


@dataclass
class Tape:
    """Records a stretch of operations; `accumulating`: parameter gradients exist already and are added to."""

    accumulating: bool = False
    _operations: list[_Operation] = field(default_factory=list)
    _inputs: list[Tensor] = field(default_factory=list)
    _held: list[Storage] = field(default_factory=list)

    def input(self, elements: int, itemsize: int, needs_grad: bool) -> Tensor:
        """A tensor that comes from outside."""
        tensor = Tensor(elements, itemsize, Storage(elements * itemsize), needs_grad)
        self._inputs.append(tensor)
        return tensor

    def hold(self, tensor: Tensor) -> None:
        """Keeps a tensor to the end of the forward."""
        self._held.append(tensor.storage)

    def outlives(self, tensor: Tensor) -> None:
        """Keeps a tensor until the newest operation is done, as a local variable of its caller does."""
        self._operations[-1].keeps.append(tensor.storage)

    def run(
        self,
        inputs: Sequence[Tensor],
        elements: int,
        itemsize: int,
        *,
        saves: Iterable[Tensor | Storage] = (),
        saves_output: bool = False,
        shares: Tensor | None = None,
        passes: bool = False,
        work: int = 0,
        backward_work: int = 0,
        trains: int = 0,
    ) -> Tensor:
        """Records one operation and gives its output.

        Args:
            inputs: tensors it reads; those that need gradients get one each in backward.
            elements: of the output.
            itemsize: of the output, in bytes.
            saves: kept for backward, if there will be one.
            saves_output: the output is kept too.
            shares: the tensor whose memory the output is.
            passes: backward hands the output's gradient on as it is.
            work: bytes it needs besides its output, while it runs.
            backward_work: the same for its backward.
            trains: bytes of the parameter gradients that its backward leaves.
        """
        needs_grad = bool(trains) or any(tensor.needs_grad for tensor in inputs)
        storage = Storage(elements * itemsize) if shares is None else shares.storage
        output = Tensor(elements, itemsize, storage, needs_grad)
        kept = [item if isinstance(item, Storage) else item.storage for item in saves]
        if saves_output:
            kept.append(storage)
        if not needs_grad:
            kept = []
        self._operations.append(
            _Operation(tuple(inputs), output, tuple(dict.fromkeys(kept)), passes, work, backward_work, trains)
        )
        return output

    def profile(self) -> Profile:
        """Runs what was recorded forward and backward."""
        saved = {storage for operation in self._operations for storage in operation.saves}
        backward_peak, gradients = self._backward()
        return Profile(
            saved=_bytes(saved),
            forward_peak=self._forward(saved),
            forward_peak_unsaved=self._forward(set()),
            backward_peak=backward_peak,
            gradients=gradients,
        )

    def _forward(self, saved: set[Storage]) -> int:
        last = {storage: moment for moment, operation in enumerate(self._operations) for storage in operation.uses}
        kept = saved | set(self._held) | {self._operations[-1].output.storage}
        alive = {tensor.storage for tensor in self._inputs}
        now = peak = _bytes(alive)
        for moment, operation in enumerate(self._operations):
            fresh = {operation.output.storage, *(s for s in operation.saves if s in saved)} - alive
            alive |= fresh
            now += _bytes(fresh)
            peak = max(peak, now + operation.work)
            done = {storage for storage in operation.uses if last[storage] == moment} & (alive - kept)
            alive -= done
            now -= _bytes(done)
        return peak

    def _backward(self) -> tuple[int, int]:
        """(peak, bytes of parameter gradients left)."""
        owed = Counter(storage for operation in self._operations for storage in operation.saves)
        pending: dict[Tensor, Storage] = {}
        users: Counter[Storage] = Counter()
        now, gradients = _bytes(owed), 0

        def take(storage: Storage) -> int:
            users[storage] += 1
            return storage.bytes if users[storage] == 1 else 0

        def drop(storage: Storage) -> int:
            users[storage] -= 1
            return 0 if users[storage] else storage.bytes

        last = self._operations[-1].output
        if last.needs_grad:
            pending[last] = Storage(last.bytes)
            now += take(pending[last])
        peak = now
        for operation in reversed(self._operations):
            if not operation.output.needs_grad:
                continue
            incoming = pending.pop(operation.output)
            given = [
                (tensor, incoming if operation.passes else Storage(tensor.bytes))
                for tensor in operation.inputs
                if tensor.needs_grad
            ]
            now += sum(take(gradient) for _, gradient in given) + operation.trains
            peak = max(peak, now + operation.backward_work)
            if self.accumulating:
                now -= operation.trains
            else:
                gradients += operation.trains
            for storage in operation.saves:
                owed[storage] -= 1
                now -= 0 if owed[storage] else storage.bytes
            now -= drop(incoming)
            for tensor, gradient in given:
                before = pending.get(tensor)
                if before is None:
                    pending[tensor] = gradient
                elif users[before] == 1:  # autograd adds in place to what nothing else uses
                    now -= drop(gradient)
                else:
                    pending[tensor] = Storage(tensor.bytes)
                    now += take(pending[tensor])
                    peak = max(peak, now)
                    now -= drop(before) + drop(gradient)
        return peak, gradients


def _bytes(storages: Iterable[Storage]) -> int:
    return sum(storage.bytes for storage in storages)
