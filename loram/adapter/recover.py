"""From a pruned adapter to one for the base model: rows of B and columns of A go back to where they came from.

For kept indices K: rows cut (q, k, v, gate, up): B = 0, B[K, :] = Bᴾ, A = Aᴾ; columns cut (o, down): A = 0,
A[:, K] = Aᴾ, B = Bᴾ. So ΔW is bit-equal on what was kept and exactly zero elsewhere (LoRAM, arXiv 2502.13533, §2.2).
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from loram.adapter.folder import WEIGHTS_NAME, Adapter, AdapterTensor, write_config
from loram.checkpoint import CheckpointWriter, TensorSpec
from loram.errors import WrongBaseError
from loram.progress import track
from loram.pruning.plan import PruningPlan


def recover(adapter: Adapter, plan: PruningPlan, folder: Path) -> dict[str, str]:
    """Writes the recovered adapter, a plain PEFT folder for the base model, one tensor in memory.

    Returns:
        sha256 of the weights file.

    Raises:
        WrongBaseError: a tensor's shape does not fit the plan: the adapter was trained on another pruned model.
    """
    scatters = {tensor.key: _scatter(adapter, plan, tensor) for tensor in adapter.tensors}
    layout = [TensorSpec(key, adapter.reader.info(key).dtype, shape) for key, (shape, _) in scatters.items()]
    with CheckpointWriter(folder, {WEIGHTS_NAME: layout}) as writer:
        for tensor in track(adapter.tensors, "recover", "tensors"):
            shape, index = scatters[tensor.key]
            values = adapter.reader.read(tensor.key)
            if index is not None:
                whole = torch.zeros(shape, dtype=values.dtype)
                whole.index_copy_(0 if tensor.part == "B" else 1, torch.tensor(index), values)
                values = whole
            writer.write(tensor.key, values)
    write_config(adapter.config, plan.base_model, folder)
    plan.save(folder)
    return writer.digests


def recovered_bytes(adapter: Adapter, plan: PruningPlan) -> int:
    """Bytes of the tensors that `recover` writes; raises what it raises."""
    return sum(
        math.prod(_scatter(adapter, plan, tensor)[0]) * adapter.reader.info(tensor.key).dtype.itemsize
        for tensor in adapter.tensors
    )


def _scatter(adapter: Adapter, plan: PruningPlan, tensor: AdapterTensor) -> tuple[tuple[int, ...], list[int] | None]:
    """The recovered shape, and where the pruned rows (of B) or columns (of A) go; None: as it is."""
    shape = adapter.reader.info(tensor.key).shape
    found = plan.architecture.locate(tensor.module)
    if found is None or tensor.part == "saved":
        return shape, None
    layer, projection = found
    pruned = projection.shape(len(plan.layers[layer].kept(projection.unit)))
    axis = 0 if tensor.part == "B" else 1  # of the stored factor; out features of B, in features of A
    if shape[axis] != pruned[axis]:
        raise WrongBaseError(
            f"'{tensor.key}' has {shape[axis]} {'rows' if axis == 0 else 'columns'}, the plan {pruned[axis]}.",
            fix="Give the plan.json of the very model that the adapter was trained on.",
        )
    if axis != projection.axis:
        return shape, None
    full = (projection.out_features, shape[1]) if axis == 0 else (shape[0], projection.in_features)
    return full, plan.index(layer, projection)
