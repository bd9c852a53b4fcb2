"""What a stage is: a name, its inputs, the settings that change its result, and the work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loram.errors import InputError
from loram.recipe import Recipe
from loram.store import Draft


@dataclass(frozen=True)
class Work:
    """What a stage is given: the recipe, its inputs by role, and the draft to fill."""

    recipe: Recipe
    inputs: Mapping[str, Path]
    draft: Draft

    @property
    def out(self) -> Path:
        """The folder that becomes the artifact."""
        return self.draft.out

    def note(self, text: str) -> None:
        """Something the user should read; kept in the manifest."""
        self.draft.notes.append(text)


@dataclass(frozen=True)
class Stage:
    """A stage.

    `version` is raised when the code's results change. `inputs` maps a role to the stage it comes from, given the
    recipe; `main` is the role that `--from` replaces. `settings` are what changes the result (plain JSON).
    """

    name: str
    version: int
    main: str
    inputs: Callable[[Recipe], Mapping[str, str]]
    settings: Callable[[Recipe], dict[str, Any]]
    run: Callable[[Work], None]


def small_model(recipe: Recipe) -> str:
    """The stage whose model is trained: align, or prune where alignment is skipped."""
    return "prune" if recipe.align.max_steps == 0 else "align"


def require_model_folder(folder: Path) -> None:
    """Refuses a `--from` folder that is no model (InputError)."""
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is not a model folder: it has no config.json.", fix="Check the path after --from.")
