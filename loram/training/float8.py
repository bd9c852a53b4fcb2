"""Products of linears in 8-bit floating point (torchao), for training all weights on cards that have such units.

Weights, gradients and optimizer keep their dtypes. Input, weight and the output's gradient of each product are scaled
by tensor and cast when they are used (FP8 Formats for Deep Learning, arXiv 2209.05433).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from loram.errors import MissingPackageError, RecipeError
from loram.memory.setup import fits_float8
from loram.models.discover import layers_prefix

# Ada; Hopper is 9.0.
_CAPABILITY = (8, 9)


def require_float8(setting: str) -> None:
    """Refuses before anything is loaded.

    Args:
        setting: the recipe's key, for the message.

    Raises:
        RecipeError: no card with 8-bit units.
        MissingPackageError: no torchao.
    """
    fix = f"Leave {setting} out; bfloat16 needs nothing special."
    if not torch.cuda.is_available():
        raise RecipeError(f"{setting}: needs an NVIDIA GPU (Ada, Hopper or newer), and this machine has none.", fix=fix)
    if torch.cuda.get_device_capability() < _CAPABILITY:
        raise RecipeError(
            f"{setting}: {torch.cuda.get_device_name()} has no 8-bit floating point units (Ada, Hopper or newer have).",
            fix=fix,
        )
    _torchao(setting)


def use_float8(model: Any, setting: str, *, emulate: bool = False) -> int:
    """Replaces the decoder layers' linears by 8-bit ones, names and parameters as they were.

    Args:
        model: a causal LM of transformers whose weights train.
        setting: the recipe's key, for messages.
        emulate: round to 8 bits, but multiply in the dtype of the weights; for devices without such units.

    Returns:
        How many there are; those with a side that is no multiple of 16 stay, since kernels need that.

    Raises:
        RecipeError: none fits.
        MissingPackageError: no torchao.
    """
    convert, config = _torchao(setting)
    layers = model.get_submodule(layers_prefix(model))
    fitting = {
        module for module in layers.modules() if isinstance(module, nn.Linear) and fits_float8(*module.weight.shape)
    }
    if not fitting:
        raise RecipeError(
            f"{setting}: no linear of the model has sides that are multiples of 16, as 8-bit kernels need.",
            fix="Prune with prune.multiple_of=16, or leave it out.",
        )
    convert(layers, module_filter_fn=lambda module, _: module in fitting, config=config(emulate=emulate))
    return len(fitting)


def _torchao(setting: str) -> tuple[Any, Any]:
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise MissingPackageError(f"{setting}: needs torchao.", fix='pip install "loram[float8]"') from error
    return convert_to_float8_training, Float8LinearConfig
