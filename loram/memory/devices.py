"""The memory of one of several devices that train together."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal

from loram.memory.resident import (
    adapter_bytes,
    gradient_bytes,
    layer_adapters,
    trainables,
    vocabulary_adapters,
    weights,
)
from loram.memory.setup import ADAPTER_BYTES, TrainingSetup
from loram.memory.training import TrainingMemory, training_memory
from loram.models.shape import ModelShape, Widths

Sharding = Literal["fsdp", "ddp"]

# Labels of the lines of `DeviceMemory`, in the order they are shown.
DEVICE_LINES = {
    "weights": "weights",
    "adapter": "adapter",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "buckets": "gradient buckets",
    "gathered": "gathered whole",
    "working": "activations and workspace",
    "peak": "peak on each device",
}


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device.

    `buckets`: DDP's copies of the gradients. `gathered`: parameters and gradients that FSDP holds whole for a while.
    `working`: activations, logits and workspaces at the peak. The lines add up to the `peak`.
    """

    weights: int
    adapter: int
    gradients: int
    optimizer: int
    buckets: int
    gathered: int
    working: int
    peak: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def per_device(
    shape: ModelShape, widths: Widths, setup: TrainingSetup, devices: int = 1, sharding: Sharding = "fsdp"
) -> DeviceMemory:
    """What one of `devices` holds, each with the setup's batch.

    ddp: everything on every device. `torch.nn.parallel.DistributedDataParallel` copies gradients into buckets (of
    25 MiB, the first of 1 MiB) that stay; together they are as large as the gradients (its `gradient_as_bucket_view`,
    off by default, is what would save them).

    fsdp: `torch.distributed.fsdp.fully_shard` on every decoder layer and on the model around them. Weights, adapter,
    gradients and optimizer state are split, rounded up. Gathered whole: two layers, the one computing and the one
    being fetched, with their gradients until those are reduced; embedding, head and final norm, which belong to the
    outermost module and are not resharded between forward and backward (`reshard_after_forward`).
    """
    memory = training_memory(shape, widths, setup)
    if devices == 1 or sharding == "ddp":
        buckets = memory.gradients if devices > 1 else 0
        return DeviceMemory(
            weights=memory.weights,
            adapter=memory.adapter,
            gradients=memory.gradients,
            optimizer=memory.optimizer,
            buckets=buckets,
            gathered=0,
            working=memory.peak - memory.resident - memory.gradients,
            peak=memory.peak + buckets,
        )
    return _fully_sharded(shape, widths, setup, memory, devices)


def _fully_sharded(
    shape: ModelShape, widths: Widths, setup: TrainingSetup, memory: TrainingMemory, devices: int
) -> DeviceMemory:
    # While accumulating all gradients count in every phase, and nothing of them is in what is left of a phase.
    phases = training_memory(shape, widths, replace(setup, accumulating=True)).phases
    inner = max(phases.forward, phases.loss, phases.backward) - memory.resident - memory.gradients
    lines = (memory.weights, memory.adapter, memory.gradients, memory.optimizer)
    own, adapter, gradients, optimizer = (-(-line // devices) for line in lines)
    gathered = 2 * max(_layer(shape, widths, setup, layer) for layer in _kinds(widths)) + _outermost(shape, setup)
    # The optimizer's step works on the shards, when nothing need be gathered any more.
    working = max(inner, -(-memory.optimizer_workspace // devices) - gathered)
    return DeviceMemory(
        weights=own,
        adapter=adapter,
        gradients=gradients,
        optimizer=optimizer,
        buckets=0,
        gathered=gathered,
        working=working,
        peak=own + adapter + gradients + optimizer + gathered + working,
    )


def _kinds(widths: Widths) -> list[int]:
    """One layer of each width."""
    ranks = widths.ranks or ({},) * len(widths.neurons)
    kinds = (
        (groups, neurons, tuple(of.items()))
        for groups, neurons, of in zip(widths.kv_groups, widths.neurons, ranks, strict=True)
    )
    return list({kind: layer for layer, kind in enumerate(kinds)}.values())


def _layer(shape: ModelShape, widths: Widths, setup: TrainingSetup, layer: int) -> int:
    """A decoder layer gathered: its weights, its adapter and its gradients."""
    architecture = replace(shape.architecture, layers=1)
    one = replace(shape, architecture=architecture, final_norm=0)
    here = Widths(architecture, (widths.kv_groups[layer],), (widths.neurons[layer],), widths.ranks[layer : layer + 1])
    inside = replace(setup, method="align" if setup.method == "all" else setup.method)
    own = weights(one, here, inside)
    tensors = [*(layer_adapters if setup.method == "adapter" else trainables)(one, here, inside)]
    linears = own.quantized_linears + own.linears + own.norms + own.biases
    return linears + adapter_bytes(tensors, inside) + gradient_bytes(tensors, inside)


def _outermost(shape: ModelShape, setup: TrainingSetup) -> int:
    """Embedding, head and final norm gathered, with their adapters and gradients."""
    matrices = shape.vocabulary_matrices * shape.vocabulary * shape.hidden
    own = weights(shape, Widths.whole(shape.architecture), setup)
    gradients = matrices * setup.gradient_bytes if setup.trains_vocabulary else 0
    adapters = sum(tensor.elements for tensor in vocabulary_adapters(shape, setup)) * ADAPTER_BYTES
    norm = shape.final_norm * setup.parameter_bytes
    return own.embedding + own.head + norm + gradients + (2 * adapters if setup.method == "adapter" else 0)
