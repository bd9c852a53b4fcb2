"""Reading ahead: an iterator that runs in a thread of its own while its values are used.

File reads, sha256 and torch kernels release Python's lock, so reading, computing and writing really overlap.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from operator import itemgetter
from typing import TypeVar

T = TypeVar("T")

# Blocks that wait between two threads. A few are enough to keep both busy; each takes BLOCK_BYTES.
DEPTH = 4


def ahead(items: Iterable[T], depth: int = DEPTH) -> Generator[T]:
    """Yields what `items` yields, produced by a thread that is up to `depth` values ahead.

    An exception of the producer is raised here, in its place; closing the generator stops the thread.
    """
    slots: queue.Queue[tuple[str, T | BaseException | None]] = queue.Queue(depth)
    stopped = threading.Event()

    def offer(kind: str, value: T | BaseException | None) -> bool:
        while not stopped.is_set():
            try:
                slots.put((kind, value), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def produce() -> None:
        try:
            for item in items:
                if not offer("value", item):
                    return
            offer("end", None)
        except BaseException as error:
            offer("error", error)

    thread = threading.Thread(target=produce, name="loram-ahead", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = slots.get()
            if kind == "end":
                return
            if kind == "error":
                assert isinstance(value, BaseException)
                raise value
            yield value  # type: ignore[misc]
            del value  # a block that is done with must not wait here for the next one
    finally:
        stopped.set()
        thread.join()


def grouped(pairs: Iterable[tuple[str, T]]) -> Iterator[tuple[str, Iterator[T]]]:
    """Consecutive pairs with the same name as (name, its values), without collecting them."""
    for name, group in itertools.groupby(pairs, key=itemgetter(0)):
        yield name, (value for _, value in group)


class Worker:
    """Does jobs one after another in a thread of its own; at most `depth` wait.

    The first exception of a job is raised by the next `do` or by `finish`; jobs after it are dropped.
    """

    def __init__(self, name: str, depth: int = DEPTH) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(depth)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"loram-{name}", daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], None]) -> None:
        """Hands a job over; waits while `depth` others wait."""
        self._raise()
        self._jobs.put(job)

    def finish(self) -> None:
        """Waits for the jobs handed over; the worker can be used again."""
        self._jobs.join()
        self._raise()

    def stop(self) -> None:
        """Ends the thread after the jobs handed over, without raising."""
        self._jobs.put(None)
        self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self) -> None:
        failed = False
        while (job := self._jobs.get()) is not None:
            try:
                if not failed:
                    job()
            except BaseException as error:
                self._error, failed = error, True
            finally:
                del job
                self._jobs.task_done()
