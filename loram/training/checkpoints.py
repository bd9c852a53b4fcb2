"""Checkpoints that can be trusted: complete, as they were written, and made with the same settings.

The Trainer writes weights, optimizer, schedule, random state and its own counters into `checkpoint-STEP`. Added here:
the history, the settings, and, last, the size and sha256 of every file. Without that last file a checkpoint is one that
was being written when the process ended.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from loram.artifact import file_digest, library_versions
from loram.errors import InputError
from loram.progress import logger
from loram.store import COMPLETE_NAME
from loram.training.history import History

SETTINGS_NAME = "settings.json"
_PREFIX = "checkpoint-"
# Files hashed side by side: sha256 takes about as long as writing did, and shards of a model are many.
_HASHING_THREADS = 4
# Rows whose content tells packed data apart: all of a small set, spread over a large one.
_SAMPLED_ROWS = 1024


def folder_of(scratch: Path, step: int) -> Path:
    """Where the Trainer puts the checkpoint of a step."""
    return scratch / f"{_PREFIX}{step}"


def step_of(checkpoint: Path | None) -> int:
    """The step in a checkpoint's name; 0 for none."""
    if checkpoint is None:
        return 0
    number = checkpoint.name.removeprefix(_PREFIX)
    if not number.isdigit():
        raise InputError(f"{checkpoint} is not a checkpoint folder.", fix="Remove it.")
    return int(number)


def seal(folder: Path, settings: Mapping[str, Any], history: History) -> None:
    """Adds history and settings to a checkpoint, and last what makes it complete."""
    history.copy_to(folder)
    record = {"settings": settings, "libraries": library_versions()}
    (folder / SETTINGS_NAME).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    files = {name: [size, digest] for name, (size, digest) in _contents(folder).items()}
    (folder / COMPLETE_NAME).write_text(json.dumps(files, indent=2) + "\n", encoding="utf-8")


def newest(scratch: Path) -> Path | None:
    """The newest checkpoint that is as it was written; half-written and damaged ones are removed, the latter said."""
    for folder in sorted(scratch.glob(f"{_PREFIX}*"), key=step_of, reverse=True):
        if (folder / COMPLETE_NAME).is_file():
            problem = damage(folder)
            if problem is None:
                return folder
            logger.warning("%s is damaged (%s) and removed; going on from what was before it", folder.name, problem)
        shutil.rmtree(folder)
    return None


def last_before(scratch: Path, step: int) -> Path | None:
    """The newest complete checkpoint of an earlier step, for a message."""
    complete = [path.parent for path in scratch.glob(f"{_PREFIX}*/{COMPLETE_NAME}") if step_of(path.parent) < step]
    return max(complete, key=step_of, default=None)


def damage(folder: Path) -> str | None:
    """What about a checkpoint is not as it was written; None if nothing."""
    try:
        written = json.loads((folder / COMPLETE_NAME).read_text(encoding="utf-8"))
        expected = {str(name): (int(size), str(digest)) for name, (size, digest) in written.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return f"its list of files, '{COMPLETE_NAME}', is missing or unreadable"
    for name, (size, _) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} of {size} bytes"
    try:
        found = _contents(folder)
    except OSError as error:
        return str(error)
    changed = [name for name in expected if found.get(name) != expected[name]]
    return f"{changed[0]} was changed" if changed else None


def require_same_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuses to go on with other settings than a checkpoint was made with; warns of other library versions.

    Raises:
        InputError: names each setting that differs, with its old and new value.
    """
    record = json.loads((folder / SETTINGS_NAME).read_text(encoding="utf-8"))
    old, new = _flat(record["settings"]), _flat(json.loads(json.dumps(settings)))
    differences = [
        f"{name} was {_shown(old, name)} and is {_shown(new, name)}"
        for name in sorted(old.keys() | new.keys())
        if _shown(old, name) != _shown(new, name)
    ]
    if differences:
        raise InputError(
            f"{folder} was made with other settings: {'; '.join(differences)}.",
            fix="Restore them to go on from it, or start over with --remake.",
        )
    now = library_versions()
    for name, version in record["libraries"].items():
        if now.get(name) != version:
            logger.warning(
                "%s was made with %s %s; this is %s, so the run may differ from one that was not interrupted",
                folder.name, name, version, now.get(name),
            )  # fmt: skip


def rows_identity(rows: torch.utils.data.Dataset[dict[str, torch.Tensor]], count: int) -> dict[str, Any]:
    """Number and content of the packed rows; of more than 1,024 the content of as many, evenly spread."""
    digest = hashlib.sha256()
    for number in sorted({round(i * (count - 1) / (_SAMPLED_ROWS - 1)) for i in range(_SAMPLED_ROWS)} if count else ()):
        for name, tensor in sorted(rows[number].items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
    return {"rows": count, "rows_sha256": digest.hexdigest()}


def _contents(folder: Path) -> dict[str, tuple[int, str]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != COMPLETE_NAME)
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        digests = list(pool.map(file_digest, paths))
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_size, digest)
        for path, digest in zip(paths, digests, strict=True)
    }


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted names."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    inner = [_flat(item, f"{prefix}.{name}" if prefix else name) for name, item in value.items()]
    return {name: item for part in inner for name, item in part.items()}


def _shown(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name], ensure_ascii=False) if name in values else "not set"
