"""The few kinds of error a user can meet; each says what happened, why, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class LoramError(Exception):
    """Something the user can act on.

    Args:
        what: what went wrong and where (file, tensor, recipe key).
        fix: what to do about it; one sentence.
    """

    exit_code = 1

    def __init__(self, what: str, *, fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}\n  → {self.fix}" if self.fix else self.what


class RecipeError(LoramError):
    """The recipe or the command line is wrong; nothing was run."""

    exit_code = 2


class InputError(LoramError):
    """A stage's input is missing, damaged, or belongs to something else."""


class CheckpointError(InputError):
    """A model folder is incomplete or corrupt."""


class WrongBaseError(InputError):
    """A plan or adapter was made for another base model."""


class UnsupportedModelError(LoramError):
    """The architecture could not be proven to be prunable."""


class DataError(LoramError):
    """A data set cannot be read, or nothing usable is left of it."""


class MissingPackageError(LoramError):
    """An optional package is needed for what was asked."""


class DivergenceError(LoramError):
    """Training produced a NaN or infinite loss."""


class NoRoomError(LoramError):
    """What was asked for doesn't fit memory or disk."""

    exit_code = 3


class Interrupted(LoramError):
    """Ctrl-C or SIGTERM; what can be resumed was saved."""

    exit_code = 130


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns `` (did you mean 'x'?)`` for the closest known word, or an empty string."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
