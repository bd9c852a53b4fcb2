"""Parameters and stored bytes of a model and of its pruned form, from the config alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from loram.models.architecture import UNITS, Architecture, Unit
from loram.pruning.geometry import Geometry

# NF4 with double quantization (QLoRA, arXiv 2305.14314, §3): 4 bits a weight, an 8-bit constant for every 64
# weights, a 32-bit one for every 256 of those.
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)


@dataclass(frozen=True)
class Sizes:
    """Parameters and bytes. `nf4_bytes`: projections in NF4 with double quantization, all else in 16 bits."""

    parameters: int
    bf16_bytes: int
    four_bit_bytes: int
    """Every parameter counted as 4 bits, as the paper does."""
    nf4_bytes: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def base_parameters(config: PretrainedConfig) -> int:
    """All parameters of a model, tied ones once; built without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def sizes(architecture: Architecture, total: int, geometry: Geometry) -> tuple[Sizes, Sizes]:
    """Sizes of the base and of the model that a geometry leaves; `total` are the base's parameters."""
    whole: Mapping[Unit, int] = {unit: architecture.units(unit) for unit in UNITS}
    full_layer = architecture.layer_parameters(whole)
    projections = full_layer * architecture.layers
    removed = (full_layer - architecture.layer_parameters(geometry.kept)) * len(geometry.cut_layers)
    rest = total - projections
    return _sizes(projections, rest), _sizes(projections - removed, rest)


def _sizes(projections: int, rest: int) -> Sizes:
    parameters = projections + rest
    return Sizes(
        parameters=parameters,
        bf16_bytes=2 * parameters,
        four_bit_bytes=parameters // 2,
        nf4_bytes=round(projections * NF4_BITS / 8) + 2 * rest,
    )
