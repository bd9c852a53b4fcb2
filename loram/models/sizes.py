"""The sizes of a model from its config: out of the table of common model types at once, else by tracing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loram.errors import CheckpointError
from loram.models.shape import ModelShape
from loram.models.tables import known_shape


def read_config(folder: Path) -> dict[str, Any]:
    """A model folder's config.json as it stands; CheckpointError if it cannot be read."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be used: {error}", fix="Give the folder of a Hugging Face model."
        ) from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} is no JSON object.", fix="Give the folder of a Hugging Face model.")
    return raw


def folder_shape(folder: Path) -> ModelShape:
    """Sizes of the whole model that a folder's config means, also where the folder holds its pruned form.

    Raises:
        CheckpointError: no readable config.json, or an unknown model type.
        UnsupportedModelError: tracing refuses the model.
    """
    known = known_shape(read_config(folder))
    if known is not None:
        return known
    from loram.models.discover import traced_shape  # torch, which known model types can spare
    from loram.models.pruned import load_config

    return traced_shape(load_config(folder))


def inline_shape(settings: Mapping[str, Any]) -> ModelShape:
    """Sizes of the model that the numbers under `model.config` mean.

    Raises:
        RecipeError: transformers refuses the numbers.
        UnsupportedModelError: tracing refuses the model.
    """
    known = known_shape(settings)
    if known is not None:
        return known
    from loram.models.discover import traced_shape
    from loram.models.source import inline_config

    return traced_shape(inline_config(settings))


def item_bytes(config: Mapping[str, Any], default: int) -> int:
    """Bytes of a stored parameter by a config's dtype; `default` where it names none."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return {"float32": 4, "bfloat16": 2, "float16": 2}.get(name, default)
