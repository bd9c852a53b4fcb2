"""Rows, tokens, masks and packing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from loram.data import sources, stdlib
from loram.data.encode import (
    IGNORED,
    Encoded,
    UnusableRow,
    encode_dataset,
    encode_messages,
    encode_text,
    interpret,
    resolve_template,
)
from loram.data.packing import PackedRows, batches, pack
from loram.errors import DataError, RecipeError
from loram.models.source import byte_tokenizer
from loram.recipe import DatasetSection

TOKENIZER = byte_tokenizer()
ALPACA = resolve_template("alpaca", TOKENIZER)


def write(path: Path, rows: list[Any]) -> DatasetSection:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetSection(path=str(path))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "p", "completion": "c"}, (("user", "p"), ("assistant", "c"))),
        ({"instruction": "i", "input": "x", "output": "o"}, (("user", "i\n\nx"), ("assistant", "o"))),
        ({"instruction": "i", "input": "", "output": "o"}, (("user", "i"), ("assistant", "o"))),
        ({"messages": [{"role": "user", "content": "p"}]}, (("user", "p"),)),
        (
            {"conversations": [{"from": "human", "value": "p"}, {"from": "gpt", "value": "c"}]},
            (("user", "p"), ("assistant", "c")),
        ),
    ],
)
def test_row_types_are_recognised(row: dict[str, Any], expected: Any) -> None:
    assert interpret(row, "auto").messages == expected


@pytest.mark.parametrize(
    "row",
    [
        {"q": 1},
        {"prompt": 3, "completion": "x"},
        {"messages": "no"},
        {"conversations": [{"from": "robot", "value": "x"}]},
    ],
)
def test_rows_of_no_known_form_are_unusable(row: dict[str, Any]) -> None:
    with pytest.raises(UnusableRow):
        interpret(row, "auto")


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": \n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2"):
        sources.load_rows(DatasetSection(path=str(path)))
    dataset = write(path, [{"prompt": "a", "completion": "b"}, {"prompt": "a"}])
    with pytest.raises(DataError, match=r"rows\.jsonl:2.*'completion' is missing"):
        encode_dataset(dataset.model_copy(update={"type": "prompt_completion"}), TOKENIZER, 100)


def test_columns_limit_and_formats(tmp_path: Path) -> None:
    import csv

    import pyarrow
    from pyarrow import parquet

    rows = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(9)]
    write(tmp_path / "r.jsonl", rows)
    (tmp_path / "r.json").write_text(json.dumps(rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "r.parquet")
    with (tmp_path / "r.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(rows)
    loaded = []
    for suffix in ("jsonl", "json", "parquet", "csv"):
        dataset = DatasetSection(
            path=str(tmp_path / f"r.{suffix}"), columns={"prompt": "question", "completion": "answer"}, limit=4
        )
        loaded.append([(row.values["prompt"], row.values["completion"]) for row in sources.load_rows(dataset)])
    assert len(loaded[0]) == 4
    assert all(one == loaded[0] for one in loaded)
    wrong = DatasetSection(path=str(tmp_path / "r.jsonl"), columns={"prompt": "questoin"})
    with pytest.raises(DataError, match="did you mean 'question'"):
        sources.load_rows(wrong)


def test_dropped_rows_are_counted_and_none_left_is_an_error(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "completion": "short"},
        {"prompt": "p" * 500, "completion": "x"},
        {"prompt": "p", "completion": ""},
    ]
    encoded = encode_dataset(write(tmp_path / "r.jsonl", rows), TOKENIZER, 120)
    assert len(encoded.examples) == 1
    assert encoded.dropped == {"longer than 120 tokens": 1, "nothing to learn in it": 1}
    with pytest.raises(DataError, match="no usable row"):
        encode_dataset(write(tmp_path / "r.jsonl", rows[1:]), TOKENIZER, 120)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no rows"):
        encode_dataset(DatasetSection(path=str(tmp_path / "empty.jsonl")), TOKENIZER, 120)


def test_unknown_template_is_refused() -> None:
    with pytest.raises(RecipeError, match="did you mean 'chatml'"):
        resolve_template("chatlm", TOKENIZER)


def test_loss_is_on_every_assistant_turn_only() -> None:
    turns = (("system", "S"), ("user", "one"), ("assistant", "ANSWER1"), ("user", "two"), ("assistant", "ANSWER2"))
    encoded = encode_messages(turns, TOKENIZER, ALPACA)
    learnt = TOKENIZER.decode([label for label in encoded.labels if label != IGNORED])
    assert learnt == f"ANSWER1{TOKENIZER.eos_token}ANSWER2{TOKENIZER.eos_token}"
    assert len(encoded.labels) == len(encoded.input_ids)


def test_template_without_a_stable_prefix_is_refused() -> None:
    shifting = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match="changes earlier text"):
        encode_messages((("user", "p"), ("assistant", "c")), TOKENIZER, shifting)


def test_the_standard_library_is_split_by_module() -> None:
    modules = {
        s: {row["source"].split(":")[0].split(".")[0] for row in stdlib.rows("stdlib:docstrings", s)}
        for s in stdlib.SPLITS
    }
    assert not modules["train"] & modules["test"]
    assert len(modules["train"]) > len(modules["test"]) > 5
    row = next(iter(stdlib.rows("stdlib:docstrings", "train")))
    assert row["completion"] not in row["prompt"]
    assert len(stdlib.rows("stdlib:text", "train")) > 100


@given(st.lists(st.integers(2, 50), min_size=1, max_size=60))
def test_packing_conserves_every_example(lengths: list[int]) -> None:
    examples = [Encoded(list(range(n)), [IGNORED] + [i] * (n - 1)) for i, n in enumerate(lengths)]
    rows = pack(examples, 50)
    assert sorted(e.labels[-1] for row in rows for e in row) == sorted(range(len(lengths)))
    assert all(sum(len(e) for e in row) <= 50 for row in rows)
    # Best fit: no two rows could be joined.
    fills = sorted(sum(len(e) for e in row) for row in rows)
    assert len(fills) < 2 or fills[0] + fills[1] > 50


def test_packed_rows_restart_positions_and_mask_first_tokens() -> None:
    rows = PackedRows([Encoded([5, 6, 7], [IGNORED, 6, 7]), Encoded([8, 9], [8, 9])], 7, pad_token_id=0, seed=None)
    item = rows[0]
    assert item["input_ids"].tolist() == [5, 6, 7, 8, 9, 0, 0]
    assert item["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert item["labels"].tolist() == [IGNORED, 6, 7, IGNORED, 9, IGNORED, IGNORED]
    assert int(item["tokens"]) == 5
    assert [len(batch["labels"]) for batch in batches(PackedRows([Encoded([1, 2], [IGNORED, 2])] * 5, 2, 0), 2)] == [
        2,
        2,
        1,
    ]


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
