"""Where rows lie: every format reads the same, lazily, and what is wrong is named by its place."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from loram.data import files, sources, stdlib
from loram.errors import DataError
from loram.recipe import DatasetSection

ROWS = [{"question": f"q{i}\nline", "answer": f"a, {i} é"} for i in range(9)]


def write(path: Path, rows: list[Any] = ROWS) -> Path:
    """The rows in the format that the suffix names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return path


def values(**settings: Any) -> list[Any]:
    return [row.values for row in sources.load_rows(DatasetSection.model_validate(settings))]


@pytest.fixture(params=["jsonl", "json", "lines.json", "csv", "parquet", "saved", "splits", "folder", "data_files"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The same nine rows in every place and format."""
    kind = request.param
    if kind == "lines.json":
        write(tmp_path / "r.jsonl").rename(tmp_path / "r.json")
        return {"path": str(tmp_path / "r.json")}
    if kind == "saved":
        datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
        return {"path": str(tmp_path / "saved")}
    if kind == "splits":
        both = {"train": datasets.Dataset.from_list([{"x": 1}]), "test": datasets.Dataset.from_list(ROWS)}
        datasets.DatasetDict(both).save_to_disk(tmp_path / "saved")
        return {"path": str(tmp_path / "saved"), "split": "test"}
    if kind == "folder":
        write(tmp_path / "d" / "a.jsonl", ROWS[:4])
        write(tmp_path / "d" / "deep" / "b.jsonl", ROWS[4:])
        (tmp_path / "d" / "README.md").write_text("about the rows")
        return {"path": str(tmp_path / "d")}
    if kind == "data_files":
        write(tmp_path / "d" / "2.csv", ROWS[4:])
        write(tmp_path / "d" / "1.parquet", ROWS[:4])
        write(tmp_path / "d" / "other.jsonl")
        return {"path": str(tmp_path / "d"), "data_files": ["1.*", "[2-3].csv"]}
    return {"path": str(write(tmp_path / f"r.{kind}"))}


def test_every_format_gives_the_same_rows(stored: dict[str, Any]) -> None:
    assert values(**stored) == ROWS


def test_columns_are_renamed_and_a_limit_draws_the_same_rows(stored: dict[str, Any]) -> None:
    drawn = values(**stored, limit=4, seed=3, columns={"prompt": "question"})
    expected = [ROWS[i] for i in sorted(random.Random(3).sample(range(9), 4))]
    assert [row["answer"] for row in drawn] == [row["answer"] for row in expected]
    assert [row["prompt"] for row in drawn] == [row["question"] for row in expected]
    assert len(values(**stored, limit=20)) == 9
    with pytest.raises(DataError, match="did you mean 'question'"):
        values(**stored, columns={"prompt": "questoin"})


def test_folders_have_splits_by_their_file_names(tmp_path: Path) -> None:
    for name, part in (("train-00000-of-00002", ROWS[:2]), ("train-00001-of-00002", ROWS[2:5]), ("dev", ROWS[5:])):
        write(tmp_path / "d" / f"{name}.jsonl", part)
    assert values(path=str(tmp_path / "d")) == ROWS[:5]
    assert values(path=str(tmp_path / "d"), split="validation") == ROWS[5:]
    with pytest.raises(DataError, match=r"splits .'train', 'validation'., not 'test'"):
        values(path=str(tmp_path / "d"), split="test")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"path": "{here}/none.jsonl"}, "No data file"),
        ({"path": "./nowhere/none"}, "No data file"),
        ({"path": "{here}/empty"}, "holds no data file"),
        ({"path": "{here}/mixed"}, "several kinds: .csv, .jsonl"),
        ({"path": "{here}/mixed", "data_files": "*.parquet"}, "No file matches"),
        ({"path": "{here}/mixed", "data_files": "/abs/*"}, "inside the folder"),
        ({"path": "{here}/odd.xyz"}, "no data file that can be read"),
        ({"path": "{here}/saved", "split": "test"}, "splits .'train'., not 'test'"),
        ({"path": "stdlib:docstring"}, "did you mean 'stdlib:docstrings'"),
        ({"path": "stdlib:text", "split": "dev"}, "not 'dev'"),
    ],
)
def test_what_is_not_there_is_refused_before_reading(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "mixed" / "a.csv")
    write(tmp_path / "mixed" / "a.jsonl")
    (tmp_path / "odd.xyz").write_text("x")
    (tmp_path / "saved" / "train").mkdir(parents=True)
    (tmp_path / "saved" / "dataset_dict.json").write_text("{}")
    (tmp_path / "saved" / "train" / "state.json").write_text("{}")
    dataset = DatasetSection.model_validate(settings | {"path": settings["path"].format(here=tmp_path)})
    with pytest.raises(DataError, match=words):
        sources.check(dataset)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("r.jsonl", '{"a": 1}\n{"a": \n', r"r\.jsonl:2 is not JSON"),
        ("r.jsonl", '{"a": 1}\n\n[1]\n', r"r\.jsonl:3 is not a JSON object"),
        ("r.json", '[{"a": 1},\n {"a": 1},\n {"a" 2}]', r"r\.json:3 is not JSON"),
        ("r.json", '[{"a": 1},\n {"a": 1}\n {"a": 2}]', r"r\.json:3 is not JSON: Expecting ','"),
        ("r.json", '[{"a": 1},\n 7]', r"r\.json:2 is not a JSON object"),
        ("r.json", '[{"a": 1}\n', r"the array is not closed"),
        ("r.json", '[{"a": 1}]\nx', r"r\.json:2 is not JSON: Extra data"),
        ("r.json", '[{"a": "', r"r\.json:1 is not JSON: Unterminated"),
        ("r.csv", "a,b\n1,2\n1,2,3\n", r"r\.csv:3 has more cells"),
        ("r.parquet", "garbage", "not a Parquet file"),
        ("r.jsonl", "\n", "has no rows"),
        ("r.json", "[]", "has no rows"),
        ("r.csv", "a,b\n", "has no rows"),
    ],
)
@pytest.mark.parametrize("piece", [3, 1 << 20])
def test_what_is_wrong_in_a_file_is_named_by_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, words: str, piece: int
) -> None:
    monkeypatch.setattr(files, "_PIECE", piece)
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=words):
        values(path=str(tmp_path / name))


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(
    st.lists(st.dictionaries(st.text(), JSON, max_size=4), max_size=6),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_json_read_in_pieces_is_json(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[dict[str, Any]],
    piece: int,
    array: bool,
    ascii_only: bool,
    indent: int | None,
) -> None:
    path = tmp_path_factory.mktemp("json") / "r.json"
    shown = [json.dumps(row, indent=indent, ensure_ascii=ascii_only) for row in rows]
    path.write_text("[" + ",\n".join(shown) + " ]\n" if array else "\n".join(shown), encoding="utf-8", newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_PIECE", piece)
        assert [row.values for row in files.read(path)] == rows


@given(st.text(st.sampled_from("ab é\n"), max_size=300), st.integers(1, 20))
def test_a_text_comes_in_stretches_that_make_it_up(
    tmp_path_factory: pytest.TempPathFactory, text: str, piece: int
) -> None:
    path = tmp_path_factory.mktemp("text") / "r.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_PIECE", piece)
        rows = list(files.read(path))
    assert "".join(row.values["text"] for row in rows) == text
    assert [row.opens for row in rows] == [True] + [False] * (len(rows) - 1)
    assert [row.closes for row in rows] == [False] * (len(rows) - 1) + [True]
    assert all(len(row.values["text"]) <= 2 * piece for row in rows)
    assert [int(row.place.rpartition(":")[2]) for row in rows] == [
        1 + "".join(row.values["text"] for row in rows[:number]).count("\n") for number in range(len(rows))
    ]


def test_the_hub_is_streamed_and_only_a_shuffled_part_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    taken: list[int] = []

    def rows() -> Iterator[dict[str, Any]]:
        for i in range(50):
            taken.append(i)
            yield {"text": f"t{i}"}

    def load(path: str, name: str | None, **settings: Any) -> Any:
        calls.append({"path": path, "name": name, **settings})
        if settings["split"] == "offline" and settings["streaming"]:
            raise ConnectionError("no network")
        if settings["split"] == "broken":
            raise ValueError("Unknown split")
        whole = datasets.Dataset.from_list([{"text": f"t{i}"} for i in range(50)])
        return datasets.IterableDataset.from_generator(rows) if settings["streaming"] else whole

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(sources, "SHUFFLE_BUFFER", 10)
    everything = values(path="org/set", name="part", revision="abc", data_files="x/*.parquet")
    assert [row["text"] for row in everything] == [f"t{i}" for i in range(50)]
    assert calls[0] == {
        "path": "org/set", "name": "part", "split": "train", "revision": "abc", "data_files": ["x/*.parquet"],
        "streaming": True,
    }  # fmt: skip
    taken.clear()
    some = values(path="org/set", limit=5, seed=1)
    assert len(some) == 5
    assert some == values(path="org/set", limit=5, seed=1) != values(path="org/set", limit=5, seed=2)
    assert max(taken) < 40
    # A slice of a split, and a machine without network, need what is on the disk.
    assert len(values(path="org/set", split="train[:10%]", limit=7)) == 7
    assert not calls[-1]["streaming"]
    assert len(values(path="org/set", split="offline")) == 50
    with pytest.raises(DataError, match=r"org/set.*broken.*Unknown split"):
        values(path="org/set", split="broken")


def test_identity_is_the_content_not_the_place(tmp_path: Path) -> None:
    def identity(**settings: Any) -> Any:
        return sources.identity(DatasetSection.model_validate(settings))

    write(tmp_path / "a.jsonl")
    write(tmp_path / "b" / "c.jsonl")
    first = identity(path=str(tmp_path / "a.jsonl"))
    assert first == identity(path=str(tmp_path / "b")) == identity(path=str(tmp_path), data_files="*.jsonl", weight=3)
    assert first != identity(path=str(tmp_path / "a.jsonl"), limit=3)
    write(tmp_path / "a.jsonl", ROWS[:8])
    assert first != identity(path=str(tmp_path / "a.jsonl"))
    assert identity(path="org/set", revision="x") != identity(path="org/set", revision="y")


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
