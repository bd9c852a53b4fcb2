"""Whether what a recipe reports its metrics to is installed. Light: asked before anything is imported or computed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from loram.errors import MissingPackageError


def require_reporters(names: Sequence[str]) -> None:
    """Refuses a name of `report_to` whose package, called the same, is missing.

    Raises:
        MissingPackageError: says how to install it.
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"report_to names {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed.",
            fix=f"Run `pip install {' '.join(missing)}`, or leave it out of report_to.",
        )
