"""The operations of a decoder as they run in transformers, bitsandbytes and here: what each makes, saves and needs.

Each function writes one group onto a tape, in the order of the code it names. Sizes are elements; an `itemsize` is
4 for float32 and 2 for bfloat16.

Shape suffixes: B rows, T tokens, H hidden, Q query width (heads × head size), G key or value width, N neurons,
R rank, K labelled positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from loram.memory.formats import FLOAT32, FORMATS
from loram.memory.resident import (
    chunk_rows,
    has_query_key_norms,
    logit_rows,
    norm_sizes,
    padded,
    vocabulary_adapters,
)
from loram.memory.setup import ADAPTER_BYTES, TrainingSetup, fits_float8
from loram.memory.tape import Profile, Storage, Tape, Tensor
from loram.models.architecture import Projection
from loram.models.shape import PRODUCT_ROWS, Matrix, ModelShape, Widths

_INDEX = 8  # int64
_SOFT_CAPPED = frozenset({"gemma2"})
_CHANGE_LOGITS = frozenset({"gemma2", "granite", "cohere", "cohere2"})  # after the head (`loram.training.loss`)
_PADDED_QUERIES = 32  # the CUDA kernel pads its logsumexp to whole blocks of queries


def mask_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """The masks of packed rows as layers get them: bool for fused attention, else ready to be added.

    Eager attention gets one of each kind of layer; attention by document only one for windows that a document exceeds.
    """
    if not setup.packed:
        return 0
    each = setup.batch * setup.length**2
    if shape.architecture.model_type in _SOFT_CAPPED:
        return len({*shape.windows, 0}) * each * setup.parameter_bytes
    return each * any(0 < window < setup.length for window in shape.windows)


@dataclass(frozen=True)
class Block:
    """A decoder layer of a model in a setup: what the op groups compute from."""

    shape: ModelShape
    widths: Widths
    setup: TrainingSetup
    layer: int

    @property
    def units(self) -> tuple[int, int]:
        """(key-value groups, neurons) left; layers with the same ones are alike."""
        return self.widths.kv_groups[self.layer], self.widths.neurons[self.layer]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the adapters of its projections."""
        architecture = self.shape.architecture
        return tuple(self.setup.rank(architecture.module(self.layer, p)) for p in architecture.projections)

    @property
    def factors(self) -> tuple[int, ...]:
        """Ranks of the projections that are two factors; 0 for the others."""
        return tuple(self.widths.rank(self.layer, p) or 0 for p in self.shape.architecture.projections)

    @property
    def masked(self) -> bool:
        """Whether its attention takes a mask: packed rows, and a window that a document of their length exceeds."""
        window = self.shape.windows[self.layer] if self.shape.windows else 0
        return self.setup.packed and 0 < window < self.setup.length

    def linears(self, unit: str, axis: int) -> list[tuple[Projection, int, int]]:
        """(projection, out features, in features) of one kind, in order."""
        found = self.shape.projections(self.widths, self.layer)
        return [item for item in found if item[0].unit == unit and item[0].axis == axis]


def decoder_layer(block: Block, needs_grad: bool) -> Profile:
    """`LlamaDecoderLayer`: norm, attention, residual, norm, MLP, residual; Gemma norms the outputs too.

    `needs_grad`: whether anything before this layer needs a gradient.
    """
    setup, hidden = block.setup, block.shape.hidden
    tape = Tape(setup.accumulating)
    x_BTH = tape.input(setup.tokens * hidden, setup.parameter_bytes, needs_grad)
    outer = sum(size == hidden for size in norm_sizes(block.shape)) >= 4
    for group in (attention, mlp):
        normed_BTH = rms_norm(tape, x_BTH, hidden, setup)
        y_BTH = group(tape, normed_BTH, block)
        tape.outlives(normed_BTH)
        if outer:
            y_BTH = rms_norm(tape, y_BTH, hidden, setup)
        x_BTH = add(tape, x_BTH, y_BTH)
    return tape.profile()


