"""Which rows a step takes: the Trainer's own order, the same at any number of rows at once, whole groups by tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loram.data.encode import encode_text
from loram.data.packing import PackedRows
from loram.models.source import byte_tokenizer
from loram.training.steps import StepSampler, count_loss_tokens, group


def epochs(sampler: StepSampler, count: int) -> list[list[list[int]]]:
    return [list(sampler) for _ in range(count)]


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**31))
def test_every_row_is_in_one_step_of_an_epoch(rows: int, size: int, seed: int) -> None:
    for steps in epochs(StepSampler(rows, seed, size), 2):
        assert sorted(row for step in steps for row in step) == list(range(rows))
        assert all(len(step) == size for step in steps[:-1])
        assert len(steps) == len(StepSampler(rows, seed, size))


def test_the_order_is_that_of_accelerates_sampler() -> None:
    """So recipes from before steps were cut here keep their results."""
    from accelerate.data_loader import SeedableRandomSampler

    reference = SeedableRandomSampler(range(10), data_seed=3)
    sampler = StepSampler(10, 3, 4)
    for epoch in (0, 1, 2):
        reference.set_epoch(epoch)
        sampler.set_epoch(epoch)
        assert [row for step in sampler for row in step] == list(reference)


def test_the_number_of_an_optimizer_step_gives_its_rows() -> None:
    sampler = StepSampler(10, 1, 4)
    steps = [step for of_epoch in epochs(sampler, 3) for step in of_epoch]
    assert [sampler.rows_of(number) for number in range(1, 10)] == steps
    assert steps[0] != steps[3]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.integers(1, 50))
def test_a_group_is_as_short_as_its_tokens_allow(tokens: list[int], wanted: int) -> None:
    groups = group(tokens, wanted)
    assert [row for rows in groups for row in rows] == list(range(len(tokens)))
    for rows in groups[:-1]:
        assert sum(tokens[row] for row in rows) >= wanted
        assert sum(tokens[row] for row in rows[:-1]) < wanted


def test_epochs_shuffle_groups_and_have_as_many() -> None:
    sampler = StepSampler(6, 0, tokens_per_step=10, loss_tokens=[4, 9, 3, 3, 3, 3])
    assert sampler.batch_size is None
    first, second, third = epochs(sampler, 3)
    assert sorted(first) == sorted(second) == sorted(third) == [[0, 1], [2, 3, 4, 5]]
    assert first != second or second != third
    assert len(sampler) == 2


def test_loss_tokens_are_those_that_the_loss_counts() -> None:
    examples = [encode_text("x" * n, byte_tokenizer()) for n in (5, 3, 20)]
    rows = PackedRows(examples, 24, 0, seed=None)
    counted = count_loss_tokens(rows, len(rows))
    assert sum(counted) == sum(len(example) - 1 for example in examples)
    assert counted == [int((rows[number]["labels"] >= 0).sum()) for number in range(len(rows))]
    assert len(counted) == 2


@pytest.mark.parametrize("micro", [1, 2, 3, 5, 8])
def test_rows_of_a_step_do_not_depend_on_rows_at_once(micro: int) -> None:
    """`per_device_train_batch_size` times accumulation is what counts."""
    sampler = StepSampler(23, 0, rows_per_step=8)
    for step in sampler:
        parts = [step[start : start + micro] for start in range(0, len(step), micro)]
        assert torch.tensor([row for part in parts for row in part]).tolist() == step
