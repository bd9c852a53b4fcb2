"""Weights, adapter, gradients and optimizer state of a training step, exact to the byte.

For Llama, Mistral, Qwen2 and Qwen3, that is; other families may carry a few more bytes of buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loram.memory.formats import BLOCK, FLOAT32, FORMATS
from loram.memory.setup import ADAPTER_BYTES, TrainingSetup
from loram.models.shape import ModelShape, Widths

LOGITS_BYTES = 128 << 20
"""Of float32 logits that exist at a time (`loram.training.loss`)."""
CHUNK_BYTES = 64 << 20
"""Of a quantized head that are dequantized at a time (`loram.models.vocabulary`)."""
_CODE_BYTES = 16 * FLOAT32  # the 16 values of the format, one table a tensor
_NESTED_CODE_BYTES = 256 * FLOAT32  # the 8-bit values of the constants, a table copied for every tensor too

# bitsandbytes' 8-bit optimizer state (`optim.optimizer.Optimizer2State.init_state`).
_OPTIMIZER_TABLES_BYTES = 2 * 256 * FLOAT32  # signed and unsigned values, shared by all tensors
_MIN_8BIT_SIZE = 4096
_OPTIMIZER_BLOCK = 256
_MIN_PAGED_SIZE = 100_000

# Models that norm each query and key head; all others are taken to have norms over the hidden size alone.
_QUERY_KEY_NORMS = frozenset({"qwen3", "gemma3", "gemma3_text"})


@dataclass(frozen=True)
class Trainable:
    """A tensor that trains; `embedding` marks the matrix that 8-bit optimizers keep in 32 bits."""

    elements: int
    embedding: bool = False


def padded(columns: int) -> int:
    """Columns of a row of a quantized embedding or head: whole blocks, so that each row can be read alone."""
    return -(-columns // BLOCK) * BLOCK


def logit_rows(vocabulary: int) -> int:
    """Labelled tokens whose logits exist at a time."""
    return max(1, LOGITS_BYTES // (vocabulary * FLOAT32))


def chunk_rows(columns: int, itemsize: int) -> int:
    """Rows of a quantized head that are dequantized at a time."""
    return max(1, CHUNK_BYTES // (padded(columns) * itemsize))


def has_query_key_norms(shape: ModelShape) -> bool:
    return shape.architecture.model_type in _QUERY_KEY_NORMS


def norm_sizes(shape: ModelShape) -> list[int]:
    """Elements of each norm of one decoder layer: those over the hidden size, then those of query and key heads."""
    heads = [shape.head_dim] * 2 if has_query_key_norms(shape) else []
    rest = shape.layer_norms - sum(heads)
    whole = [shape.hidden] * (rest // shape.hidden)
    return [*whole, *([rest % shape.hidden] if rest % shape.hidden else []), *heads]


def linears(shape: ModelShape, widths: Widths) -> Iterator[tuple[int, int, bool]]:
    """(rows, columns, whether it has a bias) of every matrix that the layers' projections are."""
    for layer in range(shape.architecture.layers):
        for projection in shape.architecture.projections:
            for matrix in widths.matrices(layer, projection):
                yield matrix.rows, matrix.columns, matrix.bias


@dataclass(frozen=True)
class Weights:
    """Bytes of the model's own tensors."""

    quantized_linears: int
    linears: int
    embedding: int
    head: int
    norms: int
    biases: int
    buffers: int

    @property
    def weights(self) -> int:
        """All of them."""
        parts = (self.quantized_linears, self.linears, self.embedding, self.head)
        return sum(parts) + self.norms + self.biases + self.buffers


