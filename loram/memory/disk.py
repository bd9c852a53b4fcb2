"""Bytes that each stage writes, and what is free for them."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from loram.memory.plan import align_setup, recovered_setup, rows_per_step, train_setup
from loram.memory.polish import polish_memory, polish_setup
from loram.memory.resident import adapter_bytes, optimizer_bytes, trainables
from loram.memory.setup import ADAPTER_BYTES, TrainingSetup
from loram.models.shape import ModelShape, Widths
from loram.recipe import Recipe, TrainingSection, TrainSection

# `loram.training.loop` keeps two checkpoints; the Trainer writes the next one before it removes the oldest.
_CHECKPOINTS = 2 + 1


HIDDEN_STATES_BYTES = 1 << 30
"""Hidden states counted at most in memory when a model runs layer by layer: `--memory` decides how many stay there, the
rest go to disk."""


@dataclass(frozen=True)
class StageDisk:
    """Bytes that stay as the stage's artifact, and the most while it runs, the artifact included.

    Weights, adapters and optimizer state only: tokenizer, configs and plan are a few megabytes.
    """

    kept: int
    running: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def free_disk(folder: Path) -> int:
    """Free bytes where a folder is, or would be made."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def checkpoints(section: TrainingSection) -> int:
    """Training checkpoints that are there at once; an interrupted run leaves one at least. Epochs count as long."""
    most, every = _CHECKPOINTS, section.save_steps
    if section.load_best_model_at_end:  # the best one stays, and a new best one is saved when it is found
        most, every = most + 1, min(every, section.eval_steps or every)
    if section.max_steps < 0:
        return most
    return max(1, min(most, (section.max_steps - 1) // every))


def align_disk(shape: ModelShape, widths: Widths, section: TrainingSection, setup: TrainingSetup, kept: int) -> int:
    """The most bytes of a running align stage: checkpoints (all weights, optimizer state) and the `kept` artifact."""
    state = optimizer_bytes(trainables(shape, widths, setup), setup)
    return checkpoints(section) * (shape.parameters(widths) * setup.parameter_bytes + state) + kept


def train_disk(shape: ModelShape, widths: Widths, section: TrainingSection, setup: TrainingSetup) -> StageDisk:
    """The train stage: the adapter, and checkpoints of it with optimizer state.

    A start that moves weights doubles the rank of the adapter that stays, and waits in a file with what it moved.
    """
    tensors = trainables(shape, widths, setup)
    adapter = adapter_bytes(tensors, setup)
    moved = isinstance(section, TrainSection) and section.moves_weights
    kept, start = (2 * adapter, 2 * adapter) if moved else (adapter, 0)
    return StageDisk(kept, checkpoints(section) * (adapter + optimizer_bytes(tensors, setup)) + start + kept)


def polish_disk(shape: ModelShape, recipe: Recipe, setup: TrainingSetup) -> StageDisk:
    """The polish stage: the full adapter, and checkpoints of it with optimizer state; hidden states aside."""
    return train_disk(shape, Widths.whole(shape.architecture), recipe.polish, setup)


def anchor_disk(hidden: int, layers: int, anchors: int, tokens: int, item_bytes: int) -> StageDisk:
    """The anchor stage: differences of hidden states in 16 bits after so many layers (all, if there are fewer).

    While it runs, the states themselves wait from one model to the other, and those of all tokens from one layer to the
    next, in what the models compute in.
    """
    of_one = tokens * hidden
    return StageDisk(2 * of_one * min(anchors, layers), item_bytes * of_one * (min(anchors, layers) + 1))


def factor_parameters(widths: Widths) -> int:
    """Parameters of what is stored as two factors: pruning has them in a file of their own until all is written."""
    architecture = widths.architecture
    return sum(
        matrix.parameters
        for layer in range(architecture.layers)
        for projection in architecture.projections
        if widths.rank(layer, projection) is not None
        for matrix in widths.matrices(layer, projection)
    )


def recovered_bytes(shape: ModelShape, section: TrainSection) -> int:
    """The adapter at the base's shapes."""
    setup = recovered_setup(section, shape.architecture)
    return adapter_bytes(trainables(shape, Widths.whole(shape.architecture), setup), setup)


def largest_factors(shape: ModelShape, section: TrainSection) -> int:
    """Bytes of the largest pair of neighbouring tensors (A and B) of the recovered adapter."""
    tensors = trainables(shape, Widths.whole(shape.architecture), recovered_setup(section, shape.architecture))
    return max((sum(pair) for pair in pairwise(tensor.elements for tensor in tensors)), default=0) * ADAPTER_BYTES


def stage_disk(recipe: Recipe, shape: ModelShape, pruned: Widths, item_bytes: int) -> dict[str, StageDisk]:
    """Every stage that writes weights, upstream first.

    Args:
        recipe: the experiment.
        shape: its base.
        pruned: units left by its pruning.
        item_bytes: of a stored parameter of the base.
    """
    small = shape.parameters(pruned) * item_bytes
    setup = train_setup(recipe.train, shape.architecture)
    whole = shape.parameters() * item_bytes
    if shape.tied and setup.adapts_head:
        whole += shape.vocabulary * shape.hidden * item_bytes  # merging unties the head
    factored = factor_parameters(pruned) * item_bytes
    stages = {"prune": StageDisk(small, small + factored)}
    if recipe.align.max_steps != 0:
        aligning = align_setup(recipe.align)
        stages["align"] = StageDisk(small, align_disk(shape, pruned, recipe.align, aligning, small))
    recovered = recovered_bytes(shape, recipe.train)
    # How many tokens an epoch has, and rows that take so many learnt ones, only the data tells.
    if recipe.train.anchors and recipe.train.max_steps > 0 and recipe.train.tokens_per_step is None:
        most = recipe.train.max_steps * rows_per_step(recipe.train) * recipe.train.max_length
        stages["anchor"] = anchor_disk(
            shape.hidden, shape.architecture.layers, recipe.train.anchors, most, setup.compute_bytes
        )
    if recipe.small:
        stages["train"] = train_disk(shape, pruned, recipe.train, setup)
        stages["recover"] = StageDisk(recovered, recovered)
    else:
        stages = {}
    if recipe.polish.max_steps != 0:
        polishing = polish_setup(recipe, shape.architecture)
        of_polish = polish_disk(shape, recipe, polishing)
        hidden = polish_memory(shape, polishing, rows_per_step(recipe.polish)).hidden
        stages["polish"] = replace(of_polish, running=of_polish.running + max(0, hidden - HIDDEN_STATES_BYTES))
    if recipe.scale.dataset is not None:
        stages["scale"] = StageDisk(recovered, recovered)
    return stages | {"merge": StageDisk(whole, whole)}
