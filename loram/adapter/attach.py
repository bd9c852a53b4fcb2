"""Putting a LoRA on a model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from loram.adapter.folder import Adapter
from loram.errors import InputError, RecipeError, did_you_mean
from loram.models.architecture import Architecture
from loram.recipe import TrainSection

_RECOVER = "An adapter trained on a pruned model has to be recovered (loram recover) before the base can use it."


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
    """The model with a fresh LoRA (A random, B zero, float32) and everything else frozen."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=section.lora_r,
        lora_alpha=section.lora_alpha,
        lora_dropout=section.lora_dropout,
        use_rslora=section.use_rslora,
        target_modules=target_modules(architecture, section),
    )
    adapted: PreTrainedModel = get_peft_model(model, config)
    return adapted


def attach_trained(model: PreTrainedModel, folder: Path, device: torch.device) -> None:
    """Puts a trained adapter on a model whose own weights may be absent (meta device), in place and in eval mode.

    Raises:
        InputError: the adapter does not fit the model, or a tensor of it was not applied.
    """
    from peft import LoraConfig, PeftModel

    config = LoraConfig.from_pretrained(str(folder))
    try:
        PeftModel(model, config)
    except ValueError as error:
        raise InputError(f"The adapter {folder} does not fit the model: {error}", fix=_RECOVER) from error
    expected = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if ".lora_" in f".{path}" or ".modules_to_save." in f".{path}."
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    with Adapter(folder) as adapter:
        for tensor in adapter.tensors:
            module, _, name = tensor.module.rpartition(".")
            where, name = (
                (f"{module}.modules_to_save.default", name)
                if tensor.part == "saved"
                else (f"{tensor.module}.lora_{tensor.part}.default", "weight")
            )
            value = adapter.reader.read(tensor.key).to(device)
            old = model.get_submodule(where)._parameters[name] if f"{where}.{name}" in expected else None
            if old is None or old.shape != value.shape:
                found = "no such module" if old is None else f"{list(old.shape)} there"
                raise InputError(
                    f"The adapter {folder} does not fit the model: '{tensor.key}' is {list(value.shape)}, {found}.",
                    fix=_RECOVER,
                )
            model.get_submodule(where)._parameters[name] = nn.Parameter(value.float())
            expected.discard(f"{where}.{name}")
    if expected:
        raise InputError(f"The adapter {folder} lacks weights for '{sorted(expected)[0]}'.", fix="Train it again.")
    model.eval()
