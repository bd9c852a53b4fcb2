"""Tokenized data sets on disk, made once and shared by all recipes and stages that read the same.

`<artifacts>/tokens/<key>/`, where the key is a fingerprint of everything the tokens depend on: the content of the
data as far as it can be known, what is done with the rows, and the encoder. Rows are read lazily, tokenized in batches
and written at once, so memory stays flat whatever the size of the data. A folder is written under a hidden name and
renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from loram.artifact import fingerprint
from loram.data import sources
from loram.data.encode import Encoder, Unusable
from loram.data.files import Row
from loram.data.rows import Example, UnusableRow, interpret
from loram.data.tokens import Dropped, TokenSet, TokenWriter, describe_dropped
from loram.errors import DataError, InputError, NoRoomError
from loram.memory.units import size
from loram.progress import bar, logger
from loram.recipe import DatasetSection
from loram.store import sync

# Raised when tokens for the same settings come out differently, or the files are laid out differently.
FORMAT = 1
# Examples tokenized at once: enough to keep a tokenizer busy, and no more characters than a few MB.
_BATCH_EXAMPLES = 1000
_BATCH_CHARACTERS = 2 << 20
# Hexadecimal digits of the key in a folder's name.
_SHORT = 16
# Kinds of reasons that are told apart; templates can make up any number.
_REASONS = 20


def tokenized(dataset: DatasetSection, encoder: Encoder, root: Path) -> TokenSet:
    """A data set's tokens, from the cache or made now.

    Args:
        dataset: where the rows are and what they mean; its weight does not matter here.
        encoder: how they become tokens.
        root: the cache's folder.

    Raises:
        DataError: unreadable, a row of the wrong form (named by its place), or no usable row.
        NoRoomError: the disk is full.
    """
    settings = {
        "format": FORMAT,
        "rows": sources.identity(dataset) | {"revision": sources.hub_revision(dataset) or dataset.revision},
        "encoder": encoder.settings(),
    }
    key = fingerprint(settings)
    folder = root / key[:_SHORT]
    found = TokenSet.open(folder)
    try:
        if found is None:
            root.mkdir(parents=True, exist_ok=True)
            with _alone(folder):
                found = TokenSet.open(folder) or _make(dataset, encoder, folder, settings)
        found.key = key
        return found
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise NoRoomError(
                f"The disk is full: the tokens of {dataset.path} do not fit {root}.", fix="Set limit, or free some."
            ) from error
        raise InputError(f"Cannot write to {root}: {error}", fix="Choose another --artifacts folder.") from error


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits until no other process makes the same tokens."""
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that tokenizes the same data …")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(dataset: DatasetSection, encoder: Encoder, folder: Path, settings: dict[str, Any]) -> TokenSet:
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        _write(dataset, encoder, draft, settings)
        for path in [*draft.iterdir(), draft]:
            sync(path)
        shutil.rmtree(folder, ignore_errors=True)  # one that was damaged
        draft.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    made = TokenSet.open(folder)
    assert made is not None
    logger.debug("%s: %s of tokens in %s", dataset.path, size(made.counts.tokens * 5), folder)
    return made


def _write(dataset: DatasetSection, encoder: Encoder, draft: Path, settings: dict[str, Any]) -> None:
    rows = 0
    dropped: dict[str, Dropped] = {}
    with TokenWriter(draft) as writer, bar(f"tokenize {dataset.path}", None, "rows") as advance:
        for places, results in encoder.stream(_batches(dataset)):
            kept = []
            for place, result in zip(places, results, strict=True):
                if isinstance(result, Unusable):
                    if result.broken:
                        raise DataError(f"{place}: {result.reason}", fix="Correct the row.")
                    _count(dropped, result.reason, place)
                else:
                    kept += result
            writer.add(kept)
            rows += len(places)
            advance(len(places), f"{writer.tokens:,} tokens")
        if not writer.examples:
            raise DataError(
                f"{dataset.path}: no usable row: {describe_dropped(dropped)}.",
                fix="Raise max_length, choose another data.chat_template, or check the data.",
            )
        writer.finish(rows, dropped, settings)


def _batches(dataset: DatasetSection) -> Iterator[tuple[list[str], list[Example]]]:
    """Places and examples, so many at once as are tokenized together."""
    places: list[str] = []
    examples: list[Example] = []
    characters = 0
    for row in sources.load_rows(dataset):
        example = _example(row, dataset)
        places.append(row.place)
        examples.append(example)
        characters += len(example.text or "") + sum(len(message["content"]) for message in example.messages)
        if len(examples) >= _BATCH_EXAMPLES or characters >= _BATCH_CHARACTERS:
            yield places, examples
            places, examples, characters = [], [], 0
    if examples:
        yield places, examples


def _example(row: Row, dataset: DatasetSection) -> Example:
    try:
        example = interpret(row.values, dataset.type)
    except UnusableRow as error:
        raise DataError(f"{row.place}: {error}", fix="Correct the row, or set `type` and `columns`.") from None
    return example if row.opens and row.closes else replace(example, opens=row.opens, closes=row.closes)


def _count(dropped: dict[str, Dropped], reason: str, place: str) -> None:
    if reason not in dropped and len(dropped) >= _REASONS:
        reason = "other reasons"
    before = dropped.get(reason)
    dropped[reason] = Dropped(1, place) if before is None else Dropped(before.count + 1, before.first)
