"""The proof that an architecture may be cut, on its skeleton: pruned forward == masked forward.

The mask works on the *inputs* of the column-cut projections, so it shares nothing with the slicing it checks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from loram.errors import UnsupportedModelError
from loram.models.architecture import UNITS, Architecture, Unit
from loram.models.pruned import CONFIG_KEY, model_class
from loram.models.shape import Widths

# Largest difference that float32 rounding explains in two tiny layers.
_TOLERANCE = 1e-4


def prove(architecture: Architecture, skeleton: PreTrainedModel) -> None:
    """Checks on the skeleton that a full plan changes nothing and that cutting equals masking, unit by unit kind.

    Raises:
        UnsupportedModelError: names the group that failed.
    """
    tokens = torch.arange(12).view(2, 6)
    whole: dict[Unit, tuple[int, ...]] = {unit: tuple(range(architecture.units(unit))) for unit in UNITS}
    plans: dict[str, dict[Unit, tuple[int, ...]]] = {"nothing": {**whole}}
    if architecture.kv_groups > 1:
        plans["the attention group"] = {**whole, "kv_group": whole["kv_group"][1:]}
    plans["the FFN group"] = {**whole, "neuron": whole["neuron"][1::2]}
    plans["both groups"] = {"kv_group": whole["kv_group"][-1:], "neuron": whole["neuron"][::3]}
    for what, kept in plans.items():
        try:
            pruned = cut_model(skeleton, architecture, kept)
            with torch.no_grad():
                got, expected = pruned(tokens).logits, masked_logits(skeleton, architecture, kept, tokens)
        except (RuntimeError, ValueError, IndexError) as error:
            raise UnsupportedModelError(
                f"{architecture.model_type}: cutting {what} breaks the model ({error})."
            ) from error
        worst = float((got - expected).abs().max() / expected.abs().max())
        if not worst < _TOLERANCE:
            raise UnsupportedModelError(
                f"{architecture.model_type}: cutting {what} is not the same as masking it (difference {worst:.1e})."
            )


def cut_model(
    model: PreTrainedModel, architecture: Architecture, kept: Mapping[Unit, tuple[int, ...]]
) -> PreTrainedModel:
    """A copy of an in-memory model with the same units kept in every layer."""
    config = copy.deepcopy(model.config)
    layers = architecture.layers
    widths = Widths(architecture, (len(kept["kv_group"]),) * layers, (len(kept["neuron"]),) * layers)
    setattr(config, CONFIG_KEY, widths.to_config())
    small = model_class(config)(config).to(model.dtype).eval()
    state = dict(model.state_dict())
    for layer in range(layers):
        for projection in architecture.projections:
            index = torch.tensor(projection.index(kept[projection.unit]))
            module = architecture.module(layer, projection)
            state[f"{module}.weight"] = state[f"{module}.weight"].index_select(projection.axis, index)
            if projection.bias and projection.axis == 0:
                state[f"{module}.bias"] = state[f"{module}.bias"].index_select(0, index)
    small.load_state_dict(state)
    return small


def masked_logits(
    model: PreTrainedModel, architecture: Architecture, kept: Mapping[Unit, tuple[int, ...]], tokens: torch.Tensor
) -> torch.Tensor:
    """Logits of the whole model with removed units' contributions set to zero."""
    hooks = []
    for layer in range(architecture.layers):
        for projection in architecture.projections:
            if projection.axis == 1:
                mask = torch.zeros(projection.in_features, dtype=model.dtype)
                mask[projection.index(kept[projection.unit])] = 1

                def mask_input(_: object, inputs: tuple[torch.Tensor], mask: torch.Tensor = mask) -> torch.Tensor:
                    return inputs[0] * mask

                module = model.get_submodule(architecture.module(layer, projection))
                hooks.append(module.register_forward_pre_hook(mask_input))
    try:
        logits: torch.Tensor = model(tokens).logits
    finally:
        for hook in hooks:
            hook.remove()
    return logits
