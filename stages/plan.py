"""loram plan RECIPE: what a recipe keeps and what that saves, from the config alone, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from loram.errors import InputError
from loram.memory.stored import base_parameters, sizes
from loram.models import source
from loram.models.discover import discover
from loram.models.pruned import load_config
from loram.pruning.geometry import plan_geometry
from loram.recipe import Recipe
from loram.report.table import text_table

from .pipeline import Pipeline


def config_of(recipe: Recipe, pipeline: Pipeline) -> PretrainedConfig:
    """The base's config: from the recipe, else from the model folder; never from the network.

    Raises:
        InputError: neither is there.
        RecipeError: the recipe's config cannot be used.
    """
    if "model_type" in recipe.model.config:
        config: PretrainedConfig = source.inline_config(recipe.model.config)
        return config
    folder = Path(recipe.model.path)
    if source.needs_conversion(recipe.model):
        made = pipeline.find(pipeline.node("base"))
        folder = made.path if made else folder
    if folder.is_dir():
        return load_config(folder)
    raise InputError(
        f"No config of '{recipe.model.path}' is at hand.",
        fix="Put its numbers under model.config, or run `loram prune`.",
    )


def plan(recipe: Recipe, pipeline: Pipeline) -> dict[str, Any]:
    """Kept units, parameters and stored bytes of the base and of the pruned model."""
    config = config_of(recipe, pipeline)
    architecture = discover(config)
    prune = recipe.prune
    geometry = plan_geometry(
        architecture, prune.ratio, prune.keep_first_layers, prune.keep_last_layers, prune.multiple_of
    )
    base, pruned = sizes(architecture, base_parameters(config), geometry)
    return {
        "model_type": architecture.model_type,
        "geometry": geometry.describe(architecture, prune.ratio),
        "kept_kv_groups": geometry.kept["kv_group"],
        "kept_neurons": geometry.kept["neuron"],
        "cut_layers": len(geometry.cut_layers),
        "projections": [projection.name for projection in architecture.projections],
        "base": base.to_dict(),
        "pruned": pruned.to_dict(),
        "parameter_reduction": base.parameters / pruned.parameters,
        "reduction_counted_at_4_bits": base.bf16_bytes / pruned.four_bit_bytes,
        "reduction_in_stored_bytes": base.bf16_bytes / pruned.nf4_bytes,
    }


def render(planned: dict[str, Any]) -> str:
    """The plan as a table."""
    base, pruned = planned["base"], planned["pruned"]
    rows = [
        [
            "parameters",
            f"{base['parameters']:,}",
            f"{pruned['parameters']:,}",
            f"{planned['parameter_reduction']:.2f}×",
        ],
        ["16-bit weights", _gb(base["bf16_bytes"]), _gb(pruned["bf16_bytes"]), ""],
        [
            "4 bits a parameter",
            _gb(base["four_bit_bytes"]),
            _gb(pruned["four_bit_bytes"]),
            _times(planned, "counted_at_4_bits"),
        ],
        ["NF4 as stored", _gb(base["nf4_bytes"]), _gb(pruned["nf4_bytes"]), _times(planned, "in_stored_bytes")],
    ]
    return (
        f"{planned['model_type']}: {planned['geometry']}\n\n"
        + text_table(["", "base", "pruned", "reduction"], rows)
        + "\n\nReductions of the last two rows are against the base in 16 bits. 'NF4 as stored' is what bitsandbytes"
        "\nkeeps: projections in NF4 with double quantization, embedding, head and norms in 16 bits."
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def _times(planned: dict[str, Any], name: str) -> str:
    return f"{planned[f'reduction_{name}']:.2f}×"
