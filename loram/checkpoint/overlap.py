"""Doing several things at once on the way from one file to another: read, compute, hash, write.

File reads, sha256 and torch kernels release Python's lock, so plain threads overlap for real.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from operator import itemgetter
from typing import TypeVar

import torch

T = TypeVar("T")

# Blocks that wait for a worker. A few are enough to keep it busy; each takes BLOCK_BYTES.
DEPTH = 4
# Threads that read and compute blocks. Beyond a few, disks and memory are the limit.
WORKERS = min(4, max(2, os.cpu_count() or 2))


def in_order(jobs: Iterable[Callable[[], T]], workers: int = WORKERS) -> Generator[T]:
    """The results of jobs that run side by side, in the order of the jobs; only a few are held at a time.

    A job's exception is raised in its place; closing the generator drops the jobs not yet begun.
    """
    # Blocks side by side use the cores better than threads inside each small operation.
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, "loram-block", initializer=torch.set_num_threads, initargs=(1,))
    waiting: deque[Future[T]] = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(job))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(threads)


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
