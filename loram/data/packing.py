"""Several examples in one row of fixed length, kept apart by restarted positions.

transformers builds a block-diagonal attention mask from `position_ids` that restart when no attention mask is
given, so a packed example sees only itself. Nothing is lost or cut: an example that does not fit opens a new row.

Shape suffixes: B rows, T tokens of a row.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

import torch

from loram.data.encode import IGNORED, Encoded

Batch = dict[str, torch.Tensor]


class PackedRows(torch.utils.data.Dataset[Batch]):
    """Rows of `length` tokens, each holding whole examples (best fit, longest first), then shuffled with `seed`.

    An item has `input_ids`, `position_ids` and `labels`, int64 of shape [T], and `tokens`: how many of the T are
    not padding.
    """

    def __init__(self, examples: Sequence[Encoded], length: int, pad_token_id: int, seed: int | None = 0) -> None:
        self.rows = pack(examples, length)
        if seed is not None:
            random.Random(seed).shuffle(self.rows)
        self._length = length
        self._pad = pad_token_id

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Batch:
        ids: list[int] = []
        positions: list[int] = []
        labels: list[int] = []
        for example in self.rows[number]:
            ids += example.input_ids
            positions += range(len(example))
            labels += [IGNORED, *example.labels[1:]]  # nothing predicts an example's first token
        padding = self._length - len(ids)
        return {
            "input_ids": torch.tensor(ids + [self._pad] * padding),
            "position_ids": torch.tensor(positions + list(range(padding))),
            "labels": torch.tensor(labels + [IGNORED] * padding),
            "tokens": torch.tensor(len(ids)),
        }


def pack(examples: Sequence[Encoded], length: int) -> list[list[Encoded]]:
    """Best-fit decreasing: each example, longest first, goes to the fullest row that still has room for it.

    Raises:
        ValueError: an example is longer than a row.
    """
    rows: list[list[Encoded]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for example in sorted(examples, key=len, reverse=True):
        if len(example) > length:
            raise ValueError(f"an example of {len(example)} tokens does not fit a row of {length}")
        place = bisect_left(room, (len(example), -1))
        if place == len(room):
            rows.append([example])
            free, row = length - len(example), len(rows) - 1
        else:
            free, row = room.pop(place)
            rows[row].append(example)
            free -= len(example)
        insort(room, (free, row))
    return rows


def batches(rows: PackedRows, size: int) -> Iterator[Batch]:
    """Consecutive rows stacked: tensors of shape [B, T]; the last batch may be smaller."""
    for start in range(0, len(rows), size):
        items = [rows[number] for number in range(start, min(start + size, len(rows)))]
        yield {name: torch.stack([item[name] for item in items]) for name in items[0]}


def trimmed(batch: Batch) -> Batch:
    """Drops the columns at the end that are padding in every row."""
    used = int(batch["tokens"].max())
    return {name: tensor[:, :used] if tensor.dim() == 2 else tensor for name, tensor in batch.items()}
