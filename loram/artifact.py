"""What a stage produced, and from what: fingerprints and manifests."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loram.errors import InputError

MANIFEST_NAME = "manifest.json"
# Libraries whose version can change a result; recorded, not fingerprinted.
_RECORDED = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "datasets", "tokenizers", "safetensors")


def canonical_json(value: Any) -> str:
    """The one text of a JSON value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def fingerprint(value: Any) -> str:
    """sha256 of the canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def library_versions() -> dict[str, str]:
    """Installed versions of what can change a result, and Python's."""
    versions = {"python": platform.python_version()}
    for name in ("loram", *_RECORDED):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@dataclass(frozen=True)
class Manifest:
    """The record that makes a folder an artifact.

    `inputs` maps an input's role to its fingerprint; `files` a relative path to `[bytes, sha256]`; `created` is
    in seconds since 1970 UTC; `metrics` are what the stage measured, in the units their names say.
    """

    stage: str
    version: int
    fingerprint: str
    settings: dict[str, Any]
    inputs: dict[str, str]
    files: dict[str, tuple[int, str]]
    libraries: dict[str, str]
    metrics: dict[str, Any]
    created: float
    seconds: float
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads `manifest.json`; InputError if it is damaged."""
        path = folder / MANIFEST_NAME
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            raw["files"] = {name: (int(size), str(digest)) for name, (size, digest) in raw["files"].items()}
            return cls(**raw)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path} is not a manifest: {error}",
                fix="Remove that file if loram did not write it; otherwise run the stage again with --remake.",
            ) from error


@dataclass(frozen=True)
class Artifact:
    """A finished stage output: a folder and its manifest."""

    path: Path
    manifest: Manifest
