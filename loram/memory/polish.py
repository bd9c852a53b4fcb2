"""What a step of `polish` needs: memory of device and host, bytes read and written, and time on a card and a disk.

Layers come one at a time, and all rows of an optimizer step pass each before the next: forwards, and backwards with
every layer computed again. Imports neither torch nor transformers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from loram.errors import NoRoomError
from loram.memory.cards import Card
from loram.memory.flops import token_flops
from loram.memory.operations import Block, decoder_layer, loss_tail, mask_bytes
from loram.memory.plan import ComputeBytes, recovered_setup
from loram.memory.resident import (
    adapter_bytes,
    gradient_bytes,
    optimizer_bytes,
    optimizer_workspace,
    trainables,
    weights,
)
from loram.memory.setup import Device, TrainingSetup
from loram.memory.units import parse_size, size
from loram.models.architecture import Architecture
from loram.models.shape import ModelShape, Widths
from loram.recipe import Recipe


def polish_setup(
    recipe: Recipe, architecture: Architecture, compute: ComputeBytes | None = None, device: Device = "cuda"
) -> TrainingSetup:
    """The stage's step; its adapter is taken to be the one that `train` leaves."""
    polish, train = recipe.polish, recipe.train
    taken = ("per_device_train_batch_size", "gradient_accumulation_steps", "tokens_per_step", "max_length", "optim",
             "dtype", "quantizer", "bnb_4bit_use_double_quant")  # fmt: skip
    section = train.model_copy(
        update={name: getattr(polish, name) for name in taken}
        | {"activation_checkpointing": True, "checkpoint_every": 1, "activation_offloading": False,
           "quantize_embeddings": False}
    )  # fmt: skip
    return recovered_setup(section, architecture, compute, device)


@dataclass(frozen=True)
class PolishMemory:
    """Bytes that a step of polish holds and moves.

    `device`: the most on the device: one layer (or embedding or head), its work on a micro-batch, and the adapter with
    gradients and optimizer state (`adapter`). `host`: what is being read. `hidden`: inputs and gradients of all layers
    for the rows of a step, in host memory or on disk; each is written once and read twice. `weights_read`: as computed
    with, forwards and backwards; a file in the system's cache, or a layer that is kept, is not read from the disk.
    """

    device: int
    adapter: int
    host: int
    hidden: int
    weights_read: int
    flops: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    def require(self, available: int, device: str, allowance: int = 0, hint: str = "") -> None:
        """Refuses a step that does not fit (NoRoomError).

        Args:
            available: bytes of the device.
            device: what people call it.
            allowance: bytes for context and allocator, where `available` does not leave them out.
            hint: what else can be done.
        """
        needed = self.device + allowance
        if needed > available:
            raise NoRoomError(
                f"polish: a step needs {size(needed)}, {size(self.adapter)} of it for the adapter and its optimizer, "
                f"and {device} has {size(available)}.",
                fix="Lower polish.per_device_train_batch_size or polish.max_length, or set polish.quantizer=nf4"
                f"{hint}.",
            )


def polish_memory(shape: ModelShape, setup: TrainingSetup, rows: int, stored_bytes: int = 2) -> PolishMemory:
    """Of a step with that many rows, on the whole model.

    Args:
        shape: the base.
        setup: `polish_setup`.
        rows: of an optimizer step; `setup.batch` of them go through a layer at once.
        stored_bytes: of a parameter in the base's files.
    """
    widths = Widths.whole(shape.architecture)
    own, layers = weights(shape, widths, setup), shape.architecture.layers
    tensors = trainables(shape, widths, setup)
    state = adapter_bytes(tensors, setup) + optimizer_bytes(tensors, setup) + gradient_bytes(tensors, setup)
    in_layers = own.quantized_linears + own.linears + own.norms + own.biases
    profile = decoder_layer(Block(shape, widths, setup, 0), True)
    tail = loss_tail(shape, setup, True)
    boundary = setup.tokens * shape.hidden * setup.parameter_bytes
    vocabulary = shape.vocabulary * shape.hidden
    layer_work = in_layers // layers + max(profile.forward_peak, profile.backward_peak) + 2 * boundary
    layer_work += mask_bytes(shape, setup)
    tail_work = vocabulary * setup.parameter_bytes + max(tail.forward_peak, tail.backward_peak) + 2 * boundary
    layer_parameters = shape.parameters() - vocabulary * (1 if shape.tied else 2)
    stored_layer = layer_parameters // layers * stored_bytes
    passes = 2 * layer_parameters + 2 * vocabulary
    return PolishMemory(
        device=state + max(layer_work, tail_work, state and optimizer_workspace(tensors, setup)),
        adapter=state,
        host=max(2 * stored_layer, vocabulary * stored_bytes),
        hidden=rows * setup.length * shape.hidden * setup.parameter_bytes * (layers + 2),
        weights_read=passes * stored_bytes,
        flops=token_flops(shape, widths, replace(setup, activation_checkpointing=True)).step * rows * setup.length,
    )


# Sequential reading in bytes a second: what the bus allows and good drives reach.
DISKS: dict[str, float] = {"sata": 0.55e9, "nvme-gen3": 3.5e9, "nvme-gen4": 7e9, "nvme-gen5": 14e9}


def disk_speed(text: str) -> float:
    """Bytes a second of a disk by its name in `DISKS`, or of a size a second (`2GB`).

    Raises:
        RecipeError: neither.
    """
    return DISKS[text] if text in DISKS else float(parse_size(text))


def step_seconds(memory: PolishMemory, card: Card, disk_bytes_per_s: float) -> dict[str, float]:
    """The least time of a step: it computes at the card's peak while the next layer is read from the disk."""
    computing, reading = memory.flops / card.bf16_flops, memory.weights_read / disk_bytes_per_s
    return {"computing": computing, "reading": reading, "step": max(computing, reading)}
