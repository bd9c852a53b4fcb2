"""Ctrl-C and SIGTERM as a wish to stop, not as an end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from loram.progress import logger


@contextmanager
def stop_signal() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C or SIGTERM into an event; a second one interrupts at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handler(number: int, frame: FrameType | None) -> None:
        event.set()
        restore()
        logger.warning("stopping after this step to save a checkpoint; once more to stop at once")

    for number in signals:
        signal.signal(number, handler)
    try:
        yield event
    finally:
        restore()
