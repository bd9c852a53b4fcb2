"""From a pruned adapter to one for the base model: rows of B and columns of A go back to where they came from.

For kept indices K: rows cut (q, k, v, gate, up): B = 0, B[K, :] = Bᴾ, A = Aᴾ; columns cut (o, down): A = 0,
A[:, K] = Aᴾ, B = Bᴾ. So ΔW is bit-equal on what was kept and exactly zero elsewhere (LoRAM, arXiv 2502.13533, §2.2).

A DoRA's magnitudes belong to the norms of the small model's rows, so what is carried over is their ratio:
c = mᴾ / ‖Wᴾ + s·Bᴾ·Aᴾ‖, 1 on rows that were cut away, and m = c · ‖W0 + s·B·A‖. Where rows were cut, a kept row is
then scaled as in training and a removed one not at all; where columns were cut, the whole row is scaled.

With a correction (`loram.adapter.correct`) the B of every projection is the corrected one throughout; of a DoRA too,
c ⊙ (W0 + s·B'·A) being c ⊙ (E + s·B·A) on the row space of A. Embedding and head are recovered as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from loram.adapter.correct import Correction
from loram.adapter.folder import WEIGHTS_NAME, Adapter, AdapterTensor, write_config
from loram.adapter.rows import Change
from loram.checkpoint import Block, CheckpointReader, CheckpointWriter, TensorSpec
from loram.checkpoint.overlap import in_order
from loram.errors import WrongBaseError
from loram.progress import track
from loram.pruning.plan import PruningPlan


def recover(
    adapter: Adapter, plan: PruningPlan, base: CheckpointReader, folder: Path, correction: Correction | None = None
) -> dict[str, str]:
    """Writes the recovered adapter, a plain PEFT folder for the base model, one tensor in memory.

    The weights of `base` are read for a DoRA or a correction alone, a block at a time.

    Returns:
        sha256 of the weights file.

    Raises:
        WrongBaseError: a tensor's shape does not fit the plan: the adapter was trained on another pruned model.
    """
    scatters = {tensor.key: _scatter(adapter, plan, tensor) for tensor in adapter.tensors}
    ratios = adapter.ratios() if adapter.is_dora else {}
    layout = [TensorSpec(key, adapter.reader.info(key).dtype, shape) for key, (shape, _) in scatters.items()]
    with CheckpointWriter(folder, {WEIGHTS_NAME: layout}) as writer:
        for tensor in track(adapter.tensors, "recover", "tensors"):
            if tensor.part == "magnitude":
                ratio_C = ratios[tensor.module]
                writer.write(tensor.key, _magnitude(adapter, plan, base, tensor, ratio_C, correction))
            else:
                values = _values(adapter, plan, tensor, correction)
                writer.write(tensor.key, _scattered(values, tensor, *scatters[tensor.key]))
    write_config(adapter.config, plan.base_model, folder)
    plan.save(folder)
    return writer.digests


def recovered_bytes(adapter: Adapter, plan: PruningPlan) -> int:
    """Bytes of the tensors that `recover` writes; raises what it raises."""
    return sum(
        math.prod(_scatter(adapter, plan, tensor)[0]) * adapter.reader.info(tensor.key).dtype.itemsize
        for tensor in adapter.tensors
    )


def _values(adapter: Adapter, plan: PruningPlan, tensor: AdapterTensor, correction: Correction | None) -> torch.Tensor:
    """A tensor at the small model's shape."""
    if correction is None or tensor.part != "B" or plan.architecture.locate(tensor.module) is None:
        return adapter.reader.read(tensor.key)
    return correction.b(adapter, tensor.module)


def _scattered(
    values: torch.Tensor, tensor: AdapterTensor, shape: tuple[int, ...], index: list[int] | None
) -> torch.Tensor:
    if index is None:
        return values
    whole = torch.zeros(shape, dtype=values.dtype)
    return whole.index_copy_(_axis(tensor), torch.tensor(index), values)


def _magnitude(
    adapter: Adapter,
    plan: PruningPlan,
    base: CheckpointReader,
    tensor: AdapterTensor,
    ratio_C: torch.Tensor,
    correction: Correction | None,
) -> torch.Tensor:
    """m = c · ‖W0 + s·B·A‖ of every row of the base's weight, in the stored dtype."""
    module = tensor.module
    a_RI, b_OR = (
        _scattered(_values(adapter, plan, part, correction), part, *_scatter(adapter, plan, part)).float()
        for part in (adapter.tensor(module, "A"), adapter.tensor(module, "B"))
    )
    name = f"{module}.weight"
    source = name if name in base else f"{plan.architecture.embedding}.weight"  # a head tied to it
    if base.info(source).shape != (len(b_OR), a_RI.shape[1]):
        raise WrongBaseError(
            f"'{name}' is {list(base.info(source).shape)} in {base.folder}, not {[len(b_OR), a_RI.shape[1]]}.",
            fix="Recover onto the base model that the small one was cut from.",
        )
    change, count = Change(a_RI, b_OR, adapter.scale(module)), base.block_rows(source)
    jobs = (partial(_norms, part, change.rows(number * count, count)) for number, part in enumerate(base.parts(source)))
    with closing(in_order(jobs)) as blocks:
        norm_O = torch.cat(list(blocks))
    (rows,), index = _scatter(adapter, plan, tensor)
    ratio_O = torch.ones(rows, dtype=torch.float64)
    ratio_O[slice(None) if index is None else index] = ratio_C.double()
    return (ratio_O * norm_O).to(adapter.reader.info(tensor.key).dtype)


def _norms(part: Callable[[], Block], change: Change) -> torch.Tensor:
    return change.norms(part().data)


def _axis(tensor: AdapterTensor) -> int:
    """Of the stored tensor, which one may have been cut: out features of B and magnitude, in features of A."""
    return 1 if tensor.part == "A" else 0


def _scatter(adapter: Adapter, plan: PruningPlan, tensor: AdapterTensor) -> tuple[tuple[int, ...], list[int] | None]:
    """The recovered shape, and where the pruned rows (of B, magnitude) or columns (of A) go; None: as it is."""
    shape = adapter.reader.info(tensor.key).shape
    found = plan.architecture.locate(tensor.module)
    if found is None or tensor.part == "saved":
        return shape, None
    layer, projection = found
    pruned = projection.shape(len(plan.layers[layer].kept(projection.unit)))
    axis = _axis(tensor)
    if shape[axis] != pruned[axis]:
        raise WrongBaseError(
            f"'{tensor.key}' has {shape[axis]} {'rows' if axis == 0 else 'columns'}, the plan {pruned[axis]}.",
            fix="Give the plan.json of the very model that the adapter was trained on.",
        )
    if axis != projection.axis:
        return shape, None
    full = (projection.out_features, *shape[1:]) if axis == 0 else (shape[0], projection.in_features)
    return full, plan.index(layer, projection)
