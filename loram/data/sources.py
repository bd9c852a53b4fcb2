"""Rows of a data set, wherever they lie, each with the place it came from."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loram.artifact import file_digest
from loram.data import stdlib
from loram.errors import DataError, did_you_mean
from loram.recipe import DatasetSection

_SUFFIXES = {".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".txt", ".md"}


# UTF-8, with or without the mark that spreadsheets put in front.
_ENCODING = "utf-8-sig"


@dataclass(frozen=True)
class Row:
    """One record and where it is: `file:line`, or `dataset[number]`."""

    values: dict[str, Any]
    place: str


def identity(dataset: DatasetSection) -> dict[str, Any]:
    """What the rows depend on, for fingerprints: file contents, the Python version, or the Hub revision."""
    known = {**dataset.settings()}
    if dataset.path.startswith("stdlib:"):
        known["content"] = stdlib.version()
    elif Path(dataset.path).is_file():
        known["content"] = file_digest(Path(dataset.path))
        del known["path"]
    return known


def check(dataset: DatasetSection) -> None:
    """Refuses a data set that cannot exist (DataError), without reading or downloading it."""
    path = Path(dataset.path)
    if dataset.path.startswith("stdlib:"):
        if dataset.path not in stdlib.NAMES:
            raise DataError(f"No data set '{dataset.path}'{did_you_mean(dataset.path, stdlib.NAMES)}.")
        if dataset.split not in stdlib.SPLITS:
            raise DataError(f"{dataset.path} has the splits {list(stdlib.SPLITS)}, not '{dataset.split}'.")
    elif path.suffix in _SUFFIXES:
        if not path.is_file():
            raise DataError(f"No data file at {dataset.path}.", fix="Check the path in the recipe.")
    elif path.exists():
        raise DataError(
            f"{dataset.path} is no data file that can be read.", fix=f"Use one of {', '.join(sorted(_SUFFIXES))}."
        )
    elif dataset.path.startswith((".", "/", "~")):
        raise DataError(f"No data at {dataset.path}.", fix="Check the path in the recipe.")


def load_rows(dataset: DatasetSection) -> list[Row]:
    """All rows, columns renamed; a random `limit` of them (in source order) when the recipe sets one.

    Raises:
        DataError: file missing or unreadable, named by line; or no rows.
    """
    check(dataset)
    try:
        rows = [Row(_renamed(row.values, dataset), row.place) for row in _read(dataset)]
    except UnicodeDecodeError as error:
        raise DataError(f"{dataset.path} is not UTF-8 text: {error}", fix="Convert the file to UTF-8.") from error
    except RecursionError as error:
        raise DataError(f"{dataset.path} is nested too deeply.", fix="Give flat rows.") from error
    if not rows:
        raise DataError(f"{dataset.path} has no rows.", fix="Check the file and the split.")
    if dataset.limit is not None and dataset.limit < len(rows):
        chosen = random.Random(dataset.seed).sample(range(len(rows)), dataset.limit)
        rows = [rows[i] for i in sorted(chosen)]
    return rows


def _renamed(values: dict[str, Any], dataset: DatasetSection) -> dict[str, Any]:
    renamed = dict(values)
    for target, source in dataset.columns.items():
        if source not in values:
            raise DataError(
                f"{dataset.path} has no column '{source}'{did_you_mean(source, values)}.",
                fix=f"Its columns are {sorted(values)}; correct `columns`.",
            )
        renamed[target] = values[source]
    return renamed


def _read(dataset: DatasetSection) -> Iterator[Row]:
    path = Path(dataset.path)
    if dataset.path.startswith("stdlib:"):
        for values in stdlib.rows(dataset.path, dataset.split):
            yield Row(values, f"{dataset.path} {values['source']}")
    elif path.suffix in {".jsonl", ".ndjson"}:
        yield from _json_lines(path)
    elif path.suffix == ".json":
        yield from _json_array(path)
    elif path.suffix == ".csv":
        yield from _csv(path)
    elif path.suffix == ".parquet":
        yield from _parquet(path)
    elif path.suffix in {".txt", ".md"}:
        yield Row({"text": path.read_text(encoding="utf-8")}, str(path))
    else:
        yield from _hub(dataset)


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB is less than a long document
    with path.open(encoding=_ENCODING, newline="") as file:
        reader = csv.DictReader(file)
        try:
            for values in reader:
                if None in values:
                    raise DataError(
                        f"{path}:{reader.line_num} has more cells than the header.", fix="Quote its commas."
                    )
                yield Row(dict(values), f"{path}:{reader.line_num}")
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num} is not CSV: {error}.", fix="Correct the line.") from error


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding=_ENCODING) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}:{number} is not JSON: {error.msg}.", fix="Correct or remove the line."
                ) from error
            if not isinstance(values, dict):
                raise DataError(f"{path}:{number} is not a JSON object.", fix="Correct or remove the line.")
            yield Row(values, f"{path}:{number}")


def _json_array(path: Path) -> Iterator[Row]:
    try:
        values = json.loads(path.read_text(encoding=_ENCODING))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno} is not JSON: {error.msg}.", fix="Correct the file.") from error
    if not isinstance(values, list) or not all(isinstance(item, dict) for item in values):
        raise DataError(f"{path} is not an array of JSON objects.", fix="Correct the file.")
    for number, item in enumerate(values):
        yield Row(item, f"{path}[{number}]")


def _parquet(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowInvalid, parquet

    try:
        file = parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise DataError(f"{path} is not a Parquet file: {error}", fix="Copy it again.") from error
    number = 0
    for batch in file.iter_batches():
        for values in batch.to_pylist():
            yield Row(values, f"{path}[{number}]")
            number += 1


def _hub(dataset: DatasetSection) -> Iterator[Row]:
    from datasets import load_dataset

    try:
        loaded = load_dataset(dataset.path, dataset.name, split=dataset.split, revision=dataset.revision)
    except Exception as error:
        raise DataError(
            f"Cannot get the data set '{dataset.path}' ({dataset.split}): {error}",
            fix="Check the id, split and network, or give a local file.",
        ) from error
    for number, values in enumerate(loaded):
        yield Row(dict(values), f"{dataset.path}[{number}]")
