"""What align and train share around the loop."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from loram.errors import UnsupportedModelError
from loram.memory.fit import fit
from loram.memory.measured import free_memory
from loram.memory.plan import ComputeBytes
from loram.memory.setup import Device, TrainingSetup
from loram.models.loading import Precision
from loram.models.shape import ModelShape
from loram.models.sizes import folder_shape
from loram.progress import logger
from loram.pruning.plan import PruningPlan
from loram.recipe import TrainSection
from loram.training.loop import HISTORY_NAME, TrainingRun

from .work import Work


def pad_id(tokenizer: Any) -> int:
    """The padding token; any token will do where the tokenizer has none, since padding is never learnt or seen."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def training_precision(train: TrainSection, dtype: torch.dtype) -> Precision:
    """How the small model is held while its adapter trains, and wherever that adapter is used on it."""
    return Precision(dtype, train.quantizer, train.bnb_4bit_use_double_quant, train.quantize_embeddings)


def placement(dtype: torch.dtype) -> tuple[ComputeBytes, Device]:
    """Bytes of the compute dtype, and where `load_model` puts a model."""
    return 4 if dtype.itemsize == 4 else 2, "cuda" if torch.cuda.is_available() else "cpu"


def require_room(
    work: Work,
    section: str,
    folder: Path,
    plan: PruningPlan,
    setup: TrainingSetup,
    disk: Callable[[ModelShape], int],
) -> None:
    """Refuses a run that memory or disk will not hold, before anything is read or loaded; not with `force`.

    Args:
        work: the stage's.
        section: the recipe's, `align` or `train`.
        folder: the model that trains.
        plan: its widths.
        setup: the step.
        disk: the most bytes the stage writes, from the base's sizes.

    Raises:
        NoRoomError: says what is needed, what is free, and what would fit.
    """
    if work.force:
        return
    try:
        shape = folder_shape(folder)
    except UnsupportedModelError as error:  # it can be pruned, but its parts cannot be told apart by numbers
        logger.warning("memory and disk are not checked: %s", error.what)
        return
    work.require_disk(disk(shape), section)
    free = free_memory()
    if free is not None:
        device = "the GPU" if setup.device == "cuda" else "this machine"
        fitted = fit(shape, plan.widths(), setup, free, work.recipe.prune)
        fitted.require(section, device, hint="--force goes on all the same.")


def finish(work: Work, run: TrainingRun) -> None:
    """Keeps the history, records what was measured, and says it."""
    shutil.copyfile(work.draft.scratch / HISTORY_NAME, work.out / HISTORY_NAME)
    work.draft.metrics |= run.metrics()
    metrics = run.metrics()
    resumed = f" (resumed at step {run.resumed_from_step})" if run.resumed_from_step else ""
    work.note(
        f"{run.steps:,} steps{resumed}, {run.tokens:,} tokens at {metrics['tokens_per_second']:,} tokens/s, "
        f"final loss {run.final_loss:.3f}"
    )
    work.note(
        "peak memory: "
        + ", ".join(f"{value / 2**30:.2f} GiB {name.split('_')[0]}" for name, value in run.peaks.items())
    )