def loss_tail(shape: ModelShape, setup: TrainingSetup, needs_grad: bool) -> Profile:
    """Final norm, the labelled positions, head, and cross-entropy in float32 (`loram.training.loss`)."""
    tape = Tape(setup.accumulating)
    x_BTH = tape.input(setup.tokens * shape.hidden, setup.parameter_bytes, needs_grad)
    x_BTH = rms_norm(tape, x_BTH, shape.hidden, setup)
    x_BKH = tape.run((x_BTH,), setup.labelled * shape.hidden, x_BTH.itemsize)  # index by position
    if shape.architecture.model_type in _CHANGE_LOGITS:
        logits_BKV = head(tape, x_BKH, shape, setup)
        tape.outlives(x_BTH)
        tape.outlives(x_BKH)
        if shape.architecture.model_type in _SOFT_CAPPED:
            logits_BKV = soft_cap(tape, logits_BKV)
        logits_BKV = cast(tape, logits_BKV, FLOAT32)
        tape.hold(logits_BKV)  # a local variable of the loss
        cross_entropy(tape, logits_BKV, setup.labelled)
    else:
        head_loss(tape, x_BKH, shape, setup)
        tape.outlives(x_BTH)
        tape.outlives(x_BKH)
    return tape.profile()


def head_loss(tape: Tape, x_LH: Tensor, shape: ModelShape, setup: TrainingSetup) -> Tensor:
    """`_HeadLoss`: logits of some tokens at a time; keeps the gradients of its input and of what trains in the head."""
    rows, columns = shape.vocabulary, shape.hidden
    of_head = replace(setup, lora_embedding=False, saved_embedding=False)
    trained = sum(tensor.elements for tensor in vocabulary_adapters(shape, of_head)) * setup.gradient_bytes
    if setup.trains_vocabulary:
        trained = rows * columns * setup.parameter_bytes
    tokens = min(setup.labelled, logit_rows(rows))
    compute = setup.compute_bytes
    if setup.trains_head:
        unpacked = 0 if setup.vocabulary_bytes == compute else rows * columns * compute
    else:
        unpacked = frozen_head_bytes(shape, setup)
    # logits and their logarithms of probabilities; in 16 bits a float32 copy between, then the gradient cast back
    logits = tokens * rows * (2 * FLOAT32 if compute == FLOAT32 else compute + 2 * FLOAT32)
    # a DoRA keeps what it scales, and makes the gradient of that
    waiting = 2 * tokens * rows * compute if setup.adapts_head and setup.dora else 0
    return tape.run(
        (x_LH,),
        1,
        FLOAT32,
        saves=(Storage(x_LH.bytes), Storage(trained)),
        work=logits + waiting + unpacked + trained + tokens * columns * x_LH.itemsize,
        trains=trained,
    )


def frozen_head_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """A frozen head in the compute dtype, as far as it is not held so; of a quantized one a chunk of rows."""
    if not setup.quantize_embeddings:
        return unpacking_bytes(shape.vocabulary, shape.hidden, replace(setup, quantizer="none"))
    rows = min(shape.vocabulary, chunk_rows(shape.hidden, setup.parameter_bytes))
    return unpacking_bytes(rows, padded(shape.hidden), setup)


def cross_entropy(tape: Tape, logits: Tensor, rows: int) -> Tensor:
    """log_softmax saves what it makes; nll_loss saves that and the targets, and its backward fills a matrix."""
    normalised = tape.run((logits,), logits.elements, FLOAT32, saves_output=True)
    return tape.run((normalised,), 1, FLOAT32, saves=(normalised, Storage(rows * _INDEX)))


def add(tape: Tape, left: Tensor, right: Tensor) -> Tensor:
    """A sum in the wider dtype; backward hands the gradient on, in each one's own dtype."""
    itemsize = max(left.itemsize, right.itemsize)
    pieces = (cast_for_sum(tape, left, itemsize), cast_for_sum(tape, right, itemsize))
    return tape.run(pieces, left.elements, itemsize, passes=True)


