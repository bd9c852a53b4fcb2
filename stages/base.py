"""The base model, converted to a safetensors folder where it is not one: `package:` and `random:` sources.

Not a command of its own; every stage that needs the base makes it when it is missing.
"""

from __future__ import annotations

from typing import Any

from loram.models import source
from loram.recipe import Recipe

from .stage import Stage, Work


def _settings(recipe: Recipe) -> dict[str, Any]:
    settings = recipe.model.settings()
    if recipe.model.path.startswith(source.PACKAGE):
        settings["package_version"] = source.package_version(recipe.model)
    return settings


def _run(work: Work) -> None:
    source.convert(work.recipe.model, work.out)


STAGE = Stage("base", 1, main="", inputs=lambda recipe: {}, settings=_settings, run=_run)
