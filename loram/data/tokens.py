"""Tokenized examples as flat arrays, on disk or in memory: a set far larger than memory is read where it lies.

A folder holds `ids.bin` (uint32, every example's tokens one after the other), `loss.bin` (uint8, 1 where the loss
counts the token), `offsets.bin` (int64, where each example begins, and the end), all little-endian, and `meta.json`,
written last.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

IGNORED = -100
META_NAME = "meta.json"
_IDS, _LOSS, _OFFSETS = ("ids.bin", "<u4"), ("loss.bin", "u1"), ("offsets.bin", "<i8")

Integers = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Encoded:
    """One example: token ids and labels of equal length; labels are -100 where the loss does not count."""

    input_ids: list[int]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def loss_tokens(self) -> int:
        """Tokens that the loss counts (the first token of a text is given, so it is not among them)."""
        return sum(label != IGNORED for label in self.labels)


class Tokens(NamedTuple):
    """One example's token ids and, for each, whether the loss counts it."""

    ids: Integers
    loss: npt.NDArray[np.bool_]


class Examples(Protocol):
    """What is packed: examples with known lengths, each read when it is needed."""

    @property
    def lengths(self) -> Integers:
        """Tokens of each example."""
        ...

    def __getitem__(self, number: int) -> Tokens: ...


@dataclass(frozen=True)
class Dropped:
    """How many rows were dropped for a reason, and where the first of them is."""

    count: int
    first: str


@dataclass(frozen=True)
class Counts:
    """What a set is: rows read, examples they gave, tokens, tokens in the loss, and what was dropped (by reason)."""

    rows: int
    examples: int
    tokens: int
    loss_tokens: int
    dropped: dict[str, Dropped] = field(default_factory=dict)

    def describe(self) -> str:
        """One line: examples, tokens, loss tokens, and what was dropped."""
        text = f"{self.examples:,} examples, {self.tokens:,} tokens, {self.loss_tokens:,} in the loss"
        if self.dropped:
            text += "; dropped " + describe_dropped(self.dropped)
        return text


def describe_dropped(dropped: dict[str, Dropped]) -> str:
    """Counts, reasons and the first row of each."""
    return ", ".join(f"{of.count:,} ({reason}; first {of.first})" for reason, of in dropped.items())


class TokenSet:
    """Examples in flat arrays; of a folder they are memory-mapped, so only what is read takes memory.

    `key`: a fingerprint of what made them, the revision of a Hub set as it was found; empty for examples at hand.
    """

    key = ""

    def __init__(self, ids: Integers, loss: Integers, offsets: Integers, counts: Counts) -> None:
        self._ids = ids
        self._loss = loss
        self._offsets = offsets
        self.counts = counts

    @classmethod
    def gather(cls, examples: Iterable[Encoded]) -> TokenSet:
        """A set of examples at hand, in memory."""
        held = [tokens_of(example) for example in examples]
        lengths = np.array([len(tokens.ids) for tokens in held], np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        ids = np.concatenate([tokens.ids for tokens in held]) if held else np.zeros(0, np.uint32)
        loss = np.concatenate([tokens.loss for tokens in held]) if held else np.zeros(0, np.bool_)
        return cls(ids, loss.view(np.uint8), offsets, Counts(len(held), len(held), int(lengths.sum()), int(loss.sum())))

    @classmethod
    def open(cls, folder: Path) -> TokenSet | None:
        """The set in a folder; None when it is not there or not as it was written."""
        try:
            meta = json.loads((folder / META_NAME).read_text(encoding="utf-8"))["counts"]
            counts = Counts(**meta | {"dropped": {name: Dropped(**of) for name, of in meta["dropped"].items()}})
            sizes = {_IDS: counts.tokens, _LOSS: counts.tokens, _OFFSETS: counts.examples + 1}
            maps = {part: np.memmap(folder / part[0], np.dtype(part[1]), "r") for part in sizes}
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if any(len(maps[part]) != size for part, size in sizes.items()):
            return None
        return cls(maps[_IDS], maps[_LOSS], maps[_OFFSETS], counts)

    @property
    def lengths(self) -> Integers:
        """Tokens of each example, int64."""
        return np.diff(self._offsets)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Tokens:
        place = slice(int(self._offsets[number]), int(self._offsets[number + 1]))
        return Tokens(self._ids[place], self._loss[place].astype(np.bool_))


def tokens_of(example: Encoded) -> Tokens:
    """An example as arrays; its first token is never in the loss, since nothing predicts it."""
    labels = np.array(example.labels, np.int64)
    loss = labels != IGNORED
    loss[:1] = False
    return Tokens(np.array(example.input_ids, np.uint32), loss)


class TokenWriter:
    """Appends examples to the files of a folder; `finish` makes it a set."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = [(folder / name).open("wb") for name, _ in (_IDS, _LOSS, _OFFSETS)]
        self.examples = self.tokens = self.loss_tokens = 0
        self._files[2].write(np.zeros(1, _OFFSETS[1]).tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()

    def add(self, examples: Sequence[Encoded]) -> None:
        """Writes a batch."""
        if not examples:
            return
        batch = TokenSet.gather(examples)
        parts = (batch._ids, batch._loss, batch._offsets[1:] + self.tokens)
        for file, part, (_, dtype) in zip(self._files, parts, (_IDS, _LOSS, _OFFSETS), strict=True):
            file.write(part.astype(dtype).tobytes())
        self.examples += len(batch)
        self.tokens += batch.counts.tokens
        self.loss_tokens += batch.counts.loss_tokens

    def finish(self, rows: int, dropped: dict[str, Dropped], settings: dict[str, Any]) -> None:
        """Writes what makes the folder complete: the counts, and what they depend on."""
        for file in self._files:
            file.flush()
        counts = Counts(rows, self.examples, self.tokens, self.loss_tokens, dropped)
        text = json.dumps({"counts": asdict(counts), "settings": settings}, indent=2, ensure_ascii=False)
        (self._folder / META_NAME).write_text(text + "\n", encoding="utf-8")
