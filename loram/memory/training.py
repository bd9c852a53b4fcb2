"""The memory of one training step from sizes alone: what a run will take, before anything is loaded.

Weights, adapter, gradients and optimizer state are exact to the byte. Activations and the peak follow from the
operations in `loram.memory.operations`; for Llama, Mistral, Qwen2 and Qwen3 those are the ones that run, other
families are approximated by the same operations. Not counted: what an allocator rounds up or keeps, the CUDA
context, and what kernels allocate for themselves.

Imports neither torch nor transformers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from loram.memory.operations import Block, decoder_layer, loss_tail, mask_bytes, unpacking_bytes
from loram.memory.resident import (
    Weights,
    adapter_bytes,
    gradient_bytes,
    linears,
    optimizer_bytes,
    optimizer_workspace,
    pageable_bytes,
    trainables,
    weights,
)
from loram.memory.setup import ADAPTER_BYTES, TrainingSetup
from loram.memory.tape import Profile
from loram.models.shape import ModelShape, Widths

__all__ = ["DoraExtra", "Phases", "TrainingMemory", "TrainingSetup", "dora_extra", "training_memory"]

_INDEX = 8  # int64


@dataclass(frozen=True)
class Phases:
    """The most bytes alive in each phase of a step, all that is resident included."""

    forward: int
    """Through the layers, without the loss."""
    loss: int
    """Head and loss, forward and backward: the logits are alive."""
    backward: int
    """Through the layers, with their recomputation."""
    optimizer: int

    @property
    def peak(self) -> int:
        return max(self.forward, self.loss, self.backward, self.optimizer)


@dataclass(frozen=True)
class TrainingMemory(Weights):
    """Bytes of one step in the steady state, from the second step on.

    Weights, `adapter`, `optimizer` and `batch` (token ids, positions, labels) are there in every phase; `gradients`
    come up during backward. `activations` are saved for backward by the layers, `loss_activations` by final norm,
    head and loss. `layer_activations`: what the widest layer saves when it saves everything, which is what
    recomputing one costs. `logits`: the most that head and loss hold. `dequantization`: the largest packed linear
    unpacked, which the phases' peaks include. `optimizer_workspace`: what the optimizer's step allocates.
    `pageable`: the part of `optimizer` that may move to the host. `offloaded`: activations that wait there.
    """

    adapter: int
    optimizer: int
    gradients: int
    batch: int
    activations: int
    loss_activations: int
    layer_activations: int
    logits: int
    dequantization: int
    optimizer_workspace: int
    pageable: int
    offloaded: int
    phases: Phases

    @property
    def resident(self) -> int:
        """There all the time: weights, adapter, optimizer state."""
        return self.weights + self.adapter + self.optimizer

    @property
    def after_forward(self) -> int:
        """Alive once the loss is there, beyond what is resident and the batch."""
        return self.activations + self.loss_activations

    @property
    def peak(self) -> int:
        return self.phases.peak

    def to_dict(self) -> dict[str, int]:
        """Every line, with the phases and the peak."""
        lines = asdict(self)
        phases = lines.pop("phases")
        return {**lines, **{f"{name}_phase": value for name, value in phases.items()}, "peak": self.peak}


def training_memory(shape: ModelShape, widths: Widths, setup: TrainingSetup) -> TrainingMemory:
    """What one training step of a model at those widths takes."""
    own = weights(shape, widths, setup)
    tensors = trainables(shape, widths, setup)
    adapter, optimizer = adapter_bytes(tensors, setup), optimizer_bytes(tensors, setup)
    step = _Step(shape, widths, setup)
    workspace = optimizer_workspace(tensors, setup)
    resident = own.weights + adapter + optimizer + _inputs(setup)
    gradients = gradient_bytes(tensors, setup)
    return TrainingMemory(
        **vars(own),
        adapter=adapter,
        optimizer=optimizer,
        gradients=gradients,
        batch=_inputs(setup),
        activations=step.activations,
        loss_activations=step.tail.saved,
        layer_activations=max(profile.saved for profile in step.layers),
        logits=max(step.tail.forward_peak, step.tail.backward_peak),
        dequantization=_dequantization(shape, widths, setup),
        optimizer_workspace=workspace,
        pageable=pageable_bytes(tensors, setup),
        offloaded=step.offloaded,
        phases=step.phases(resident, gradients, workspace),
    )


@dataclass(frozen=True)
class DoraExtra:
    """Bytes by which DoRA exceeds a LoRA of the same rank; 0 where nothing is adapted."""

    resident: int
    """Magnitudes and their optimizer state."""
    peak: int


def dora_extra(shape: ModelShape, widths: Widths, setup: TrainingSetup) -> DoraExtra:
    """What DoRA adds to a step, or would add."""
    if setup.method != "adapter":
        return DoraExtra(0, 0)
    with_, without = (training_memory(shape, widths, replace(setup, dora=dora)) for dora in (True, False))
    return DoraExtra(with_.resident - without.resident, with_.peak - without.peak)


def _inputs(setup: TrainingSetup) -> int:
    """`input_ids`, `position_ids` and `labels`."""
    return 3 * setup.tokens * _INDEX


def _autocast_copies(shape: ModelShape, setup: TrainingSetup, gradients: int) -> int:
    """Trained weights in the compute dtype: autocast keeps each copy until the forward of the model is over."""
    if not setup.autocast or setup.gradient_bytes == setup.compute_bytes:
        return 0
    if setup.method == "adapter":  # an adapter's own copies do not outlive its operation
        return shape.vocabulary * shape.hidden * setup.compute_bytes * setup.saved_head
    return gradients // setup.gradient_bytes * setup.compute_bytes


def _dequantization(shape: ModelShape, widths: Widths, setup: TrainingSetup) -> int:
    if setup.quantizer == "none":
        return 0
    return max(unpacking_bytes(rows, columns, setup) for rows, columns, _ in linears(shape, widths))


class _Step:
    """The stretches of a step, and how their bytes lie on top of each other."""

    def __init__(self, shape: ModelShape, widths: Widths, setup: TrainingSetup) -> None:
        self._shape = shape
        self._setup = setup
        # With activation checkpointing the embeddings are made to need a gradient, or nothing before the first
        # trained parameter would be recomputed; a model that is quantized and adapted elsewhere starts later.
        first = setup.activation_checkpointing or setup.trains_embedding or setup.lora_embedding
        seen: dict[tuple[int | bool, ...], Profile] = {}
        self.layers: list[Profile] = []
        needs_grad = first
        for layer in range(shape.architecture.layers):
            block = Block(shape, widths, setup, layer)
            key = (*block.units, *block.ranks, *block.factors, block.masked, needs_grad)
            if key not in seen:
                seen[key] = decoder_layer(block, needs_grad)
            self.layers.append(seen[key])
            needs_grad = needs_grad or self._trains(block)
        self.tail = loss_tail(shape, setup, needs_grad)
        self._boundary = setup.tokens * shape.hidden * setup.parameter_bytes

    def _trains(self, block: Block) -> bool:
        return self._setup.trains_layers or any(map(self._setup.adapts, block.shape.architecture.projections))

    @property
    def shared(self) -> int:
        """What all layers read: cos and sin, and the mask of packed rows, as bool; and what the embedding keeps."""
        return self._rotation + self._mask + self._embedded

    @property
    def _rotation(self) -> int:
        return 2 * self._setup.tokens * self._shape.head_dim * self._setup.parameter_bytes

    @property
    def _mask(self) -> int:
        return mask_bytes(self._shape, self._setup)

    @property
    def _embedded(self) -> int:
        """An adapted embedding keeps its [T, R]; with checkpointing the base's output is a leaf, which is kept too."""
        setup = self._setup
        if not setup.lora_embedding:
            return 0
        low = setup.tokens * setup.rank(self._shape.architecture.embedding) * ADAPTER_BYTES
        return low + (self._boundary if setup.activation_checkpointing else 0)

    @property
    def saved(self) -> list[int]:
        """Bytes each layer keeps from its forward to its backward, wherever that is."""
        return [
            self._boundary if self._setup.recomputes(layer) else profile.saved
            for layer, profile in enumerate(self.layers)
        ]

    @property
    def kept(self) -> list[int]:
        """The same on the device; offloaded, only what is on its way."""
        return [0] * len(self.layers) if self._setup.offloading else self.saved

    @property
    def activations(self) -> int:
        """Layers that keep everything do not keep the mask as it was given, but as the attention kernel takes it."""
        recomputing = any(map(self._setup.recomputes, range(len(self.layers))))
        return sum(self.kept) + self._rotation + self._embedded + self._mask * recomputing

    @property
    def offloaded(self) -> int:
        """Bytes of host memory that activations take."""
        return sum(self.saved) if self._setup.offloading else 0

    def phases(self, resident: int, gradients: int, workspace: int) -> Phases:
        """Peaks of the phases on top of what is resident."""
        setup, kept = self._setup, self.kept
        base = resident + self.shared + (gradients if setup.accumulating else 0)
        # Where layers are not recomputed the copies are saved, and counted there.
        copies = _autocast_copies(self._shape, setup, gradients) if setup.activation_checkpointing else 0
        forward = [
            base
            + copies
            + sum(kept[:layer])
            + (profile.forward_peak_unsaved if setup.recomputes(layer) else profile.forward_peak)
            for layer, profile in enumerate(self.layers)
        ]
        loss = base + sum(kept) + max(self.tail.forward_peak, self.tail.backward_peak)
        backward = []
        left = self.tail.gradients
        for layer in reversed(range(len(self.layers))):
            profile = self.layers[layer]
            most = profile.backward_peak
            if setup.recomputes(layer):  # the gradient of its output waits while the layer is computed again
                most = max(most, profile.forward_peak + self._boundary)
            backward.append(base + left + sum(kept[:layer]) + most)
            left += profile.gradients
        embedding = self._embedding_gradient()
        backward.append(base + left + self._boundary + embedding)
        return Phases(
            forward=max(forward),
            loss=loss,
            backward=max(backward),
            optimizer=resident + gradients + workspace,
        )

    def _embedding_gradient(self) -> int:
        """Made whole at the end of backward, and where head and embedding are tied, added to the head's."""
        setup, shape = self._setup, self._shape
        if setup.trains_embedding:
            return shape.vocabulary * shape.hidden * setup.vocabulary_bytes
        return shape.vocabulary * setup.rank(shape.architecture.embedding) * ADAPTER_BYTES * setup.lora_embedding
