"""Perplexities that were measured before, shared by all recipes: the base of a sweep's points is run once.

`<artifacts>/perplexity/<key>.json`, where the key is a fingerprint of the weights of the model and its adapter, of how
they are held, and of the tokens. A file is written under a hidden name and renamed, so it is there as a whole or not
at all.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from loram.evaluate.perplexity import Perplexity

# Hexadecimal digits of a key in a file's name.
_SHORT = 16


def recall(folder: Path, key: str) -> Perplexity | None:
    """What was measured under a key; None if nothing, or nothing that can be read."""
    try:
        raw = json.loads(_path(folder, key).read_text(encoding="utf-8"))
        return Perplexity(float(raw["nll"]), int(raw["tokens"])) if raw["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(folder: Path, key: str, found: Perplexity) -> None:
    """Keeps a result; one that cannot be kept will be measured again."""
    path = _path(folder, key)
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        hidden.write_text(json.dumps({"key": key, "nll": found.nll, "tokens": found.tokens}) + "\n", encoding="utf-8")
        hidden.replace(path)
    except OSError:
        hidden.unlink(missing_ok=True)


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key[:_SHORT]}.json"
