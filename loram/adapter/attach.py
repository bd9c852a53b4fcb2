"""Putting a LoRA on a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loram.errors import RecipeError, did_you_mean
from loram.models.architecture import Architecture
from loram.recipe import TrainSection

if TYPE_CHECKING:  # the names of what is adapted are needed where transformers is not
    from torch import Tensor
    from transformers import PreTrainedModel


def target_modules(architecture: Architecture, section: TrainSection) -> list[str]:
    """The sorted module names to adapt: projections of the decoder layers, and the head if asked.

    Raises:
        RecipeError: a name that is no projection of this architecture.
    """
    known = {projection.name.rpartition(".")[2] for projection in architecture.projections}
    wanted = known if section.target_modules == "all" else set(section.target_modules)
    for name in sorted(wanted - known):
        raise RecipeError(
            f"train.target_modules: '{name}' is no projection of {architecture.model_type}{did_you_mean(name, known)}.",
            fix=f"Choose from {sorted(known)}; for the output head set train.lora_lm_head.",
        )
    head = {architecture.head.rpartition(".")[2]} if section.lora_lm_head else set()
    return sorted(wanted | head)


def attach(model: PreTrainedModel, architecture: Architecture, section: TrainSection) -> PreTrainedModel:
    """The model with a fresh LoRA or DoRA (A random, B zero, float32) and everything else frozen."""
    from peft import LoraConfig, get_peft_model

    from loram.adapter.linear import fused

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=section.lora_r,
        lora_alpha=section.lora_alpha,
        lora_dropout=section.lora_dropout,
        use_rslora=section.use_rslora,
        use_dora=section.use_dora,
        target_modules=target_modules(architecture, section),
    )
    adapted: PreTrainedModel = get_peft_model(model, fused(config))
    return adapted


def ratios(adapted: PreTrainedModel) -> dict[str, Tensor]:
    """Module → DoRA's m / ‖W + s·B·A‖ of every row, on the model as it stands; what a recovery carries over."""
    from loram.adapter.linear import AdaptedLinear

    root = adapted.get_base_model()
    return {name: module.ratio() for name, module in root.named_modules() if isinstance(module, AdaptedLinear)}