def weights(shape: ModelShape, widths: Widths, setup: TrainingSetup) -> Weights:
    """Every tensor of the model. Biases and norms are never quantized; a tied head is counted as the embedding."""
    per = setup.parameter_bytes
    sizes = list(linears(shape, widths))
    form = FORMATS.get(setup.quantizer)
    vocabulary = shape.vocabulary * shape.hidden * per
    if form is not None and setup.quantize_embeddings:
        vocabulary = form.nbytes(shape.vocabulary, padded(shape.hidden), setup.double_quant)
    whole = sum(rows * columns for rows, columns, _ in sizes) * per
    return Weights(
        quantized_linears=sum(form.nbytes(o, i, setup.double_quant) for o, i, _ in sizes) if form else 0,
        linears=0 if form else whole,
        embedding=vocabulary,
        head=0 if shape.tied else vocabulary,
        norms=(shape.layer_norms * shape.architecture.layers + shape.final_norm) * per,
        biases=sum(rows for rows, _, bias in sizes if bias) * per,
        buffers=2 * (shape.head_dim // 2) * FLOAT32,  # the rotary frequencies and their original
    )


def trainables(shape: ModelShape, widths: Widths, setup: TrainingSetup) -> list[Trainable]:
    """Every tensor that gets a gradient."""
    return list(_adapter(shape, widths, setup) if setup.method == "adapter" else _model(shape, widths, setup))


def _adapter(shape: ModelShape, widths: Widths, setup: TrainingSetup) -> Iterator[Trainable]:
    yield from layer_adapters(shape, widths, setup)
    yield from vocabulary_adapters(shape, setup)


def layer_adapters(shape: ModelShape, widths: Widths, setup: TrainingSetup) -> Iterator[Trainable]:
    """A [rank, in] and B [out, rank] of every adapted projection, and DoRA's magnitudes [out]."""
    for layer in range(shape.architecture.layers):
        for projection, rows, columns in shape.projections(widths, layer):
            if setup.adapts(projection):
                rank = setup.rank(shape.architecture.module(layer, projection))
                yield from _adapted(rows, columns, rank, setup.dora)


def vocabulary_adapters(shape: ModelShape, setup: TrainingSetup) -> Iterator[Trainable]:
    """The same of head and embedding, and their copies that train whole."""
    if setup.adapts_head:
        yield from _adapted(shape.vocabulary, shape.hidden, setup.rank(shape.architecture.head), setup.dora)
    if setup.lora_embedding:
        yield from _adapted(shape.vocabulary, shape.hidden, setup.rank(shape.architecture.embedding), dora=False)
    if setup.saved_embedding:
        yield Trainable(shape.vocabulary * shape.hidden, embedding=True)
    if setup.saved_head:
        yield Trainable(shape.vocabulary * shape.hidden)


def _adapted(rows: int, columns: int, rank: int, dora: bool) -> Iterator[Trainable]:
    yield Trainable(rank * columns)
    yield Trainable(rows * rank)
    if dora:
        yield Trainable(rows)


def _model(shape: ModelShape, widths: Widths, setup: TrainingSetup) -> Iterator[Trainable]:
    for rows, columns, bias in linears(shape, widths):
        yield Trainable(rows * columns)
        if bias:
            yield Trainable(rows)
    for _ in range(shape.architecture.layers):
        yield from map(Trainable, norm_sizes(shape))
    yield Trainable(shape.final_norm)
    if setup.trains_vocabulary:
        yield Trainable(shape.vocabulary * shape.hidden, embedding=True)
        if not shape.tied:
            yield Trainable(shape.vocabulary * shape.hidden)


def adapter_bytes(tensors: list[Trainable], setup: TrainingSetup) -> int:
    return sum(tensor.elements for tensor in tensors) * ADAPTER_BYTES if setup.method == "adapter" else 0


def gradient_bytes(tensors: list[Trainable], setup: TrainingSetup) -> int:
    return sum(tensor.elements for tensor in tensors) * setup.gradient_bytes


def optimizer_bytes(tensors: list[Trainable], setup: TrainingSetup) -> int:
    """The state from the second step on.

    torch's AdamW keeps two moments in the parameter's dtype and a float32 step counter. bitsandbytes keeps two
    float32 moments, or two of 8 bits with a float32 constant for every 256 of each, where a tensor has 4,096
    elements or more and is no embedding (which the Trainer excepts); the two 8-bit code tables are shared.
    """
    if setup.optimizer == "adamw_torch":
        return sum(2 * tensor.elements * setup.gradient_bytes + FLOAT32 for tensor in tensors)
    eight_bit = [tensor for tensor in tensors if _in_8_bits(tensor, setup)]
    tables = _OPTIMIZER_TABLES_BYTES if eight_bit else 0
    return tables + sum(_bitsandbytes_state(tensor, setup) for tensor in tensors)


def pageable_bytes(tensors: list[Trainable], setup: TrainingSetup) -> int:
    """The part of the optimizer state in unified memory, which the driver may move to the host."""
    if not setup.optimizer.startswith("paged") or setup.device != "cuda":
        return 0
    per = {tensor: 2 if _in_8_bits(tensor, setup) else 2 * FLOAT32 for tensor in tensors}
    return sum(per[tensor] * tensor.elements for tensor in tensors if tensor.elements >= _MIN_PAGED_SIZE)


def _in_8_bits(tensor: Trainable, setup: TrainingSetup) -> bool:
    return setup.optimizer.endswith("8bit") and tensor.elements >= _MIN_8BIT_SIZE and not tensor.embedding


def _bitsandbytes_state(tensor: Trainable, setup: TrainingSetup) -> int:
    if not _in_8_bits(tensor, setup):
        return 2 * tensor.elements * FLOAT32
    return 2 * (tensor.elements + -(-tensor.elements // _OPTIMIZER_BLOCK) * FLOAT32)


def optimizer_workspace(tensors: list[Trainable], setup: TrainingSetup) -> int:
    """What the optimizer allocates during its step, beyond state and gradients.

    torch on CUDA works on all tensors at once and takes the root of all second moments
    (`torch.optim.adam._multi_tensor_adam`); on the CPU it goes tensor by tensor, with two copies (`denom`).
    bitsandbytes' CUDA kernels work in place; its CPU fallback holds float32 copies of one tensor.
    """
    largest = max((tensor.elements for tensor in tensors), default=0)
    if setup.optimizer == "adamw_torch":
        everything = sum(tensor.elements for tensor in tensors)
        return (everything if setup.device == "cuda" else 2 * largest) * setup.gradient_bytes
    copies = 5 if setup.optimizer.endswith("8bit") else 4
    return 0 if setup.device == "cuda" else copies * largest * FLOAT32
