"""Parameters and stored bytes of a model, whole or pruned."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from loram.memory.resident import weights
from loram.memory.setup import TrainingSetup
from loram.models.shape import ModelShape, Widths


@dataclass(frozen=True)
class Sizes:
    """Parameters and bytes of a model.

    `four_bit_bytes` counts every parameter as 4 bits, as the paper does. `stored_bytes` are those of bitsandbytes'
    format with its constants and tables, embedding, head, norms and biases in 16 bits;
    `stored_bytes_quantized_embeddings` has embedding and head in 4 bits too.
    """

    parameters: int
    bf16_bytes: int
    four_bit_bytes: int
    stored_bytes: int
    stored_bytes_quantized_embeddings: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def sizes(shape: ModelShape, widths: Widths, double_quant: bool = True) -> Sizes:
    """Sizes of a model at those widths."""
    parameters = shape.parameters(widths)
    return Sizes(
        parameters=parameters,
        bf16_bytes=2 * parameters,
        four_bit_bytes=-(-parameters // 2),
        stored_bytes=stored_bytes(shape, widths, double_quant, quantize_embeddings=False),
        stored_bytes_quantized_embeddings=stored_bytes(shape, widths, double_quant, quantize_embeddings=True),
    )


def stored_bytes(shape: ModelShape, widths: Widths, double_quant: bool, quantize_embeddings: bool) -> int:
    """Bytes of the 4-bit model: what of its weights is there before any training."""
    setup = TrainingSetup(batch=1, length=1, double_quant=double_quant, quantize_embeddings=quantize_embeddings)
    own = weights(shape, widths, setup)
    return own.weights - own.buffers
