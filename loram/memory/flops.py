"""Floating-point operations of a training step, and the tokens a second they allow at most.

A multiplication and an addition are two operations. Counted: matrix products (arXiv 2001.08361, §2.1); not norms,
activation functions and softmax, which a card does beside them or while it waits for memory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from loram.memory.cards import Card
from loram.memory.formats import FORMATS
from loram.memory.resident import layer_adapters, linears, padded
from loram.memory.setup import TrainingSetup
from loram.models.shape import ModelShape, Widths


@dataclass(frozen=True)
class TokenFlops:
    """Operations a token of a row, by pass. `forward` has no adapter; `adapter` is that of all passes."""

    forward: int
    backward: int
    recomputation: int
    adapter: int

    @property
    def step(self) -> int:
        """A training step."""
        return self.forward + self.backward + self.recomputation + self.adapter

    def to_dict(self) -> dict[str, int]:
        return {**asdict(self), "step": self.step}


@dataclass(frozen=True)
class Ceiling:
    """Tokens a second that a card's datasheet allows: a ceiling, not a prediction.

    `compute`: matrix products alone, at the card's peak. `with_dequantization`: with the 4-bit weights unpacked
    before each product, at the card's bandwidth and not overlapped; `dequantization_share` of the time goes there.
    """

    compute: float
    with_dequantization: float
    dequantization_share: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def token_flops(shape: ModelShape, widths: Widths, setup: TrainingSetup) -> TokenFlops:
    """Operations of one token, padding taken as tokens.

    A linear of n weights takes 2·n forward, 2·n for the gradient of its input, 2·n for that of its weights if they
    train, and 2·n more where checkpointing computes the layers again. A LoRA of n weights takes 6·n, with
    checkpointing 8·n; a DoRA's norms cost as much as `lora_r` tokens more a step. Attention takes 2·T·width a layer
    forward (scores and values, every query with the keys before it in its row, as causal kernels compute them; shorter
    documents take less) and twice that backward. The head counts on labelled positions only; it is not computed again.
    """
    projections = sum(rows * columns for rows, columns, _ in linears(shape, widths))
    groups = sum(widths.kv_groups) * shape.architecture.query_heads_per_group
    attention = 2 * setup.length * groups * shape.head_dim
    head = 2 * shape.vocabulary * shape.hidden * setup.labelled // setup.tokens
    layers = 2 * projections
    # Of the layers, the share that is computed again; they are taken as alike.
    again = _recomputed(shape, setup)
    adapter = 0
    if setup.method == "adapter":
        adapter = round((6 + 2 * again) * sum(tensor.elements for tensor in layer_adapters(shape, widths, setup)))
        if setup.adapts_head:
            rank = setup.rank(shape.architecture.head)
            adapter += 6 * rank * (shape.vocabulary + shape.hidden) * setup.labelled // setup.tokens
        if setup.dora:
            adapter += round(2 * setup.lora_r * (1 + again) * _adapted(shape, widths, setup) / setup.tokens)
    return TokenFlops(
        forward=layers + attention + head,
        backward=layers * (2 if setup.trains_layers else 1) + 2 * attention + head * (2 if setup.trains_head else 1),
        recomputation=round(again * (layers + attention)),
        adapter=adapter,
    )


def pass_flops(shape: ModelShape, widths: Widths, length: int, tokens: int, gradients: bool = False) -> int:
    """Operations of one pass of so many tokens, in rows of `length`, without the head; with `gradients` of all weights,
    those of the backward pass too."""
    setup = TrainingSetup(
        batch=1, length=length, quantizer="none", method="all", activation_checkpointing=False, labelled_positions=0
    )
    of_token = token_flops(shape, widths, setup)
    return tokens * (of_token.forward + (of_token.backward if gradients else 0))


def _recomputed(shape: ModelShape, setup: TrainingSetup) -> float:
    layers = shape.architecture.layers
    return sum(map(setup.recomputes, range(layers))) / layers


def _adapted(shape: ModelShape, widths: Widths, setup: TrainingSetup) -> int:
    """Weights of the layers' linears that carry an adapter."""
    return sum(
        rows * columns
        for layer in range(shape.architecture.layers)
        for projection, rows, columns in shape.projections(widths, layer)
        if setup.adapts(projection)
    )


def dequantization_traffic(shape: ModelShape, widths: Widths, setup: TrainingSetup) -> int:
    """Bytes that unpacking moves in one micro-batch: each packed weight is read, and written in the compute dtype.

    Once in each pass over the layers: forward, recomputation, backward. The reading of what was written belongs to
    the product. A quantized head is unpacked forward and backward; of a quantized embedding only rows are read.
    """
    form = FORMATS.get(setup.quantizer)
    if form is None:
        return 0

    def moved(rows: int, columns: int) -> int:
        return form.nbytes(rows, columns, setup.double_quant) + rows * columns * setup.compute_bytes

    passes = 2 + _recomputed(shape, setup)
    layers = round(passes * sum(moved(rows, columns) for rows, columns, _ in linears(shape, widths)))
    return layers + (2 * moved(shape.vocabulary, padded(shape.hidden)) if setup.quantize_embeddings else 0)


def ceiling(shape: ModelShape, widths: Widths, setup: TrainingSetup, card: Card) -> Ceiling:
    """The most tokens a second on a card, in bfloat16."""
    computing = token_flops(shape, widths, setup).step * setup.tokens / card.bf16_flops
    unpacking = dequantization_traffic(shape, widths, setup) / card.bandwidth_bytes_per_s
    return Ceiling(
        compute=setup.tokens / computing,
        with_dequantization=setup.tokens / (computing + unpacking),
        dequantization_share=unpacking / (computing + unpacking),
    )
