"""Token-weighted perplexity: exp(total negative log-likelihood / labelled tokens), at any batch size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from loram.data.packing import PackedRows, batches, trimmed
from loram.data.tokens import Encoded, Examples
from loram.errors import LoramError
from loram.models.layerwise import LayerwiseModel
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
    examples: Examples | Sequence[Encoded],
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
    return sound(Perplexity(nll, tokens), description)


def perplexities(
    engine: LayerwiseModel, sets: Mapping[str, Examples], max_length: int, pad_token_id: int, description: str
) -> dict[str, Perplexity]:
    """The same for several sets at once with one layer of the model in memory; its weights are read once for all.

    Raises:
        LoramError: the model computes NaN or infinity.
    """
    rows = {name: PackedRows(examples, max_length, pad_token_id, seed=None) for name, examples in sets.items()}
    results = iter(
        engine.nll([trimmed(batch) for of_set in rows.values() for batch in batches(of_set, 1)], description)
    )
    found = {}
    for name, of_set in rows.items():
        counts = [next(results) for _ in range(len(of_set))]
        total = Perplexity(sum(nll for nll, _ in counts), sum(tokens for _, tokens in counts))
        found[name] = sound(total, f"{description}: {name}")
    return found


def sound(result: Perplexity, description: str) -> Perplexity:
    """The same; LoramError if it is NaN or infinite."""
    if not math.isfinite(result.nll):
        raise LoramError(
            f"{description}: the log-likelihood is {result.nll}, so the model computes NaN or infinity.",
            fix="Check that its weights are sound; a longer alignment or a smaller ratio helps a broken pruned model.",
        )
    return result
