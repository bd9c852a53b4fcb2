"""Which rows each optimizer step takes: a batch sampler whose batches are whole steps.

The order depends on seed and epoch alone, not on how many rows go through the model at once, so a run that had to
lower that number learns from the same rows in the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from loram import processes
from loram.data.tokens import IGNORED


class StepSampler(torch.utils.data.Sampler[list[int]]):
    """Yields the row numbers of one optimizer step after the other, an epoch at a time.

    With `rows_per_step` the rows are shuffled every epoch and cut into steps of that many; an epoch's last step takes
    what is left. With `tokens_per_step` rows are grouped once, in the order they lie in: a step is closed by the row
    with which it has at least that many loss tokens (the last one may have fewer), and every epoch shuffles the steps.
    So an epoch has the same number of steps each time, which resuming counts on.

    Args:
        rows: how many rows there are.
        rows_per_step: for steps of equal numbers of rows.
        tokens_per_step: loss tokens, for steps of as many rows as it takes; `loss_tokens` are then those of each row.
        seed: of the shuffling; epoch e is shuffled with seed + e.
    """

    drop_last = False

    def __init__(
        self,
        rows: int,
        seed: int,
        rows_per_step: int = 1,
        tokens_per_step: int | None = None,
        loss_tokens: Sequence[int] = (),
    ) -> None:
        self.batch_size = rows_per_step if tokens_per_step is None else None
        self._rows = rows
        self._seed = seed
        self._rows_per_step = rows_per_step
        self._groups = None if tokens_per_step is None else group(loss_tokens, tokens_per_step)
        self._epoch = 0

    def __len__(self) -> int:
        return -(-self._rows // self._rows_per_step) if self._groups is None else len(self._groups)

    def __iter__(self) -> Iterator[list[int]]:
        for step in self._epoch_steps(self._epoch):
            yield share(step, processes.rank(), processes.count())
        self._epoch += 1

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next iteration yields, counted from 0."""
        self._epoch = epoch

    def rows_of(self, step: int) -> list[int]:
        """The rows of an optimizer step, counted from 1 over all epochs."""
        epoch, place = divmod(step - 1, len(self))
        return self._epoch_steps(epoch)[place]

    def rows_used(self, steps: int) -> list[int]:
        """The rows of so many optimizer steps, each once, ascending; an epoch has them all."""
        return sorted(row for step in self._epoch_steps(0)[:steps] for row in step)

    def _epoch_steps(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self._seed + epoch)
        count = self._rows if self._groups is None else len(self._groups)
        order: list[int] = torch.randperm(count, generator=generator).tolist()
        if self._groups is not None:
            return [self._groups[number] for number in order]
        return [order[start : start + self._rows_per_step] for start in range(0, self._rows, self._rows_per_step)]


def share(step: list[int], rank: int, count: int) -> list[int]:
    """The rows of a step that one of several processes takes: every count-th.

    All take equally many, so that they exchange gradients and weights as often; what is missing is `~row`, a row that
    counts for nothing.
    """
    own = step[rank::count]
    return own + [~step[0]] * (-(-len(step) // count) - len(own))


def group(loss_tokens: Sequence[int], tokens_per_step: int) -> list[list[int]]:
    """Consecutive rows in groups of at least `tokens_per_step` loss tokens, each as short as that allows."""
    groups: list[list[int]] = []
    room = 0
    for number, tokens in enumerate(loss_tokens):
        if room <= 0:
            groups.append([])
            room = tokens_per_step
        groups[-1].append(number)
        room -= tokens
    return groups


def count_loss_tokens(rows: torch.utils.data.Dataset[dict[str, torch.Tensor]], count: int) -> list[int]:
    """Labelled tokens of each row; a row's first token is predicted by nothing and never counts."""
    return [int((rows[number]["labels"][1:] != IGNORED).sum()) for number in range(count)]
