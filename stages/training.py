"""What align and train share around the loop."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loram import processes
from loram.data.cache import tokenized
from loram.data.encode import Encoder, resolve_template
from loram.data.mixture import Mixture
from loram.data.packing import PackedRows
from loram.errors import UnsupportedModelError
from loram.evaluate.perplexity import Perplexity, perplexity
from loram.memory.fit import fit
from loram.memory.flops import pass_flops
from loram.memory.measured import free_memory
from loram.memory.plan import ComputeBytes
from loram.memory.resident import weights
from loram.memory.setup import Device, TrainingSetup
from loram.models.loading import Precision
from loram.models.shape import ModelShape, Widths
from loram.models.sizes import folder_shape
from loram.progress import logger
from loram.pruning.plan import PruningPlan
from loram.recipe import TrainingSection, TrainSection
from loram.training.history import HISTORY_NAME
from loram.training.loop import REPORTS_NAME, TrainingRun
from loram.training.speed import StepFlops

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
    if getattr(work.recipe, section).auto_find_batch_size:
        setup = replace(setup, batch=1)  # what it would go down to
    if free is not None:
        device = "the GPU"
        if setup.device == "cpu":
            device, free = "this machine", free // processes.on_this_machine()
        fitted = fit(shape, plan.widths(), setup, free, work.recipe.prune, *processes.sharing())
        fitted.require(section, device, hint="--force goes on all the same.")


def packed_rows(work: Work, section: TrainingSection, tokenizer: Any) -> PackedRows:
    """The section's data sets, tokenized, mixed by their weights and packed; says what they are."""
    encoder = _encoder(work, section, tokenizer)
    parts = [(tokenized(each, encoder, work.tokens), each.weight, each.seed) for each in section.datasets]
    mixture = Mixture(parts)
    rows = PackedRows(mixture, section.max_length, pad_id(tokenizer), section.seed)
    for dataset, (tokens, weight, _), share in zip(section.datasets, parts, mixture.shares, strict=True):
        weighed = "" if weight == 1 else f"; weight {weight:g}, so {share:,} an epoch"
        work.note(f"{dataset.path} ({dataset.split}): {tokens.counts.describe()}{weighed}")
    work.note(f"an epoch: {len(mixture):,} examples packed into {len(rows):,} rows of {section.max_length} tokens")
    return rows


def evaluations(
    work: Work, section: TrainingSection, tokenizer: Any, measure: Callable[..., Perplexity] = perplexity
) -> dict[str, Callable[[nn.Module], Perplexity]]:
    """What measures a model on each of the section's held-out sets."""
    encoder = _encoder(work, section, tokenizer)
    sets = {name: tokenized(dataset, encoder, work.tokens) for name, dataset in section.eval_datasets.items()}
    for name, tokens in sets.items():
        work.note(f"held out, {name}: {tokens.counts.describe()}")
    pad = pad_id(tokenizer)
    return {
        name: partial(measure, examples=tokens, max_length=section.max_length, pad_token_id=pad)
        for name, tokens in sets.items()
    }


def _encoder(work: Work, section: TrainingSection, tokenizer: Any) -> Encoder:
    data = work.recipe.data
    return Encoder(tokenizer, resolve_template(data.chat_template, tokenizer), section.max_length, data.loss)


def step_flops(folder: Path, plan: PruningPlan, setup: TrainingSetup) -> StepFlops | None:
    """Operations of a step, for the share of the card's peak; None for a model whose parts cannot be told apart."""
    try:
        return StepFlops.of(folder_shape(folder), plan.widths(), setup)
    except UnsupportedModelError:
        return None


def count_weights(work: Work, folder: Path, widths: Widths, setup: TrainingSetup) -> None:
    """Records the bytes that a model's weights take while an adapter trains on it, what is not quantized in 16 bits.

    So runs compare by them whatever the machine computes in.
    """
    with contextlib.suppress(UnsupportedModelError):
        held = weights(folder_shape(folder), widths, replace(setup, compute_bytes=2, weight_bytes=2))
        work.draft.metrics |= {"weight_bytes": held.weights}


def count_pass(work: Work, folder: Path, widths: Widths | None, length: int, tokens: int, gradients: bool) -> None:
    """Adds the operations of a pass over a model to the stage's record, if the model's parts can be told apart.

    `widths`: None for the whole model.
    """
    with contextlib.suppress(UnsupportedModelError):
        shape = folder_shape(folder)
        of_pass = pass_flops(shape, widths or Widths.whole(shape.architecture), length, tokens, gradients)
        work.draft.metrics |= {"flops": int(work.draft.metrics.get("flops", 0)) + of_pass}


def finish(work: Work, run: TrainingRun) -> None:
    """Keeps the history and TensorBoard's files, records what was measured, and says it."""
    shutil.copyfile(work.draft.scratch / HISTORY_NAME, work.out / HISTORY_NAME)
    if (work.draft.scratch / REPORTS_NAME).is_dir():
        shutil.copytree(work.draft.scratch / REPORTS_NAME, work.out / REPORTS_NAME)
    work.draft.metrics |= run.metrics()
    metrics = run.metrics()
    resumed = f" (resumed at step {run.resumed_from_step})" if run.resumed_from_step else ""
    work.note(
        f"{run.steps:,} steps{resumed}, {run.tokens:,} tokens at {metrics['tokens_per_second']:,} tokens/s, "
        f"final loss {run.final_loss:.3f}"
    )
    if run.kept_step != run.steps:
        work.note(f"kept is the state after step {run.kept_step:,}, which evaluated best")
    for name, value in run.evaluation.items():
        if name.endswith("_perplexity"):
            words = name.removeprefix("eval_").removesuffix("_perplexity")
            work.note(f"perplexity on held-out '{words}', on the model that trained: {value:.3f}")
    work.note(
        "peak memory: "
        + ", ".join(f"{value / 2**30:.2f} GiB {name.split('_')[0]}" for name, value in run.peaks.items())
    )
