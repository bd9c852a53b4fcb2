"""How much each unit matters: one score a KV group and one a neuron, in every layer, higher is kept.

What is added up over blocks, batches and units is float64. Shape suffixes: O out features, I in features, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn

from loram.checkpoint import Block, CheckpointReader, CheckpointWriter, TensorSpec
from loram.checkpoint.overlap import in_order
from loram.errors import InputError, LoramError
from loram.models.architecture import UNITS, Architecture, Projection, Unit
from loram.models.layerwise import LayerwiseModel
from loram.pruning.geometry import Geometry
from loram.pruning.plan import LayerPlan, PruningPlan

SCORES_NAME = "scores.safetensors"
# Weights that are squared at a time: 1 MiB of float32.
_ELEMENTS = 256 << 10
# layer → unit kind → float64 scores in unit order
Scores = list[dict[Unit, torch.Tensor]]


def random_scores(architecture: Architecture, seed: int) -> Scores:
    """Uniform scores: the paper's LoRAM-Rand. Each layer has a stream of its own."""
    scores: Scores = []
    for layer in range(architecture.layers):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + layer)
        scores.append({u: torch.rand(architecture.units(u), dtype=torch.float64, generator=generator) for u in UNITS})
    return scores


def magnitude_scores(
    reader: CheckpointReader, architecture: Architecture, progress: Callable[[Iterable[int]], Iterable[int]]
) -> Scores:
    """L2 norm of all weights that belong to a unit: its rows and its columns. One tensor in memory at a time."""
    scores: Scores = []
    for layer in progress(range(architecture.layers)):
        squares = {unit: torch.zeros(architecture.units(unit), dtype=torch.float64) for unit in UNITS}
        for projection in architecture.projections:
            parts = reader.parts(f"{architecture.module(layer, projection)}.weight")
            sums = list(in_order(partial(_part_squares, part, projection.axis) for part in parts))
            total = torch.cat(sums) if projection.axis == 0 else torch.stack(sums).sum(0)
            squares[projection.unit] += _sum_by_unit(total, projection, architecture)
        scores.append({unit: total.sqrt() for unit, total in squares.items()})
    return scores


def activation_scores(
    engine: LayerwiseModel, architecture: Architecture, batches: Sequence[Mapping[str, torch.Tensor]]
) -> Scores:
    """How strongly a unit drives the residual stream: sqrt(Σ_j ‖W_out[:, j]‖² · mean x_j²) over its channels j.

    For a neuron that is ‖W_out column‖ · RMS activation. The structured form of Wanda's score (arXiv 2306.11695).

    Args:
        engine: the base model, one layer in memory at a time.
        batches: calibration batches; every token counts.

    Raises:
        LoramError: the model's activations are not finite on the calibration set.
    """
    outputs = [p for p in architecture.projections if p.axis == 1]
    tokens = sum(int(batch["input_ids"].numel()) for batch in batches)
    scores: Scores = []

    @contextmanager
    def watch(layer: int, module: nn.Module) -> Iterator[None]:
        squares: dict[str, torch.Tensor] = {}
        hooks = [
            module.get_submodule(p.name).register_forward_pre_hook(partial(_add_squares, squares, p.name))
            for p in outputs
        ]
        yield
        for handle in hooks:
            handle.remove()
        of_layer: dict[Unit, torch.Tensor] = {}
        for projection in outputs:
            weight_OI = module.get_parameter(f"{projection.name}.weight").detach().cpu()
            power_I = _axis_squares(weight_OI, 1) * squares[projection.name] / max(1, tokens)
            if not bool(torch.isfinite(power_I).all()):
                raise LoramError(
                    f"Activations of layer {layer} ({projection.name}) are not finite on the calibration set.",
                    fix="Check that the base model's weights are sound.",
                )
            of_layer[projection.unit] = _sum_by_unit(power_I, projection, architecture).sqrt()
        scores.append(of_layer)

    engine.forward(batches, watch, "score")
    return scores


