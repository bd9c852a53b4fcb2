"""One way to write a picture: the same one is the same bytes again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loram.errors import InputError


def save(figure: Any, path: Path, option: str) -> None:
    """Writes a matplotlib figure as .svg or .png, without the date and with names that do not depend on chance.

    Raises:
        InputError: the file cannot be written; `option` says where another place is given.
    """
    from matplotlib import rc_context

    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    try:
        with rc_context({"svg.hashsalt": "loram"}):
            figure.savefig(path, metadata=metadata)
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error}", fix=f"Choose another place with {option}.") from error
