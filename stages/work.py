"""What a stage is given to work with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loram.errors import InputError
from loram.memory.fit import require_disk
from loram.recipe import Recipe
from loram.store import Draft


@dataclass(frozen=True)
class Work:
    """The recipe, the inputs by role, and the draft to fill.

    `memory`: bytes of host memory that layer-by-layer work stays within. `force`: go on where memory or disk look too
    small. `tokens`: the folder of tokenized data sets. `perplexity`: that of perplexities measured before. `anew`:
    nothing that was made before is to be used.
    """

    recipe: Recipe
    inputs: Mapping[str, Path]
    draft: Draft
    memory: int
    force: bool = False
    tokens: Path = field(kw_only=True)
    perplexity: Path = field(kw_only=True)
    anew: bool = False

    @property
    def out(self) -> Path:
        """The folder that becomes the artifact."""
        return self.draft.out

    def note(self, text: str) -> None:
        """Something the user should read; kept in the manifest."""
        self.draft.notes.append(text)

    def require_disk(self, needed: int, what: str) -> None:
        """Refuses to begin what would fill the disk (NoRoomError); checkpoints that are there already count in."""
        if not self.force:
            there = sum(path.stat().st_size for path in self.draft.scratch.rglob("*") if path.is_file())
            # Not of `out`, which in all processes but the first is a temporary folder that nothing is written to.
            require_disk(self.draft.scratch, needed - there, what)


def require_model_folder(folder: Path) -> None:
    """Refuses a `--from` folder that is no model (InputError)."""
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is not a model folder: it has no config.json.", fix="Check the path after --from.")
