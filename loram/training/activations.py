"""What a step keeps for its backward, and where: recomputation of decoder layers, and offloading to host memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from loram.models.discover import layers_prefix
from loram.recipe import TrainingSection


def prepare_activations(model: Any, section: TrainingSection, adapter: bool) -> None:
    """Turns on recomputation as the section says: of all decoder layers, or of every n-th.

    Args:
        model: a causal LM of transformers, before an adapter is put on it.
        section: recipe settings.
        adapter: only an adapter will train; then the embedding's output has to need a gradient, or the layers before
            the first adapter would not be recomputed.
    """
    if not section.activation_checkpointing:
        return
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for number, layer in enumerate(model.get_submodule(layers_prefix(model)).children()):
        layer.gradient_checkpointing = number % section.checkpoint_every == 0
    if adapter:
        model.enable_input_require_grads()


def offloaded(section: TrainingSection) -> AbstractContextManager[Any]:
    """For a forward: what it saves waits in pinned host memory and comes back when it is needed.

    Where there is no accelerator everything is in host memory already, and nothing is moved.
    """
    if section.activation_offloading and torch.cuda.is_available():
        return torch.autograd.graph.save_on_cpu(pin_memory=True)
    return nullcontext()
