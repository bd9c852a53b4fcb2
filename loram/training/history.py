"""Steps and evaluations of a run, a JSON object a line; all that later decisions look back at.

A checkpoint carries the history up to its step. What depends on the past (the best evaluation, how long none was
better, the median loss, how many rows fit) is read off it, so a resumed run decides as the uninterrupted one would.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

HISTORY_NAME = "history.jsonl"
MICRO_BATCH = "per_device_train_batch_size"


class History:
    """What is in the file, and what is added to it.

    Args:
        path: where it is written.
        checkpoint: the folder whose history it goes on from; None: a new one.
    """

    def __init__(self, path: Path, checkpoint: Path | None = None) -> None:
        self._path = path
        text = "" if checkpoint is None else (checkpoint / HISTORY_NAME).read_text(encoding="utf-8")
        self.entries: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
        path.write_text(text, encoding="utf-8")

    def add(self, entry: dict[str, Any]) -> None:
        """Appends a step or an evaluation; both have their `step`."""
        self.entries.append(entry)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, allow_nan=False) + "\n")

    def copy_to(self, checkpoint: Path) -> None:
        """Puts what there is so far into a checkpoint."""
        (checkpoint / HISTORY_NAME).write_bytes(self._path.read_bytes())

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if "loss" in entry]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if "loss" not in entry]

    def total(self, name: str) -> Any:
        """Sum over the steps."""
        return sum(entry.get(name, 0) for entry in self.entries)

    def last(self, name: str, default: float = math.nan) -> float:
        """The newest value of that name."""
        return next((float(entry[name]) for entry in reversed(self.entries) if name in entry), default)

    def recent(self, name: str, count: int) -> list[float]:
        """The newest values of that name, at most `count`, oldest first."""
        found: list[float] = []
        for entry in reversed(self.entries):
            if len(found) == count:
                break
            if name in entry:
                found.append(float(entry[name]))
        return found[::-1]
