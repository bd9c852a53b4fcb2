"""Anchors: what the full model's hidden states have more than the small one's, on the rows that train.

An adapter on a small model learns two things: the task, and to make up for what the small model computes otherwise.
Only the first is of use on the full model. Anchors do the second beforehand. After some decoder layers, the last one
always, each token's hidden state gets a constant added, such that without an adapter it is the full model's. So the
first loss is the full model's, and what is left to learn is the task, seen through the small model's layers.

With the last layer alone that is a constant on the logits, as in proxy-tuning (arXiv 2401.08565) and emulated
fine-tuning (arXiv 2310.12962). They cost one forward pass of both models over the rows, one layer in memory.

Shape suffixes: B rows, T tokens, N all tokens of all rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from loram.checkpoint import Block, CheckpointReader, CheckpointWriter, TensorSpec
from loram.data.packing import PackedRows, alone
from loram.errors import InputError
from loram.memory.spill import Spill
from loram.models.layerwise import LayerwiseModel

ANCHORS_NAME = "anchors.safetensors"
# Of a difference of hidden states; half its relative precision would do.
_DTYPE = torch.bfloat16
_AGAIN = "Make them again: loram anchor RECIPE --remake."

Engine = Callable[[], AbstractContextManager[LayerwiseModel]]


def anchored_layers(layers: int, count: int) -> list[int]:
    """The numbers of `count` decoder layers, evenly spread, the last one among them; of all if there are fewer."""
    count = min(count, layers)
    return [-(-layers * (place + 1) // count) - 1 for place in range(count)]


def write_anchors(
    base: Engine, small: Engine, rows: PackedRows, numbers: Sequence[int], layers: Sequence[int], spill: Spill,
    folder: Path,
) -> dict[str, str]:  # fmt: skip
    """Runs both models over the rows, one at a time, and writes anchors.safetensors; returns its sha256.

    The file holds `rows`, their numbers in order, `starts`, where each begins, and for each anchored layer `LAYER` the
    differences, bfloat16 [N, H].

    Args:
        base: opens the full model; closed before the small one is opened.
        small: opens the small one, in the precision it trains in.
        rows: what trains.
        numbers: of the rows that are wanted, ascending.
        layers: after which there are anchors, ascending.
        spill: where hidden states wait from one model to the other.
        folder: where the file goes.
    """
    batches = [alone(rows[number]) for number in numbers]

    def keep(layer: int, number: int, hidden_BTH: torch.Tensor) -> torch.Tensor:
        if layer in layers:
            spill.put((layer, number), hidden_BTH)
        return hidden_BTH

    def move(layer: int, number: int, hidden_BTH: torch.Tensor) -> torch.Tensor:
        if layer not in layers:
            return hidden_BTH
        full_BTH = spill.take((layer, number)).to(hidden_BTH)
        spill.put((layer, number), (full_BTH.float() - hidden_BTH.float()).to(_DTYPE))
        return full_BTH

    for engine, after, name in ((base, keep, "full model"), (small, move, "small model")):
        with engine() as model:
            model.after_layer = after
            model.forward(batches, description=name)
            hidden = int(model.model.config.hidden_size)
    counts = torch.cat([batch["tokens"] for batch in batches])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    total = int(starts[-1])
    layout = [TensorSpec("rows", torch.int64, (len(counts),)), TensorSpec("starts", torch.int64, (len(starts),))]
    layout += [TensorSpec(str(layer), _DTYPE, (total, hidden)) for layer in layers]
    with CheckpointWriter(folder, {ANCHORS_NAME: layout}) as writer:
        writer.write("rows", torch.as_tensor(numbers, dtype=torch.int64))
        writer.write("starts", starts)
        for layer in layers:
            writer.write(str(layer), (Block(spill.take((layer, number))[0]) for number in range(len(batches))))
    return writer.digests


class Anchors:
    """The file of `write_anchors`, and hooks that add what it holds to a model's hidden states.

    Args:
        folder: where the file is.
        layers: the model's decoder layers.

    Raises:
        CheckpointError: the file is missing or damaged.
        InputError: it has anchors after a layer that the model does not have.
    """

    def __init__(self, folder: Path, layers: Sequence[nn.Module]) -> None:
        self._reader = CheckpointReader(folder, single=ANCHORS_NAME)
        numbers: list[int] = self._reader.read("rows").tolist()
        self._place = {number: place for place, number in enumerate(numbers)}
        self._starts: list[int] = self._reader.read("starts").tolist()
        self._layers = sorted(int(name) for name in self._reader.tensors if name.isdigit())
        self._now: tuple[Sequence[int], int] | None = None
        if self._layers[-1] != len(layers) - 1:
            raise InputError(
                f"{folder} has anchors for a model of {self._layers[-1] + 1} layers, this one has {len(layers)}.",
                fix=_AGAIN,
            )
        self._handles = [layers[n].register_forward_hook(partial(self._move, n)) for n in self._layers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._reader.close()

    @contextmanager
    def at(self, rows: Sequence[int], length: int) -> Iterator[None]:
        """Within it, forward and backward of these rows, cut or padded to `length` tokens, are anchored.

        Raises:
            InputError: a row without anchors.
        """
        for row in rows:
            if row not in self._place:
                raise InputError(f"Row {row} of the training data has no anchors.", fix=_AGAIN)
        self._now = rows, length
        try:
            yield
        finally:
            self._now = None

    def _read(self, layer: int, rows: Sequence[int], length: int) -> torch.Tensor:
        """[B, T, H] of one layer; read when the layer runs, so that no more than one layer's are held."""
        found = []
        for row in rows:
            begin, end = self._starts[self._place[row] : self._place[row] + 2]
            found.append(self._reader.read_rows(str(layer), begin, min(end, begin + length)))
        padded_BTH = pad_sequence(found, batch_first=True)
        return nn.functional.pad(padded_BTH, (0, 0, 0, length - padded_BTH.shape[1]))

    def _move(self, layer: int, module: nn.Module, args: Any, output: Any) -> Any:
        if self._now is None:
            return None
        hidden_BTH = output[0] if isinstance(output, tuple) else output
        moved_BTH = hidden_BTH + self._read(layer, *self._now).to(hidden_BTH.device, hidden_BTH.dtype)
        return (moved_BTH, *output[1:]) if isinstance(output, tuple) else moved_BTH
