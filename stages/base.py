"""The base model, converted to a safetensors folder where it is not one: `package:` and `random:` sources.

Not a command of its own; every stage that needs the base makes it when it is missing.
"""

from __future__ import annotations

from loram.models import source

from .work import Work


def run(work: Work) -> None:
    """Does the stage's work."""
    source.convert(work.recipe.model, work.out)
