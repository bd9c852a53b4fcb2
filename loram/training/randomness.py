"""The state of every random generator that training may draw from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch


def random_state() -> Any:
    """Of python, numpy, torch and all CUDA devices; for `restore`."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state(), cuda


def restore(state: Any) -> None:
    """Puts every generator back to where it was."""
    python, numbers, cpu, cuda = state
    random.setstate(python)
    numpy.random.set_state(numbers)
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Whatever draws inside leaves no trace."""
    state = random_state()
    try:
        yield
    finally:
        restore(state)
