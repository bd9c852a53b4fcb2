"""Rows of local files, read lazily: memory holds a line or a batch, whatever the size of the file."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from loram.errors import DataError

# UTF-8, with or without the mark that spreadsheets put in front.
_ENCODING = "utf-8-sig"
# Characters of a JSON file or a text read at once.
_PIECE = 1 << 20
# Rows of a Parquet batch.
_BATCH = 1024
# Where a JSON error lies so close to the end of what was read, the rest may mend it: no literal or escape is longer.
_LONGEST_JSON_LITERAL = 16


@dataclass(frozen=True)
class Row:
    """One record and where it is: `file:line`, or `dataset[number]`.

    `opens` and `closes`: whether a text begins and ends with this row.
    """

    values: dict[str, Any]
    place: str
    opens: bool = True
    closes: bool = True


def read(path: Path) -> Iterator[Row]:
    """The rows of a file, by its suffix.

    Raises:
        DataError: not of its format, with the line; or not UTF-8.
    """
    with _named(path):
        yield from _READERS[path.suffix](path)


def count(path: Path) -> int:
    """How many rows `read` gives, without making them where that can be told cheaply."""
    if path.suffix == ".parquet":
        return int(_parquet_file(path).metadata.num_rows)
    if path.suffix not in {".jsonl", ".ndjson"}:
        return sum(1 for _ in read(path))
    with _named(path), path.open(encoding=_ENCODING) as file:
        return sum(1 for line in file if not line.isspace())


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turns what goes wrong while a file is read into an error that names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}", fix="Convert the file to UTF-8.") from error
    except RecursionError as error:
        raise DataError(f"{path} is nested too deeply.", fix="Give flat rows.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}", fix="Check the file and its permissions.") from error


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding=_ENCODING) as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}:{number} is not JSON: {error.msg}.", fix="Correct or remove the line."
                ) from error
            yield _json_row(values, path, number)


def _json_row(values: Any, path: Path, line: int) -> Row:
    if not isinstance(values, dict):
        raise DataError(f"{path}:{line} is not a JSON object.", fix="Correct or remove it.")
    return Row(values, f"{path}:{line}")


def _json(path: Path) -> Iterator[Row]:
    """An array of objects, or objects one after the other, decoded one at a time."""
    with path.open(encoding=_ENCODING) as file:
        window = _Window(file, path)
        array = window.next_character() == "["
        window.at += array
        first = True
        while (character := window.next_character()) not in ("", "]" if array else ""):
            if array and not first:
                if character != ",":
                    raise window.wrong("Expecting ',' delimiter")
                window.at += 1
                window.next_character()
            line = window.line
            yield _json_row(window.value(), path, line)
            first = False
        if array and not character:
            raise window.wrong("the array is not closed")
        window.at += array
        if window.next_character():
            raise window.wrong("Extra data")


class _Window:
    """A stretch of a JSON text that moves on as values are taken from it."""

    def __init__(self, file: IO[str], path: Path) -> None:
        self._file = file
        self._path = path
        self._text = ""
        self._counted, self._line = 0, 1  # how far lines are counted, and the line there
        self._ended = False
        self._decoder = json.JSONDecoder()
        self.at = 0

    @property
    def line(self) -> int:
        """Line of the next character, from 1."""
        self._line += self._text.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._line

    def next_character(self) -> str:
        """Moves to the next character that is no white space; empty at the end of the file."""
        while True:
            while self.at < len(self._text) and self._text[self.at] in " \t\r\n":
                self.at += 1
            if self.at < len(self._text) or self._ended:
                return self._text[self.at : self.at + 1]
            self._more()

    def value(self) -> Any:
        """The next JSON value; reads on while it is not complete."""
        while True:
            try:
                value, self.at = self._decoder.raw_decode(self._text, self.at)
                return value
            except json.JSONDecodeError as error:
                cut = len(self._text) - error.pos < _LONGEST_JSON_LITERAL or error.msg.startswith("Unterminated")
                if self._ended or not cut:
                    self.at = error.pos
                    raise self.wrong(error.msg) from error
            self._more()

    def wrong(self, reason: str) -> DataError:
        return DataError(f"{self._path}:{self.line} is not JSON: {reason}.", fix="Correct the file.")

    def _more(self) -> None:
        """Drops what was taken and reads on, each time as much as is left, so a long value is not decoded often."""
        self._line, self._counted = self.line, 0
        rest = self._text[self.at :]
        piece = self._file.read(max(_PIECE, len(rest)))
        self._ended = not piece
        self._text, self.at = rest + piece, 0


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


def _parquet(path: Path) -> Iterator[Row]:
    number = 0
    for batch in _parquet_file(path).iter_batches(batch_size=_BATCH):
        for values in batch.to_pylist():
            yield Row(values, f"{path}[{number}]")
            number += 1


def _parquet_file(path: Path) -> Any:
    from pyarrow import ArrowInvalid, parquet

    try:
        return parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise DataError(f"{path} is not a Parquet file: {error}", fix="Copy it again.") from error


def _plain_text(path: Path) -> Iterator[Row]:
    """One document, in stretches that end with a line."""
    with path.open(encoding=_ENCODING) as file:
        line = 1
        stretch = _stretch(file)
        opens = True
        while opens or stretch:
            following = _stretch(file)
            yield Row({"text": stretch}, f"{path}:{line}", opens=opens, closes=not following)
            line += stretch.count("\n")
            stretch, opens = following, False


def _stretch(file: IO[str]) -> str:
    return file.read(_PIECE) + file.readline(_PIECE)


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json_lines, ".ndjson": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet,
    ".txt": _plain_text, ".md": _plain_text,
}  # fmt: skip
SUFFIXES = tuple(_READERS)
