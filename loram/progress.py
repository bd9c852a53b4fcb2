"""Bars and messages on stderr: a bar with rate and time left on a terminal, nothing when quiet or piped."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

logger = logging.getLogger("loram")
T = TypeVar("T")
_quiet = False


def set_quiet(quiet: bool) -> None:
    """Turns bars and informational messages off or on for the process."""
    global _quiet
    _quiet = quiet


def visible() -> bool:
    """True when a person is watching stderr."""
    return not _quiet and sys.stderr.isatty()


class Advance(Protocol):
    """Moves a bar on by some units, with a word on the state (a loss)."""

    def __call__(self, amount: float, state: str = "") -> None: ...


@contextmanager
def bar(description: str, total: float | None, unit: str) -> Iterator[Advance]:
    """A bar of `total` units, or one that only counts; yields the function that moves it."""
    if not visible():
        yield lambda amount, state="": None
        return
    with _rich(unit, total is not None) as progress:
        task = progress.add_task(description, total=total, state="")
        yield lambda amount, state="": progress.update(task, advance=amount, state=state)


def track(items: Collection[T], description: str, unit: str) -> Iterable[T]:
    """Iterates with a bar."""
    with bar(description, len(items), unit) as advance:
        for item in items:
            yield item
            advance(1)


def _rich(unit: str, bounded: bool) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:,.1f} {unit}/s" if task.speed else "")

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f}" if bounded else "{task.completed:,.0f}"),
        Rate(),
        *((TextColumn("left"), TimeRemainingColumn()) if bounded else ()),
        TextColumn("{task.fields[state]}"),
        console=Console(stderr=True),
        transient=True,
    )
