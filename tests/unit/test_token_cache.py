"""Tokens are made once for the same data and settings, and again when one of them changes."""

from __future__ import annotations

import errno
import json
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from loram.data import cache, sources
from loram.data.cache import tokenized
from loram.data.encode import Encoder
from loram.data.packing import PackedRows
from loram.data.templates import ALPACA, CHATML
from loram.data.tokens import Encoded, TokenSet, TokenWriter
from loram.errors import DataError, InputError, NoRoomError
from loram.models.source import byte_tokenizer
from loram.recipe import DatasetSection

ROWS = [{"prompt": f"p{i}", "completion": f"c{i}"} for i in range(6)]


def write(path: Path, rows: list[Any] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The data sets that were tokenized, not found."""
    paths: list[str] = []
    write_tokens = cache._write

    def watch(dataset: DatasetSection, *arguments: Any) -> None:
        paths.append(dataset.path)
        write_tokens(dataset, *arguments)

    monkeypatch.setattr(cache, "_write", watch)
    return paths


def test_the_same_is_made_once_wherever_it_lies(tmp_path: Path, made: list[str]) -> None:
    root = tmp_path / "tokens"
    first = tokenized(
        DatasetSection(path=str(write(tmp_path / "a.jsonl"))), Encoder(byte_tokenizer(), ALPACA, 50), root
    )
    copy = DatasetSection(path=str(write(tmp_path / "b.jsonl")), weight=3)
    second = tokenized(copy, Encoder(byte_tokenizer(), ALPACA, 50), root)
    assert len(made) == 1
    assert second.counts == first.counts
    assert all(second[n].ids.tolist() == first[n].ids.tolist() for n in range(6))
    assert first.counts.rows == len(first) == 6
    folders = [path for path in root.iterdir() if not path.name.startswith(".")]
    assert [sorted(path.name for path in folder.iterdir()) for folder in folders] == [
        ["ids.bin", "loss.bin", "meta.json", "offsets.bin"]
    ]
    assert not list(root.glob("*.draft"))


def changed_tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["p1"])
    return tokenizer


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [*ROWS, {"prompt": "p", "completion": "c"}]},
        {"columns": {"prompt": "completion"}},
        {"type": "prompt_completion"},
        {"limit": 3},
        {"limit": 3, "seed": 1},
        {"template": CHATML},
        {"template": None},
        {"max_length": 89},
        {"loss": "last_assistant_turn"},
        {"tokenizer": changed_tokenizer()},
        {"format": 10**6},
    ],
    ids=lambda change: "+".join(change),
)
def test_whatever_the_tokens_depend_on_makes_them_anew(
    tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    def make(
        rows: Any = ROWS, template: str | None = ALPACA, max_length: int = 90, loss: Any = "all_assistant_turns",
        tokenizer: Any = None, format: int = cache.FORMAT, **settings: Any,
    ) -> None:  # fmt: skip
        write(tmp_path / "r.jsonl", rows)
        monkeypatch.setattr(cache, "FORMAT", format)
        dataset = DatasetSection(path=str(tmp_path / "r.jsonl"), **settings)
        tokenized(dataset, Encoder(tokenizer or byte_tokenizer(), template, max_length, loss), tmp_path / "tokens")

    make()
    make()
    assert len(made) == 1
    make(**change)
    assert len(made) == 2
    make(**change)
    make()
    assert len(made) == 2


def test_a_hub_set_is_known_by_its_commit(tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from huggingface_hub import HfApi

    commit = ["one"]

    class Info:
        @property
        def sha(self) -> str:
            return commit[0]

    monkeypatch.setattr(HfApi, "dataset_info", lambda self, path, **settings: Info())
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    )
    encoder = Encoder(byte_tokenizer(), ALPACA, 50)
    for expected in (1, 1, 2):
        if expected == 2:
            commit[0] = "two"
        assert len(tokenized(DatasetSection(path="org/set"), encoder, tmp_path / "tokens")) == 6
        assert len(made) == expected
    monkeypatch.undo()
    assert sources.hub_revision(DatasetSection(path="org/set")) is None  # no network in tests


@pytest.mark.parametrize("name", ["ids.bin", "loss.bin", "offsets.bin", "meta.json"])
def test_damaged_tokens_are_made_again(tmp_path: Path, made: list[str], name: str) -> None:
    dataset = DatasetSection(path=str(write(tmp_path / "r.jsonl")))
    encoder = Encoder(byte_tokenizer(), ALPACA, 50)
    first = tokenized(dataset, encoder, tmp_path / "tokens")[3].ids.tolist()
    damaged = next((tmp_path / "tokens").glob(f"[!.]*/{name}"))
    damaged.write_bytes(damaged.read_bytes()[:-5])
    assert tokenized(dataset, encoder, tmp_path / "tokens")[3].ids.tolist() == first
    assert len(made) == 2


def test_what_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "tokens"
    encoder = Encoder(byte_tokenizer(), ALPACA, 50)
    dataset = DatasetSection(path=str(write(tmp_path / "r.jsonl", [*ROWS, {"prompt": "p"}])))
    with pytest.raises(DataError, match=r"r\.jsonl:7"):
        tokenized(dataset, encoder, root)
    assert not [path for path in root.iterdir() if path.is_dir()]

    def full(self: TokenWriter, examples: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TokenWriter, "add", full)
    write(tmp_path / "r.jsonl")
    with pytest.raises(NoRoomError, match="disk is full"):
        tokenized(dataset, encoder, root)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="Cannot write"):
        tokenized(dataset, encoder, tmp_path / "file" / "tokens")
    assert not [path for path in root.iterdir() if path.is_dir()]


def test_two_processes_at_once_make_it_once(tmp_path: Path, made: list[str]) -> None:
    """Locks are of open files, so two threads are as good as two processes."""
    dataset = DatasetSection(path=str(write(tmp_path / "r.jsonl", ROWS * 200)))
    found: list[TokenSet] = []

    def make() -> None:
        found.append(tokenized(dataset, Encoder(byte_tokenizer(), ALPACA, 50), tmp_path / "tokens"))

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(tokens) for tokens in found] == [1200] * 3
    assert len(made) == 1


def test_dropped_rows_are_counted_with_their_reason_and_first_place(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "completion": "short"},
        {"prompt": "p" * 500, "completion": "x"},
        {"prompt": "p", "completion": ""},
        {"prompt": "q" * 500, "completion": "x"},
    ]
    encoder = Encoder(byte_tokenizer(), ALPACA, 120)
    tokens = tokenized(DatasetSection(path=str(write(tmp_path / "r.jsonl", rows))), encoder, tmp_path / "tokens")
    assert tokens.counts.rows == 4
    assert len(tokens) == 1
    dropped = {reason: (of.count, of.first.rpartition("/")[2]) for reason, of in tokens.counts.dropped.items()}
    assert dropped == {"longer than 120 tokens": (2, "r.jsonl:2"), "nothing to learn in it": (1, "r.jsonl:3")}
    assert "dropped 2 (longer than 120 tokens; first" in tokens.counts.describe()
    with pytest.raises(DataError, match=r"no usable row: 2 \(longer than 120 tokens; first .*r\.jsonl:1\)"):
        tokenized(DatasetSection(path=str(write(tmp_path / "r.jsonl", rows[1:]))), encoder, tmp_path / "tokens")
    (tmp_path / "r.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no rows"):
        tokenized(DatasetSection(path=str(tmp_path / "r.jsonl")), encoder, tmp_path / "tokens")


def test_a_template_that_makes_up_reasons_is_bounded(tmp_path: Path) -> None:
    refusing = "{{ raise_exception(messages[0]['content']) if messages[0]['content'] != 'p0' }}{% for m in messages %}{{ m['content'] }}{% endfor %}"  # noqa: E501
    rows = [{"prompt": f"p{i}", "completion": "c"} for i in range(60)]
    dataset = DatasetSection(path=str(write(tmp_path / "r.jsonl", rows)))
    dropped = tokenized(dataset, Encoder(byte_tokenizer(), refusing, 50), tmp_path / "tokens").counts.dropped
    assert len(dropped) == cache._REASONS + 1
    assert sum(of.count for of in dropped.values()) == 59


def test_memory_is_flat_whatever_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight times the rows take no more memory to tokenize, and no batch grows with the data."""
    monkeypatch.setattr(cache, "_BATCH_EXAMPLES", 50)
    batches: list[int] = []
    add = TokenWriter.add

    def watch(self: TokenWriter, examples: list[Encoded]) -> None:
        batches.append(len(examples))
        add(self, examples)

    monkeypatch.setattr(TokenWriter, "add", watch)
    encoder = Encoder(byte_tokenizer(), ALPACA, 400)
    peaks = []
    for number, count in enumerate((200, 400, 3200)):
        rows = [{"prompt": f"{number} {i} " * 20, "completion": "c" * 50} for i in range(count)]
        dataset = DatasetSection(path=str(write(tmp_path / f"{count}.jsonl", rows)))
        del rows
        tracemalloc.start()
        tokens = tokenized(dataset, encoder, tmp_path / "tokens")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(tokens) == count
    # The first run also imports and compiles.
    assert peaks[2] < 1.2 * peaks[1]
    assert set(batches) == {50}
    # Read back, a row touches its own tokens only: the arrays are maps of the files.
    rows = PackedRows(tokens, 400, 0)
    tracemalloc.start()
    for row in range(len(rows)):
        rows[row]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < tokens.counts.tokens
