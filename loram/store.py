"""Cached stage outputs: `<root>/<recipe>/<stage>-<fingerprint>/`, complete when they have a manifest.

A stage writes into a hidden sibling (a `Draft`) that is renamed when done, so a crash or a kill never leaves a
folder that looks finished. A draft with training checkpoints survives an interruption and is taken up again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from loram.artifact import MANIFEST_NAME, Artifact, Manifest, file_digest, library_versions
from loram.errors import InputError

# Work on the way to an artifact (training checkpoints); left out of it.
SCRATCH_NAME = "scratch"
# Present in a checkpoint inside the scratch folder once everything of it is written and was read back.
COMPLETE_NAME = "complete"
_LOCK_NAME = ".lock"
# Hexadecimal digits of the fingerprint in a folder's name; the manifest has all 64.
_SHORT = 12


@dataclass(frozen=True)
class Key:
    """What an artifact is called: recipe name, stage, fingerprint and what went into it."""

    recipe: str
    stage: str
    version: int
    settings: dict[str, Any]
    inputs: dict[str, str]
    fingerprint: str

    @property
    def folder(self) -> str:
        return f"{self.stage}-{self.fingerprint[:_SHORT]}"


@dataclass
class Draft:
    """A folder being written.

    `out` becomes the artifact; `scratch` is for checkpoints and is dropped. `digests` may hold sha256 sums
    already known (relative path → hex), so that files are not read again.
    """

    out: Path
    scratch: Path
    digests: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class ArtifactStore:
    """Finds and writes artifacts below a root folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, key: Key) -> Artifact | None:
        """The finished artifact, or None. Files that shrank or vanished since make it an InputError."""
        folder = self.root / key.recipe / key.folder
        if not (folder / MANIFEST_NAME).is_file():
            return None
        manifest = Manifest.read(folder)
        if manifest.fingerprint != key.fingerprint:
            return None
        for name, (size, _) in manifest.files.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != size:
                raise InputError(
                    f"{path} is not as it was written ({size} bytes).",
                    fix=f"Remove {folder} and run again, or put the file back.",
                )
        return Artifact(folder, manifest)

    def all(self, recipe: str) -> list[Artifact]:
        """Every finished artifact of a recipe, oldest first."""
        found = [Artifact(path.parent, Manifest.read(path.parent)) for path in self._manifests(recipe)]
        return sorted(found, key=lambda artifact: artifact.manifest.created)

    def _manifests(self, recipe: str) -> list[Path]:
        return sorted((self.root / recipe).glob(f"*/{MANIFEST_NAME}"))

    def unfinished(self, key: Key) -> Path | None:
        """The draft an interrupted run left behind, if it has something to go on from."""
        draft = self._draft_folder(key)
        return draft if _resumable(draft / SCRATCH_NAME) else None

    def _draft_folder(self, key: Key) -> Path:
        return self.root / key.recipe / f".{key.folder}.draft"

    @contextlib.contextmanager
    def open(self, key: Key, anew: bool = False) -> Iterator[Draft]:
        """A draft to write; commits it when the block ends well, and leaves earlier artifacts alone when not.

        Scratch of an interrupted run is kept, unless it is made `anew`; any other half-written file is removed first.

        Raises:
            InputError: another process is writing the same artifact, or the folder cannot be written.
        """
        folder = self._draft_folder(key)
        out, scratch = folder / "out", folder / SCRATCH_NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / _LOCK_NAME).open("w")
        except OSError as error:
            raise InputError(
                f"Cannot write to {self.root}: {error}", fix="Choose another --artifacts folder."
            ) from error
        with _locked(lock):
            shutil.rmtree(out, ignore_errors=True)
            if anew:
                shutil.rmtree(scratch, ignore_errors=True)
            out.mkdir()
            scratch.mkdir(exist_ok=True)
            started = time.time()
            draft = Draft(out, scratch)
            try:
                yield draft
            except BaseException:
                shutil.rmtree(out, ignore_errors=True)
                if not _resumable(scratch):
                    shutil.rmtree(folder, ignore_errors=True)
                raise
            self._commit(key, draft, time.time() - started)
        shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def follow(self, key: Key) -> Iterator[Draft]:
        """For the other processes of a run: the writer's scratch, and an output folder that is thrown away."""
        with tempfile.TemporaryDirectory(prefix="loram-") as name:
            yield Draft(Path(name), self._draft_folder(key) / SCRATCH_NAME)

    def _commit(self, key: Key, draft: Draft, seconds: float) -> None:
        files: dict[str, tuple[int, str]] = {}
        for path in sorted(p for p in draft.out.rglob("*") if p.is_file()):
            name = path.relative_to(draft.out).as_posix()
            files[name] = (path.stat().st_size, draft.digests.get(name) or file_digest(path))
            sync(path)
        manifest = Manifest(
            stage=key.stage,
            version=key.version,
            fingerprint=key.fingerprint,
            settings=key.settings,
            inputs=key.inputs,
            files=files,
            libraries=library_versions(),
            metrics=draft.metrics,
            created=time.time(),
            seconds=round(seconds, 2),
            notes=draft.notes,
        )
        path = draft.out / MANIFEST_NAME
        path.write_text(manifest.to_json(), encoding="utf-8")
        sync(path)
        sync(draft.out)
        target = self.root / key.recipe / key.folder
        shutil.rmtree(target, ignore_errors=True)
        draft.out.rename(target)
        sync(target.parent)


@contextlib.contextmanager
def _locked(file: IO[str]) -> Iterator[None]:
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"Another process is writing {Path(file.name).parent.name.strip('.').removesuffix('.draft')}.",
                fix="Wait for it, or stop it.",
            ) from None
        yield


def _resumable(scratch: Path) -> bool:
    return any(scratch.glob(f"*/{COMPLETE_NAME}"))


def sync(path: Path) -> None:
    """Makes what was written to a file or folder last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
