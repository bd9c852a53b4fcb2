"""Several examples in one row of fixed length, kept apart by restarted positions.

Where no attention mask is given, transformers takes restarting `position_ids` as the bounds of documents, and
`loram.models.attention` computes each alone; so a packed example sees only itself. Nothing is lost or cut: an example
that does not fit opens a new row. Packing looks at lengths alone; tokens are read when a row is.

Shape suffixes: B rows, T tokens of a row.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from loram.data.tokens import IGNORED, Encoded, Examples, Integers, TokenSet

Batch = dict[str, torch.Tensor]


def alone(row: Batch) -> Batch:
    """A batch of one row, without padding: [1, T] and, of `tokens` and the like, [1]."""
    used = int(row["tokens"])
    return {name: tensor[None, :used] if tensor.dim() else tensor[None] for name, tensor in row.items()}


class PackedRows(torch.utils.data.Dataset[Batch]):
    """Rows of `length` tokens, each holding whole examples (best fit, longest first), then shuffled with `seed`.

    An item has `input_ids`, `position_ids` and `labels`, int64 of shape [T], and `tokens`: how many of the T are
    not padding.
    """

    def __init__(
        self, examples: Examples | Sequence[Encoded], length: int, pad_token_id: int, seed: int | None = 0
    ) -> None:
        self._examples = TokenSet.gather(examples) if isinstance(examples, Sequence) else examples
        self._packing = pack(self._examples.lengths, length)
        order = list(range(len(self._packing)))
        if seed is not None:
            random.Random(seed).shuffle(order)
        self._order = np.array(order, np.int64)
        self._length = length
        self._pad = pad_token_id

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, number: int) -> Batch:
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        ids_T = np.full(self._length, self._pad, np.int64)
        labels_T = np.full(self._length, IGNORED, np.int64)
        positions_T = np.empty(self._length, np.int64)
        used = 0
        for example in self._packing[int(self._order[number])]:
            ids, loss = self._examples[int(example)]
            place = slice(used, used + len(ids))
            ids_T[place] = ids
            positions_T[place] = np.arange(len(ids))
            labels_T[place] = np.where(loss, ids_T[place], IGNORED)
            labels_T[used] = IGNORED  # nothing predicts an example's first token
            used += len(ids)
        positions_T[used:] = np.arange(self._length - used)
        return {
            "input_ids": torch.from_numpy(ids_T),
            "position_ids": torch.from_numpy(positions_T),
            "labels": torch.from_numpy(labels_T),
            "tokens": torch.tensor(used),
        }


@dataclass(frozen=True)
class Packing:
    """Which examples each row holds: row r has `members[starts[r] : starts[r + 1]]`."""

    members: Integers
    starts: Integers

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> Integers:
        return self.members[self.starts[row] : self.starts[row + 1]]


def pack(lengths: Integers, length: int) -> Packing:
    """Best-fit decreasing: each example, longest first, goes to the fullest row that still has room for it.

    Args:
        lengths: tokens of each example.
        length: tokens of a row.

    Raises:
        ValueError: an example is longer than a row.
    """
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order].tolist()
    if descending and descending[0] > length:
        raise ValueError(f"an example of {descending[0]} tokens does not fit a row of {length}")
    shortest = descending[-1] if descending else 0
    # Rows by their free tokens, and a bit for each number of free tokens that some row has: the lowest bit at or
    # above an example's length is the fullest row with room.
    free_rows: dict[int, list[int]] = {}
    there = 0
    rows = 0
    row_of = np.empty(len(order), np.int64)
    for place, size in enumerate(descending):
        fitting = there >> size
        if fitting:
            free = size + (fitting & -fitting).bit_length() - 1
            candidates = free_rows[free]
            row = heapq.heappop(candidates)
            if not candidates:
                there ^= 1 << free
            free -= size
        else:
            row, free = rows, length - size
            rows += 1
        row_of[place] = row
        if free >= shortest:  # else nothing will fit it any more
            candidates = free_rows.setdefault(free, [])
            if not candidates:
                there |= 1 << free
            heapq.heappush(candidates, row)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(row_of, minlength=rows))])
    return Packing(order[np.argsort(row_of, kind="stable")], starts)


def batches(rows: PackedRows, size: int) -> Iterator[Batch]:
    """Consecutive rows stacked: tensors of shape [B, T]; the last batch may be smaller."""
    for start in range(0, len(rows), size):
        items = [rows[number] for number in range(start, min(start + size, len(rows)))]
        yield {name: torch.stack([item[name] for item in items]) for name in items[0]}


def trimmed(batch: Batch) -> Batch:
    """Drops the columns at the end that are padding in every row."""
    used = int(batch["tokens"].max())
    return {name: tensor[:, :used] if tensor.dim() == 2 else tensor for name, tensor in batch.items()}
