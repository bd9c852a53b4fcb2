"""Host memory of the stages that never hold a whole model."""

from __future__ import annotations

from loram.memory.disk import HIDDEN_STATES_BYTES, largest_factors, recovered_bytes
from loram.memory.formats import FLOAT32, FLOAT64
from loram.memory.plan import rows_per_step
from loram.memory.polish import polish_memory, polish_setup
from loram.models.architecture import Architecture
from loram.models.shape import ModelShape, Widths, whole_units
from loram.pruning.geometry import FACTORED
from loram.recipe import PruneSection, Recipe

MEASURED_PROCESS_BYTES = 450_000_000
"""Resident set of a stage's process with its libraries imported. Measured on a model of 0.1 M parameters with torch
2.13 for CPUs on Linux: prune 0.39 GB, merge 0.37 GB, recover 0.25 GB; rounded up."""

# Blocks of `loram.checkpoint` (its BLOCK_BYTES) on their way from file to file: read and computed by up to four
# threads, waiting for the writer, and each once more in float32 while a delta is added.
_BLOCK_BYTES = 8 << 20
_BLOCKS = 16


def stage_memory(recipe: Recipe, shape: ModelShape) -> dict[str, int]:
    """The most bytes that each stage but align and train holds.

    Prune, scores by random or magnitude, recover and merge stream blocks and one pair of adapter factors; a correction
    holds one linear of the small model besides. Scores by activation or gradient, scale and evaluate run layer by
    layer: two layers, the one computing and the one being read, or one matrix of the vocabulary, in float32 (which CPUs
    without bfloat16 units compute in), and the hidden states of all rows, for gradients at every layer, for factors of
    the scale with each of them; besides a layer's gradients, and the adapter that is scaled. Factors take that and the
    moments of a layer's linears.
    """
    blocks = MEASURED_PROCESS_BYTES + _BLOCKS * _BLOCK_BYTES
    factors = largest_factors(shape, recipe.train)
    prune = recipe.prune
    by_layer = MEASURED_PROCESS_BYTES + _by_layer(shape)
    hidden = prune.calibration_rows * prune.calibration_length * shape.hidden * FLOAT32
    gradients = 0
    if prune.criterion == "adapter_gradient":
        hidden *= shape.architecture.layers + 1
        gradients = shape.architecture.layer_parameters(whole_units(shape.architecture)) * FLOAT32
    scored = by_layer + gradients + min(hidden, HIDDEN_STATES_BYTES)
    stages = {
        "score": max(blocks, scored) if prune.scores_rows else blocks,
        "prune": (scored if prune.runs_model and prune.factors else blocks) + moment_bytes(shape.architecture, prune),
        "recover": blocks + factors + (_correction(shape, factors) if recipe.recover.correction != "none" else 0),
        "merge": blocks + factors,
    }
    if recipe.train.anchors:
        stages["anchor"] = by_layer + HIDDEN_STATES_BYTES
    if recipe.polish.max_steps != 0:
        polish = polish_memory(shape, polish_setup(recipe, shape.architecture), rows_per_step(recipe.polish))
        stages["polish"] = MEASURED_PROCESS_BYTES + polish.host + min(polish.hidden, HIDDEN_STATES_BYTES)
    if recipe.scale.dataset is not None:
        tried = (len(recipe.scale.grid) + 1) * recipe.scale.rows * recipe.scale.max_length * shape.hidden * FLOAT32
        adapter = recovered_bytes(shape, recipe.train)
        stages["scale"] = max(blocks + factors, by_layer + adapter + min(tried, HIDDEN_STATES_BYTES))
    return {**stages, "evaluate": by_layer + HIDDEN_STATES_BYTES} if recipe.evaluate.datasets else stages


def moment_bytes(architecture: Architecture, prune: PruneSection) -> int:
    """What finding the factors of a layer's linears holds besides the layer, all in float64.

    The second moment of the inputs of each, shared by those that read the same, with `adapter_gradient` those of the
    outputs' gradients, and for the largest what is taken apart: one more sum, a damped copy and its root (or without
    moments a square of the linear and its vectors), and the linear three times. On the device that computes.
    """
    factored = [p for p in architecture.projections if p.unit in FACTORED[prune.method]] if prune.factors else []
    if not factored:
        return 0
    moments: list[int] = []
    if prune.runs_model:
        read = {p.unit if p.axis == 0 else p.name: p.in_features for p in factored}
        moments += [features**2 for features in read.values()]
    if prune.criterion == "adapter_gradient":
        moments += [p.out_features**2 for p in factored]
    smaller = max(min(p.in_features, p.out_features) for p in factored) ** 2
    work = 3 * max(p.in_features * p.out_features for p in factored) + max([2 * smaller, *(3 * of for of in moments)])
    return FLOAT64 * (sum(moments) + work)


def _correction(shape: ModelShape, factors: int) -> int:
    """The largest linear of a whole layer in float32, as read and as unpacked; factors and work in float64."""
    largest = max(of.out_features * of.in_features for of in shape.architecture.projections)
    return 2 * largest * FLOAT32 + 4 * factors


def _by_layer(shape: ModelShape) -> int:
    whole = Widths.whole(shape.architecture)
    layer = shape.architecture.layer_parameters(whole.units(0)) + shape.layer_norms
    return max(2 * layer, shape.vocabulary * shape.hidden) * FLOAT32
