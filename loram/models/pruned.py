"""A pruned model as an ordinary transformers model: the same class with narrower linears in some layers.

The widths are in the config, and the linears are resized in `__init__`, before weights are loaded, so
`from_pretrained` does everything else: shards, device map, quantization, resume.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from loram.errors import CheckpointError
from loram.models.architecture import Architecture, Unit
from loram.models.factored import FactoredLinear
from loram.models.shape import Widths

# The key of a pruned model's config.json.
CONFIG_KEY = "loram"


def widths_of(config: PretrainedConfig) -> Widths | None:
    """The widths a config carries; None for an ordinary model."""
    raw = getattr(config, CONFIG_KEY, None)
    try:
        return None if raw is None else Widths.from_config(raw)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"The '{CONFIG_KEY}' section of config.json is damaged ({error!r}).",
            fix="Prune again, or copy the file again.",
        ) from error


def model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class to load a config with: transformers' own, or its pruned subclass where the config has widths."""
    base: type[PreTrainedModel] = AutoModelForCausalLM._model_mapping[type(config)]
    widths = widths_of(config)
    if widths is None:
        return base

    def init(self: PreTrainedModel, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        resize(self, widths)

    return type(f"Pruned{base.__name__}", (base,), {"__init__": init, "__module__": __name__})


def load_config(folder: Path) -> PretrainedConfig:
    """The config of a model folder.

    Raises:
        CheckpointError: there is no readable config.json, or its model type is unknown.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder / 'config.json'} cannot be used: {error}", fix="Give the folder of a Hugging Face model."
        ) from error
    return config


def resize(model: PreTrainedModel, widths: Widths) -> None:
    """Replaces the linears of small layers by narrower ones, or by factors, of fresh weights.

    Corrects the numbers beside them.
    """
    architecture = widths.architecture
    for layer in range(architecture.layers):
        units = widths.units(layer)
        whole = all(units[unit] == architecture.units(unit) for unit in units)
        if whole and not (widths.ranks and widths.ranks[layer]):
            continue
        for projection in architecture.projections:
            name = architecture.module(layer, projection)
            parent_name, _, child = name.rpartition(".")
            old = model.get_submodule(name)
            out_features, in_features = projection.shape(units[projection.unit])
            rank, like = widths.rank(layer, projection), (old.weight.device, old.weight.dtype)
            linear: nn.Module = (
                nn.Linear(in_features, out_features, projection.bias, *like)
                if rank is None
                else FactoredLinear(in_features, out_features, rank, projection.bias, *like)
            )
            model.get_submodule(parent_name).register_module(child, linear)
            _narrow_config(model.get_submodule(parent_name), architecture, units)


def _narrow_config(module: nn.Module, architecture: Architecture, units: Mapping[Unit, int]) -> None:
    """Gives a block that computes with its config (fused projections) one with this layer's numbers."""
    config = getattr(module, "config", None)
    if isinstance(config, PretrainedConfig) and hasattr(module, "layer_idx"):
        own = copy.copy(config)
        own.num_key_value_heads = units["kv_group"]
        own.num_attention_heads = units["kv_group"] * architecture.query_heads_per_group
        module.config = own
    for name, value in (
        ("num_heads", units["kv_group"] * architecture.query_heads_per_group),
        ("num_key_value_heads", units["kv_group"]),
        ("intermediate_size", units["neuron"]),
    ):
        if isinstance(getattr(module, name, None), int):
            setattr(module, name, value)