def cast_for_sum(tape: Tape, tensor: Tensor, itemsize: int) -> Tensor:
    """Sums convert as they read, so only the gradient of a narrower term takes room."""
    return tensor if tensor.itemsize == itemsize else tape.run((tensor,), tensor.elements, itemsize, shares=tensor)


def cast(tape: Tape, tensor: Tensor, itemsize: int) -> Tensor:
    """`tensor.to(dtype)`: nothing where it has that dtype; saves nothing."""
    return tensor if tensor.itemsize == itemsize else tape.run((tensor,), tensor.elements, itemsize)


def rms_norm(tape: Tape, x: Tensor, size: int, setup: TrainingSetup) -> Tensor:
    """`LlamaRMSNorm.forward`, in float32: x · rsqrt(mean(x²) + ε) · w.

    pow saves the float32 x, rsqrt its output, the first product both; the second x only if w trains.
    """
    rows = x.elements // size
    wide = cast(tape, x, FLOAT32)
    # backward of pow: two full products besides the gradient (pow_backward)
    square = tape.run((wide,), x.elements, FLOAT32, saves=(wide,), backward_work=2 * wide.bytes)
    mean = tape.run((square,), rows, FLOAT32)
    scale = tape.run((mean,), rows, FLOAT32, saves_output=True)
    # backward of a product with a broadcast factor: the factor's gradient in full, before it is summed
    product = tape.run((wide, scale), x.elements, FLOAT32, saves=(wide, scale), backward_work=wide.bytes)
    product = cast(tape, product, x.itemsize)
    itemsize = max(x.itemsize, setup.parameter_bytes)
    if not setup.trains_layers:
        return tape.run((product,), x.elements, itemsize)
    gradient = size * setup.parameter_bytes
    return tape.run(
        (product,), x.elements, itemsize, saves=(product,), trains=gradient, backward_work=x.elements * itemsize
    )


def linear(tape: Tape, x: Tensor, rows: int, columns: int, itemsize: int, setup: TrainingSetup, trains: bool) -> Tensor:
    """`nn.Linear` with weight [rows, columns] of `itemsize` bytes: saves its input if the weight trains.

    Autocast casts input and weight, and keeps the copy of a weight that trains. Products in 8 bits make their copies
    anew each time (`loram.training.float8`).
    """
    eight = setup.float8 and trains and fits_float8(rows, columns)
    copy = setup.autocast and itemsize != setup.compute_bytes and not eight
    x = cast(tape, x, setup.compute_bytes if setup.autocast else x.itemsize)
    weight = Storage(rows * columns * setup.compute_bytes if copy else 0)
    work = rows * columns * setup.compute_bytes if copy and not trains else 0
    backward_work = rows * columns * setup.compute_bytes if copy and trains else 0
    if eight:  # of its input and weight, then of the gradient and one of the two
        work = x.elements + rows * columns
        backward_work = x.elements // columns * rows + max(x.elements, rows * columns)
    return tape.run(
        (x,),
        x.elements // columns * rows,
        x.itemsize,
        saves=(x, weight) if trains else (weight,),
        trains=rows * columns * itemsize if trains else 0,
        work=work,
        backward_work=backward_work,
    )