def gradient_scores(
    engine: LayerwiseModel, architecture: Architecture, batches: Sequence[Mapping[str, torch.Tensor]]
) -> Scores:
    """How strongly the loss pulls at a unit's weights in the whole model: sqrt(Σ_batches ‖∂(Σ nll)/∂w‖²) over its w.

    w are the unit's rows and columns of every projection. What an adapter learns first follows these gradients, so a
    unit with small ones would hardly be adapted. Each batch's gradient is squared before they are added: batches that
    pull in opposite directions both count.

    Args:
        engine: the base model with `trains` true for `projection_weights`, one layer in memory at a time.
        batches: task rows; only labelled tokens count.

    Raises:
        LoramError: the gradients are not finite.
    """
    scores: Scores = [{} for _ in range(architecture.layers)]

    @contextmanager
    def watch(layer: int, module: nn.Module) -> Iterator[None]:
        if not 0 <= layer < architecture.layers:  # embedding, final norm and head
            yield
            return
        totals = {unit: torch.zeros(architecture.units(unit), dtype=torch.float64) for unit in UNITS}
        hooks = [
            module.get_parameter(f"{p.name}.weight").register_post_accumulate_grad_hook(
                partial(_add_gradient, totals[p.unit], p, architecture)
            )
            for p in architecture.projections
        ]
        yield
        for handle in hooks:
            handle.remove()
        if not all(bool(torch.isfinite(total).all()) for total in totals.values()):
            raise LoramError(
                f"Gradients of layer {layer} are not finite on the calibration set.",
                fix="Check that the base model's weights are sound.",
            )
        scores[layer] = {unit: total.sqrt() for unit, total in totals.items()}

    engine.backward(batches, 1.0, watch, "score")
    return scores


def _add_gradient(
    total: torch.Tensor, projection: Projection, architecture: Architecture, weight: nn.Parameter
) -> None:
    """Adds the squares of one batch's gradient, which is not kept."""
    assert weight.grad is not None
    total += _sum_by_unit(_axis_squares(weight.grad, projection.axis).cpu(), projection, architecture)
    weight.grad = None


def projection_weights(architecture: Architecture) -> Callable[[str], bool]:
    """Tells by its full name whether a parameter is a projection's weight."""
    names = {
        f"{architecture.module(layer, p)}.weight"
        for layer in range(architecture.layers)
        for p in architecture.projections
    }
    return names.__contains__


