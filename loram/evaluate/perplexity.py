"""Token-weighted perplexity: exp(total negative log-likelihood / labelled tokens), at any batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from loram.data.encode import Encoded
from loram.data.packing import PackedRows, batches, trimmed
from loram.errors import LoramError
from loram.progress import bar
from loram.training.loss import summed_nll


@dataclass(frozen=True)
class Perplexity:
    """Total negative log-likelihood in nats over `tokens` labelled tokens."""

    nll: float
    tokens: int

    @property
    def loss(self) -> float:
        """Nats a token: the logarithm of the perplexity."""
        return self.nll / self.tokens

    @property
    def value(self) -> float:
        return math.exp(min(self.loss, 700.0))


def perplexity(
    model: nn.Module,
    examples: Sequence[Encoded],
    max_length: int,
    pad_token_id: int,
    batch_size: int = 1,
    description: str = "evaluate",
) -> Perplexity:
    """Perplexity of a model over examples, packed so that none sees another and padding is never scored.

    Raises:
        LoramError: the model computes NaN or infinity.
    """
    rows = PackedRows(examples, max_length, pad_token_id, seed=None)
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    nll, tokens = 0.0, 0
    try:
        with torch.no_grad(), bar(description, len(rows), "rows") as advance:
            for batch in batches(rows, batch_size):
                here = {name: tensor.to(device) for name, tensor in trimmed(batch).items()}
                total, count = summed_nll(model, here)
                nll += float(total)
                tokens += count
                advance(len(batch["labels"]))
    finally:
        model.train(training)
    if not math.isfinite(nll):
        raise LoramError(
            f"{description}: the log-likelihood is {nll}, so the model computes NaN or infinity.",
            fix="Check that its weights are sound; a longer alignment or a smaller ratio helps a broken pruned model.",
        )
    return Perplexity(nll, tokens)
