"""The training loop for a model that is never there as a whole: an adapter moves, one decoder layer is in memory.

An optimizer step sends all its micro-batches through a layer before the next one is read, forwards and backwards, so
a step reads the weights twice however many rows it has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from loram.evaluate.perplexity import Perplexity, perplexities
from loram.models.layerwise import LayerwiseModel
from loram.training.trainer import Batch, StepTrainer


class LayerwiseAdapter(nn.Module):
    """The trained parameters of an engine's model, as the module that the loop trains and saves.

    Args:
        engine: with an adapter, and `trains` choosing it.
    """

    def __init__(self, engine: LayerwiseModel) -> None:
        super().__init__()
        self._engine = (engine,)  # in a tuple, torch does not look for parameters in it
        for name, parameter in engine.model.named_parameters():
            if parameter.requires_grad:
                self.register_parameter(name.replace(".", "/"), parameter)

    @property
    def engine(self) -> LayerwiseModel:
        return self._engine[0]

    def train(self, mode: bool = True) -> LayerwiseAdapter:
        """Turns the adapter's dropout on or off."""
        self.engine.model.train(mode)
        super().train(mode)
        return self

    def forward(self, examples: Any, max_length: int, pad_token_id: int) -> Perplexity:
        """Perplexity of the model as it stands."""
        training = self.training
        self.eval()
        try:
            return perplexities(self.engine, {"": examples}, max_length, pad_token_id, "evaluate")[""]
        finally:
            self.train(training)


def layerwise_perplexity(model: nn.Module, examples: Any, max_length: int, pad_token_id: int) -> Perplexity:
    """What `loram.evaluate.perplexity.perplexity` is for a whole model, for a `LayerwiseAdapter`."""
    found: Perplexity = model(examples, max_length, pad_token_id)
    return found


class LayerwiseTrainer(StepTrainer):
    """Takes a step's gradients from the engine of a `LayerwiseAdapter`."""

    def _accumulate(
        self, model: nn.Module, inputs: Batch, tokens_R: list[int], num_items: torch.Tensor | int | None
    ) -> torch.Tensor:
        adapter = self.accelerator.unwrap_model(model)
        adapter.train()
        micro_batches = list(self._micro_batches(inputs, tokens_R))
        self._at_once = max(len(micro["tokens"]) for micro in micro_batches)  # they go through a layer one by one
        labelled = max(1, int(num_items or 0))  # a step without a label has nothing to learn, and a loss of 0
        # Other dropout in every step, the same when a resumed run makes it again.
        adapter.engine.seed = self._section.seed + self.state.global_step
        step = f"step {self.state.global_step + 1}"
        results = adapter.engine.backward(micro_batches, 1 / labelled, description=step)
        self.counts["loss_tokens"] = sum(count for _, count in results)
        return torch.tensor(sum(nll for nll, _ in results) / labelled, device=adapter.engine.device)