def packed_linear(tape: Tape, x: Tensor, rows: int, columns: int, unpacked: int, setup: TrainingSetup) -> Tensor:
    """`loram.models.quantizers.frozen_linear`: saves nothing, and unpacks its weight forwards and again backwards."""
    if setup.autocast:
        x = cast(tape, x, setup.compute_bytes)
    return tape.run((x,), x.elements // columns * rows, x.itemsize, work=unpacked, backward_work=unpacked)


def unpacking_bytes(rows: int, columns: int, setup: TrainingSetup) -> int:
    """A frozen weight in the compute dtype with what unpacking it needs; 0 where it is held so."""
    form = FORMATS.get(setup.quantizer)
    if form is not None:
        return form.unpacking(rows, columns, setup.compute_bytes, setup.double_quant)
    return 0 if setup.parameter_bytes == setup.compute_bytes else rows * columns * setup.compute_bytes


def adapted_linear(
    tape: Tape, x: Tensor, rows: int, columns: int, setup: TrainingSetup, unpacked: int, rank: int
) -> Tensor:
    """`loram.adapter.linear`: W·x + s·B·A·x as one operation, with DoRA scaled row by row.

    Saves its input and the [T, R] between the factors, a DoRA what it scales, too. `unpacked`: bytes of the weight in
    the compute dtype, made forwards and again backwards.
    """
    if setup.autocast:
        x = cast(tape, x, setup.compute_bytes)
    tokens = x.elements // columns
    low_TR = Storage(tokens * rank * x.itemsize)
    kept_TI = Storage(x.elements if setup.lora_dropout else 0)
    dropped = x.bytes if setup.lora_dropout else 0
    copies = 0 if x.itemsize == ADAPTER_BYTES else rank * (rows + columns) * x.itemsize
    norms = rows * rank * (x.itemsize + 2 * FLOAT32) if setup.dora else 0
    # a DoRA's own gradient waits while that of the scaled output is used
    waiting = tokens * rows * x.itemsize if setup.dora else 0
    out = tape.run(
        (x,),
        tokens * rows,
        x.itemsize,
        saves=(x, low_TR, kept_TI),
        work=copies + unpacked + norms,
        backward_work=copies + max(unpacked, 2 * dropped) + low_TR.bytes + waiting,
        trains=rank * (rows + columns) * ADAPTER_BYTES,
    )
    if setup.dora:
        trains = rows * ADAPTER_BYTES
        out = tape.run((out,), out.elements, out.itemsize, saves=(out, Storage(trains)), trains=trains)
    tape.outlives(x)
    return out


def base_work(matrices: list[Matrix], setup: TrainingSetup) -> int:
    """Bytes that W·x of a frozen base needs besides its output: a weight unpacked, and what is between two factors.

    A DoRA's norms need rows of U·V itself (`loram.models.factored`).
    """
    unpacked = [unpacking_bytes(matrix.rows, matrix.columns, setup) for matrix in matrices]
    if len(matrices) == 1:
        return unpacked[0]
    v, u = matrices
    if setup.dora:
        return sum(unpacked) + min(u.rows, PRODUCT_ROWS) * v.columns * setup.compute_bytes
    return setup.tokens * v.rows * setup.compute_bytes + max(unpacked)


def adapted(tape: Tape, x: Tensor, rows: int, columns: int, block: Block, projection: Projection) -> Tensor:
    """A projection, with its adapter if it has one."""
    setup = block.setup
    matrices = block.widths.matrices(block.layer, projection)
    if setup.adapts(projection):
        rank = setup.rank(block.shape.architecture.module(block.layer, projection))
        unpacked = base_work(matrices, setup)
        return adapted_linear(tape, x, rows, columns, setup, unpacked, rank)
    out = x
    for matrix in matrices:
        if setup.quantizer != "none":
            work = unpacking_bytes(matrix.rows, matrix.columns, setup)
            out = packed_linear(tape, out, matrix.rows, matrix.columns, work, setup)
        else:
            out = linear(tape, out, matrix.rows, matrix.columns, setup.parameter_bytes, setup, setup.trains_layers)
    gradient = rows * setup.parameter_bytes if setup.trains_layers and projection.bias else 0
    if setup.quantizer != "none":
        return out
    if gradient:
        out = tape.run((out,), out.elements, out.itemsize, shares=out, passes=True, trains=gradient)
    return out


def attention(tape: Tape, x_BTH: Tensor, block: Block) -> Tensor:
    """`LlamaAttention.forward`, with query and key norms where the model has them, and fused projections."""
    setup, shape = block.setup, block.shape
    heads = block.units[0] * shape.architecture.query_heads_per_group
    widths = (heads * shape.head_dim, *(block.units[0] * shape.head_dim,) * 2)
    outputs = [adapted(tape, x_BTH, rows, columns, block, p) for p, rows, columns in block.linears("kv_group", 0)]
    if len(outputs) == 3:
        q_BTQ, k_BTG, v_BTG = outputs
    else:  # one fused projection, sliced
        q_BTQ, k_BTG, v_BTG = (
            tape.run((outputs[0],), setup.tokens * width, outputs[0].itemsize, shares=outputs[0]) for width in widths
        )
    if has_query_key_norms(shape):
        q_BTQ = rms_norm(tape, q_BTQ, shape.head_dim, setup)
        k_BTG = rms_norm(tape, k_BTG, shape.head_dim, setup)
    q_BTQ, k_BTG = rotary(tape, q_BTQ), rotary(tape, k_BTG)
    if shape.architecture.model_type in _SOFT_CAPPED:
        out_BTQ = capped_attention(tape, q_BTQ, k_BTG, v_BTG, heads, setup)
    elif setup.packed and not block.masked:
        out_BTQ = attention_by_document(tape, q_BTQ, k_BTG, v_BTG, heads, setup)
    else:
        out_BTQ = scaled_dot_product(tape, q_BTQ, k_BTG, v_BTG, heads, setup)
    if len(outputs) == 1:  # sliced queries come out head by head, and are laid out anew
        out_BTQ = tape.run((out_BTQ,), out_BTQ.elements, out_BTQ.itemsize, passes=True)
    (projection, rows, columns), *_ = block.linears("kv_group", 1)
    return adapted(tape, out_BTQ, rows, columns, block, projection)


def rotary(tape: Tape, x: Tensor) -> Tensor:
    """x · cos + rotate_half(x) · sin: saves cos and sin alone, which all layers share.

    Backward through the halves: each slice's gradient is a matrix of zeros filled in part, and the two are added.
    """
    left = tape.run((x,), x.elements, x.itemsize)
    halves = [tape.run((x,), x.elements // 2, x.itemsize, shares=x) for _ in range(2)]
    negative = tape.run((halves[1],), x.elements // 2, x.itemsize)
    rotated = tape.run((negative, halves[0]), x.elements, x.itemsize, passes=True)  # cat; its gradients are views
    right = tape.run((rotated,), x.elements, x.itemsize)
    return tape.run((left, right), x.elements, x.itemsize, passes=True)


def attention_by_document(tape: Tape, q: Tensor, k: Tensor, v: Tensor, heads: int, setup: TrainingSetup) -> Tensor:
    """`loram.models.attention`: inputs, outputs and the logsumexp of every query are saved, and no mask.

    Document by document, outputs are laid together afterwards, and gradients as well: those of queries twice for a
    moment. CUDA's one kernel needs neither, but sums the queries' gradient in float32, and keys' and values' for
    every query head.
    """
    sums = Storage(setup.tokens * heads * FLOAT32)
    if setup.device == "cuda" and q.itemsize != FLOAT32:
        grouped = 2 * q.bytes if k.elements != q.elements else 0
        return tape.run(
            (q, k, v),
            q.elements,
            q.itemsize,
            saves=(q, k, v, sums),
            saves_output=True,
            backward_work=sums.bytes + q.elements * FLOAT32 + grouped,
        )
    outputs = Storage(q.bytes)
    return tape.run((q, k, v), q.elements, q.itemsize, saves=(q, k, v, sums, outputs), backward_work=q.bytes)


def scaled_dot_product(tape: Tape, q: Tensor, k: Tensor, v: Tensor, heads: int, setup: TrainingSetup) -> Tensor:
    """`sdpa_attention_forward`: with a mask, keys and values are first repeated for every query head.

    The fused kernel saves its inputs, output, the logsumexp of every query in float32, and the mask, which torch
    converts from bool to the compute dtype anew in every layer. Its backward makes three gradients.
    """
    if setup.packed:
        alone = k.elements * heads == q.elements
        k, v = repeat_kv(tape, k, q, alone), repeat_kv(tape, v, q, alone)
    queries = setup.length
    mask = 0
    if setup.packed:
        mask = setup.batch * queries * queries * q.itemsize
    if setup.device == "cuda":
        queries = -(-queries // _PADDED_QUERIES) * _PADDED_QUERIES
    sums = setup.batch * heads * queries * FLOAT32
    # CUDA's backward sums the queries' gradient in float32 when it computes in 16 bits
    accumulator = q.elements * FLOAT32 if setup.device == "cuda" and q.itemsize != FLOAT32 else 0
    return tape.run(
        (q, k, v),
        q.elements,
        q.itemsize,
        saves=(q, k, v, Storage(sums), Storage(mask)),
        saves_output=True,
        backward_work=sums + accumulator if setup.device == "cuda" else 0,
    )


def capped_attention(tape: Tape, q: Tensor, k: Tensor, v: Tensor, heads: int, setup: TrainingSetup) -> Tensor:
    """Gemma 2's eager attention: tanh saves its output, softmax its float32 one, the last product its factors."""
    alone = k.elements * heads == q.elements
    k, v = repeat_kv(tape, k, q, alone), repeat_kv(tape, v, q, alone)
    scores = setup.batch * heads * setup.length**2
    weights = tape.run((q, k), scores, q.itemsize, saves=(q, k))
    weights = soft_cap(tape, weights)
    weights = cast(tape, tape.run((weights,), scores, FLOAT32, saves_output=True), q.itemsize)
    return tape.run((weights, v), q.elements, q.itemsize, saves=(weights, v))


def soft_cap(tape: Tape, x: Tensor) -> Tensor:
    """tanh(x / cap) · cap: tanh saves its output."""
    for saved in (False, True, False):
        x = tape.run((x,), x.elements, x.itemsize, saves_output=saved)
    return x


def repeat_kv(tape: Tape, x: Tensor, like: Tensor, alone: bool) -> Tensor:
    """Keys or values copied for every query head of their group; of an only group (`alone`) it stays a view."""
    if x.elements == like.elements:
        return x
    return tape.run((x,), like.elements, x.itemsize, shares=x if alone else None)


def mlp(tape: Tape, x_BTH: Tensor, block: Block) -> Tensor:
    """`LlamaMLP.forward`, act(gate(x)) · up(x), with fused or without gate as the model has it.

    The activation saves its input, the product both factors.
    """
    linears = block.linears("neuron", 0)
    neurons = block.setup.tokens * block.units[1]
    first = adapted(tape, x_BTH, linears[0][1], linears[0][2], block, linears[0][0])
    fused = len(linears[0][0].cuts) == 2
    gate = tape.run((first,), neurons, first.itemsize, shares=first) if fused else first
    act = tape.run((gate,), neurons, gate.itemsize, saves=(gate,))
    if fused or len(linears) == 2:
        if fused:
            up = tape.run((first,), neurons, first.itemsize, shares=first)
        else:
            up = adapted(tape, x_BTH, linears[1][1], linears[1][2], block, linears[1][0])
        act = tape.run((act, up), neurons, act.itemsize, saves=(act, up))
    (projection, rows, columns), *_ = block.linears("neuron", 1)
    return adapted(tape, act, rows, columns, block, projection)


def head(tape: Tape, x_BKH: Tensor, shape: ModelShape, setup: TrainingSetup) -> Tensor:
    """The output head, maybe with an adapter; a quantized one is unpacked a chunk of rows at a time."""
    rows, columns = shape.vocabulary, shape.hidden
    unpacked = frozen_head_bytes(shape, setup)
    if setup.adapts_head:
        return adapted_linear(tape, x_BKH, rows, columns, setup, unpacked, setup.rank(shape.architecture.head))
    if setup.quantize_embeddings:
        return packed_linear(tape, x_BKH, rows, columns, unpacked, setup)
    itemsize = setup.vocabulary_bytes if setup.trains_head else setup.parameter_bytes
    return linear(tape, x_BKH, rows, columns, itemsize, replace(setup, float8=False), setup.trains_head)
