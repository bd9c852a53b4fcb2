"""What align and train share around the loop."""

from __future__ import annotations

import shutil
from typing import Any

import torch

from loram.models.loading import Precision
from loram.recipe import TrainSection
from loram.training.loop import HISTORY_NAME, TrainingRun

from .work import Work


def pad_id(tokenizer: Any) -> int:
    """The padding token; any token will do where the tokenizer has none, since padding is never learnt or seen."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def training_precision(train: TrainSection, dtype: torch.dtype) -> Precision:
    """How the small model is held while its adapter trains, and wherever that adapter is used on it."""
    return Precision(dtype, train.quantizer, train.bnb_4bit_use_double_quant, train.quantize_embeddings)


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