def save_scores(scores: Scores, folder: Path) -> dict[str, str]:
    """Writes scores.safetensors: `LAYER.UNIT`, float64 [units] each; returns its sha256."""
    tensors = {f"{layer}.{unit}": values for layer, of in enumerate(scores) for unit, values in of.items()}
    layout = {SCORES_NAME: [TensorSpec(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]}
    with CheckpointWriter(folder, layout) as writer:
        for name, value in tensors.items():
            writer.write(name, value)
    return writer.digests


def load_scores(folder: Path, architecture: Architecture) -> Scores:
    """The inverse of `save_scores`.

    Raises:
        InputError: missing, damaged, or of another model.
    """
    with CheckpointReader(folder, single=SCORES_NAME) as reader:
        scores: Scores = []
        for layer in range(architecture.layers):
            scores.append({})
            for unit in UNITS:
                name, count = f"{layer}.{unit}", architecture.units(unit)
                if name not in reader or reader.info(name).shape != (count,):
                    raise InputError(
                        f"{folder / SCORES_NAME} does not score {count} of '{unit}' in layer {layer}.",
                        fix="Score the base model again: loram score RECIPE --remake.",
                    )
                scores[layer][unit] = reader.read(name)
    return scores


def _add_squares(squares: dict[str, torch.Tensor], name: str, _: object, inputs: tuple[torch.Tensor]) -> None:
    total_I = inputs[0].detach().flatten(0, -2).double().square().sum(0).cpu()
    squares[name] = squares[name] + total_I if name in squares else total_I


def make_plan(
    architecture: Architecture, scores: Scores | None, geometry: Geometry, base_model: str, base: Mapping[str, str]
) -> PruningPlan:
    """Keeps the highest scores of each cut layer; ties go to the lower index. Where nothing is cut, none are needed."""
    whole = PruningPlan.identity(architecture, base_model, base)
    layers, ranks = list(whole.layers), geometry.ranks(architecture)
    counts = [geometry.units(architecture)] * len(geometry.cut_layers)
    if scores is not None and geometry.across_layers:
        counts = _counts_across(architecture, [scores[layer] for layer in geometry.cut_layers], geometry)
    for layer, left in zip(geometry.cut_layers, counts, strict=True):
        kept = {
            unit: tuple(range(count)) if scores is None else _highest(scores[layer][unit], count)
            for unit, count in left.items()
        }
        layers[layer] = LayerPlan(kept["kv_group"], kept["neuron"], ranks)
    return PruningPlan(architecture, tuple(layers), base_model, dict(base))


def _counts_across(
    architecture: Architecture, scores: Sequence[Mapping[Unit, torch.Tensor]], geometry: Geometry
) -> list[dict[Unit, int]]:
    """Units that each cut layer keeps where all of them share the parameters that the geometry leaves.

    A score is the root of a sum over a unit's weights, so score² / weights is what a kept parameter is worth, in
    attention and FFN and in any layer alike. The best go first for as long as there is room, and every layer has one
    of each kind. Neurons are rounded to the nearest `multiple_of`.
    """
    cut = [unit for unit in UNITS if unit not in geometry.factored]
    weights = {unit: sum(p.parameters(1) for p in architecture.projections if p.unit == unit) for unit in cut}
    room = len(scores) * sum(weights[unit] * (geometry.kept[unit] - 1) for unit in cut)
    ranked: list[tuple[float, int, Unit]] = []
    for layer, of in enumerate(scores):
        for unit in cut:
            worth = of[unit].square().sort(descending=True).values[1:] / weights[unit]
            ranked += [(float(value), layer, unit) for value in worth]
    counts = [{unit: architecture.units(unit) if unit in geometry.factored else 1 for unit in UNITS} for _ in scores]
    for _, layer, unit in sorted(ranked, key=lambda each: -each[0]):
        if weights[unit] <= room:
            counts[layer][unit] += 1
            room -= weights[unit]
    multiple = geometry.multiple_of
    for of_layer in counts:
        if "neuron" in cut and multiple > 1:
            rounded = max(1, round(of_layer["neuron"] / multiple)) * multiple
            of_layer["neuron"] = min(architecture.neurons, rounded)
    return counts


def _highest(scores: torch.Tensor, count: int) -> tuple[int, ...]:
    order = torch.sort(scores, descending=True, stable=True).indices
    return tuple(sorted(int(i) for i in order[:count]))


def _part_squares(part: Callable[[], Block], axis: int) -> torch.Tensor:
    block = part()
    if block.hole:
        return torch.zeros(block.data.shape[axis], dtype=torch.float64)
    return _axis_squares(block.data, axis)


def _axis_squares(weight_OI: torch.Tensor, axis: int) -> torch.Tensor:
    """Sum of squares of each row (axis 0) or column (axis 1), as float64.

    A few rows at a time: squares and sums of 16-bit weights in float32 (the squares are exact), of wider ones in
    float64; what was summed is added up in float64.
    """
    parts = []
    for rows_OI in weight_OI.split(max(1, _ELEMENTS // weight_OI.shape[1])):
        wide = rows_OI.float() if rows_OI.dtype.itemsize == 2 else rows_OI.double()
        parts.append(wide.square().sum(1 - axis).double())
    return torch.cat(parts) if axis == 0 else torch.stack(parts).sum(0)


def _sum_by_unit(values: torch.Tensor, projection: Projection, architecture: Architecture) -> torch.Tensor:
    """Adds up the values along a cut axis unit by unit; every slab of a fused projection counts."""
    count = architecture.units(projection.unit)
    total = torch.zeros(count, dtype=torch.float64)
    for cut in projection.cuts:
        total += values[cut.offset : cut.offset + count * cut.extent].view(count, cut.extent).sum(1)
    return total
