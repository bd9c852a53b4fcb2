"""Putting a trained adapter back on a model, and taking it off again."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from loram.adapter.folder import WEIGHTS_NAME, Adapter, AdapterTensor, write_config
from loram.adapter.linear import fused
from loram.errors import InputError

_RECOVER = "An adapter trained on a pruned model has to be recovered (loram recover) before the base can use it."


def attach_trained(model: PreTrainedModel, folder: Path, device: torch.device) -> None:
    """Puts a trained adapter on a model whose own weights may be absent (meta device), in place and in eval mode.

    Raises:
        InputError: the adapter does not fit the model, or a tensor of it was not applied.
    """
    from peft import LoraConfig, PeftModel

    config = LoraConfig.from_pretrained(str(folder))
    try:
        PeftModel(model, fused(config))
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
            where, name = _place(tensor)
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


def save_applied(model: PreTrainedModel, source: Path, folder: Path) -> None:
    """Writes the adapter that `attach_trained` took from `source` as it now is, float32, in the same form."""
    with Adapter(source) as adapter:
        tensors = {}
        for tensor in adapter.tensors:
            where, name = _place(tensor)
            value = model.get_submodule(where)._parameters[name]
            assert value is not None
            tensors[tensor.key] = value.detach().cpu().contiguous()
        save_file(tensors, folder / WEIGHTS_NAME, {"format": "pt"})
        write_config(adapter.config, adapter.config["base_model_name_or_path"], folder)


def _place(tensor: AdapterTensor) -> tuple[str, str]:
    """(module, parameter) that a stored tensor becomes in PEFT's layers."""
    if tensor.part == "saved":
        module, _, name = tensor.module.rpartition(".")
        return f"{module}.modules_to_save.default", name
    kind = tensor.key.removesuffix(".weight").rpartition(".")[2]
    if kind.startswith("lora_embedding"):
        return f"{tensor.module}.{kind}", "default"
    return f"{tensor.module}.{kind}.default", "weight"
