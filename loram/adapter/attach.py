"""Putting a LoRA on a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loram.errors import RecipeError, did_you_mean
from loram.models.architecture import Architecture
from loram.recipe import TrainSection

if TYPE_CHECKING:  # the names of what is adapted are needed where transformers is not
    from peft import LoraConfig
    from torch import Tensor
    from transformers import PreTrainedModel


# Starts that PEFT makes itself; the others are made in `loram.adapter.start`, and PEFT's default stands in.
_INITS = {"gaussian": "gaussian"}
_WHOLE = {"embedding": "embedding", "lm_head": "head"}


def target_modules(architecture: Architecture, section: TrainSection) -> list[str]:
    """The sorted module names to adapt: projections of the decoder layers, and head and embedding if asked.

    Raises:
        RecipeError: a name that is no projection of this architecture.
    """
    known = {_last(projection.name) for projection in architecture.projections}
    wanted = known if section.target_modules == "all" else set(section.target_modules)
    for name in sorted(wanted - known):
        raise RecipeError(
            f"train.target_modules: '{name}' is no projection of {architecture.model_type}{did_you_mean(name, known)}.",
            fix=f"Choose from {sorted(known)}; for head and embedding set train.lora_lm_head, train.lora_embedding.",
        )
    head = {_last(architecture.head)} if section.lora_lm_head else set()
    embedding = {_last(architecture.embedding)} if section.lora_embedding else set()
    return sorted(wanted | head | embedding)


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def lora_config(architecture: Architecture, section: TrainSection) -> LoraConfig:
    """PEFT's configuration of a section's adapter."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=section.lora_r,
        lora_alpha=section.lora_alpha,
        rank_pattern=section.rank_pattern,
        alpha_pattern=section.alpha_pattern,
        init_lora_weights=_INITS.get(section.init_lora_weights, True),
        lora_dropout=section.lora_dropout,
        use_rslora=section.use_rslora,
        use_dora=section.use_dora,
        target_modules=target_modules(architecture, section),
        modules_to_save=[_last(getattr(architecture, _WHOLE[name])) for name in section.modules_to_save] or None,
    )


def attach(model: PreTrainedModel, architecture: Architecture, section: TrainSection) -> PreTrainedModel:
    """The model with a fresh LoRA or DoRA (A random by the section's seed, B zero, float32), all else frozen."""
    import torch
    from peft import get_peft_model

    from loram.adapter.linear import fused

    config = lora_config(architecture, section)
    with torch.random.fork_rng(devices=[]):  # torch seeds itself anew in every process
        torch.manual_seed(section.seed)
        adapted: PreTrainedModel = get_peft_model(model, fused(config))
    for name, parameter in adapted.named_parameters():
        if ".modules_to_save." in name:
            parameter.data = parameter.data.float()  # steps of AdamW are lost in 16 bits
    return adapted


def ratios(adapted: PreTrainedModel) -> dict[str, Tensor]:
    """Module → DoRA's m / ‖W + s·B·A‖ of every row, on the model as it stands; what a recovery carries over."""
    from loram.adapter.folder import PREFIX
    from loram.adapter.linear import AdaptedLinear

    modules = dict(adapted.named_modules())
    # Where layers are sharded (FSDP2), each gathers its weights while its ratios are made.
    sharded = [name for name, module in modules.items() if hasattr(module, "unshard")]
    found = {}
    for name, module in modules.items():
        if isinstance(module, AdaptedLinear):
            around = [modules[owner] for owner in sharded if f"{name}.".startswith(f"{owner}." if owner else "")]
            for owner in around:
                owner.unshard()
            found[name.removeprefix(PREFIX)] = module.ratio()
            for owner in around:
                owner.reshard()
    return found
