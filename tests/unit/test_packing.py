"""Packing by lengths, rows read from where they lie, and sets mixed by weight."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from loram.data.encode import encode_text
from loram.data.mixture import Mixture, epoch_examples
from loram.data.packing import PackedRows, batches, pack
from loram.data.tokens import IGNORED, Dropped, Encoded, Integers, Tokens, TokenSet, TokenWriter
from loram.models.source import byte_tokenizer

TOKENIZER = byte_tokenizer()


def example(number: int, length: int) -> Encoded:
    """`length` tokens that tell which example they are of, the second half in the loss."""
    ids = [1000 * number + i for i in range(length)]
    return Encoded(ids, [IGNORED] * (length - length // 2) + ids[length - length // 2 :])


LENGTHS = st.lists(st.integers(2, 50), min_size=1, max_size=60)


@given(LENGTHS)
def test_packing_conserves_every_example_and_fits_best(lengths: list[int]) -> None:
    packing = pack(np.array(lengths), 50)
    rows = [packing[row].tolist() for row in range(len(packing))]
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    fills = sorted(sum(lengths[i] for i in row) for row in rows)
    assert fills[-1] <= 50
    # No two rows could be joined.
    assert len(fills) < 2 or fills[0] + fills[1] > 50
    # The plain method: each, longest first, into the fullest row with room, the first of equals.
    expected: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        free = [50 - sum(lengths[j] for j in row) for row in expected]
        fitting = [(room, row) for row, room in enumerate(free) if room >= lengths[i]]
        if fitting:
            expected[min(fitting)[1]].append(i)
        else:
            expected.append([i])
    assert rows == expected


@given(LENGTHS, st.integers(0, 3), st.booleans())
def test_packed_rows_conserve_every_token_and_restart_positions(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seed: int, on_disk: bool
) -> None:
    examples = [example(number, length) for number, length in enumerate(lengths)]
    source: TokenSet | list[Encoded] = examples
    if on_disk:
        folder = tmp_path_factory.mktemp("tokens")
        with TokenWriter(folder) as writer:
            writer.add(examples[:3])
            writer.add(examples[3:])
            writer.finish(len(examples), {"short": Dropped(2, "r:1")}, {})
        opened = TokenSet.open(folder)
        assert opened is not None
        assert opened.counts.tokens == sum(lengths)
        assert opened.counts.dropped == {"short": Dropped(2, "r:1")}
        source = opened
    rows = PackedRows(source, 50, pad_token_id=7, seed=seed)
    seen: list[int] = []
    learnt: list[int] = []
    for row in range(len(rows)):
        item = rows[row]
        used = int(item["tokens"])
        ids, positions, labels = (item[name].tolist() for name in ("input_ids", "position_ids", "labels"))
        assert len(ids) == len(positions) == len(labels) == 50
        assert all(position == token % 1000 for token, position in zip(ids[:used], positions[:used], strict=True))
        assert ids[used:] == [7] * (50 - used)
        assert positions[used:] == list(range(50 - used))
        assert labels[used:] == [IGNORED] * (50 - used)
        assert all(label in (IGNORED, token) for token, label in zip(ids[:used], labels[:used], strict=True))
        seen += ids[:used]
        learnt += [label for label in labels if label != IGNORED]
    assert sorted(seen) == sorted(token for e in examples for token in e.input_ids)
    assert sorted(learnt) == sorted(token for e in examples for token in e.labels if token != IGNORED)
    again = PackedRows(source, 50, pad_token_id=7, seed=seed)
    assert all(torch.equal(rows[r]["input_ids"], again[r]["input_ids"]) for r in range(len(rows)))


def test_an_item_looks_as_it_should() -> None:
    rows = PackedRows([Encoded([5, 6, 7], [IGNORED, 6, 7]), Encoded([8, 9], [8, 9])], 7, pad_token_id=0, seed=None)
    item = rows[0]
    assert item["input_ids"].tolist() == [5, 6, 7, 8, 9, 0, 0]
    assert item["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert item["labels"].tolist() == [IGNORED, 6, 7, IGNORED, 9, IGNORED, IGNORED]
    assert all(item[name].dtype == torch.int64 for name in item)
    assert int(item["tokens"]) == 5
    several = PackedRows([Encoded([1, 2], [IGNORED, 2])] * 5, 2, 0)
    assert [len(batch["labels"]) for batch in batches(several, 2)] == [2, 2, 1]
    with pytest.raises(ValueError, match="60 tokens does not fit a row of 50"):
        PackedRows([example(0, 60)], 50, 0)


class Unread:
    """Examples that note which of them are read."""

    def __init__(self, lengths: Integers) -> None:
        self.lengths = lengths
        self.read: list[int] = []

    def __getitem__(self, number: int) -> Tokens:
        self.read.append(number)
        length = int(self.lengths[number])
        return Tokens(np.arange(length, dtype=np.uint32), np.ones(length, np.bool_))


def test_packing_looks_at_lengths_alone_and_a_row_at_its_own_examples() -> None:
    examples = Unread(np.random.default_rng(0).integers(20, 512, 100_000))
    rows = PackedRows(examples, 512, 0)
    assert not examples.read
    assert int(rows[5]["tokens"]) == sum(int(examples.lengths[i]) for i in examples.read) <= 512
    assert int(examples.lengths.sum()) / (512 * len(rows)) > 0.98


def test_packed_documents_do_not_see_one_another(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    first, second = encode_text("first document", TOKENIZER), encode_text("the second", TOKENIZER)
    row = PackedRows([first, second], len(first) + len(second) + 5, 0, seed=None)[0]
    with torch.no_grad():
        packed = model(
            input_ids=row["input_ids"][None], position_ids=row["position_ids"][None], use_cache=False
        ).logits[0]
        alone = model(input_ids=torch.tensor([second.input_ids])).logits[0]
    torch.testing.assert_close(packed[len(first) : len(first) + len(second)], alone, rtol=1e-5, atol=1e-5)


# -- mixture ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 200), st.floats(0.001, 5), st.integers(0, 5))
def test_a_weight_is_how_often_an_epoch_has_each_example(count: int, weight: float, seed: int) -> None:
    chosen = Counter(epoch_examples(count, weight, seed).tolist())
    whole = int(weight)
    assert set(chosen) <= set(range(count))
    assert all(chosen[number] in (whole, whole + 1) for number in range(count))
    exact = weight * count
    assert chosen.total() == 1 if exact < 0.5 else abs(chosen.total() - exact) <= 0.5


def test_weights_have_their_exact_meaning() -> None:
    assert epoch_examples(4, 1, 0).tolist() == [0, 1, 2, 3]
    assert epoch_examples(3, 2, 0).tolist() == [0, 1, 2, 0, 1, 2]
    half = epoch_examples(10, 0.5, 1).tolist()
    assert len(half) == len(set(half)) == 5
    assert half == sorted(half) == epoch_examples(10, 0.5, 1).tolist()
    assert half != epoch_examples(10, 0.5, 2).tolist()
    assert len(epoch_examples(3, 0.5, 0)) == 2  # 1.5 rounds up
    assert len(epoch_examples(3, 0.01, 0)) == 1  # a set is never left out
    more = epoch_examples(8, 1.25, 0).tolist()
    assert more[:8] == list(range(8))
    assert len(more) == 10


def test_a_mixture_has_every_set_by_its_weight_all_through() -> None:
    first = TokenSet.gather([example(number, 10) for number in range(40)])
    second = TokenSet.gather([example(100 + number, 20) for number in range(20)])
    third = TokenSet.gather([example(200 + number, 10) for number in range(10)])
    mixture = Mixture([(first, 0.5, 0), (second, 1, 0), (third, 2, 0)])
    assert mixture.shares == [20, 20, 20]
    assert len(mixture) == len(mixture.lengths) == 60
    assert [len(mixture[n].ids) for n in range(60)] == mixture.lengths.tolist() == [10] * 20 + [20] * 20 + [10] * 20
    counts = Counter(int(mixture[n].ids[0]) // 1000 for n in range(60))
    assert all(counts[number] in (0, 1) for number in range(40))
    assert all(counts[100 + number] == 1 for number in range(20))
    assert all(counts[200 + number] == 2 for number in range(10))
    # Packed and shuffled, the sets take turns: no third of an epoch is without one of them.
    rows = PackedRows(mixture, 20, 0, seed=0)
    sets = [{int(token) // 100_000 for token in rows[r]["input_ids"]} for r in range(len(rows))]
    for third_of in (sets[: len(sets) // 3], sets[len(sets) // 3 : -len(sets) // 3], sets[-len(sets) // 3 :]):
        assert set.union(*third_of) == {0, 1, 2}
    alone = Mixture([(first, 1, 0)])
    assert alone.lengths.tolist() == first.lengths.tolist()
    assert all(np.array_equal(alone[n].ids, first[n].ids) for n in range(40))
