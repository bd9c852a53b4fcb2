"""The one training loop, for align (all parameters) and train (an adapter): transformers' Trainer, kept honest.

The Trainer brings optimizers, schedules, checkpoints, reporting and launchers. Added in this folder: whole optimizer
steps as batches (`steps`, `trainer`), a JSONL history that all later decisions are read off (`history`, `verdicts`,
`watcher`), a checkpoint on Ctrl-C and SIGTERM (`signals`), and checkpoints that are verified before they are trusted
(`checkpoints`).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments
from transformers.training_args import OptimizerNames

from loram import processes
from loram.data.packing import PackedRows
from loram.errors import Interrupted, MissingPackageError, RecipeError, did_you_mean
from loram.memory.measured import peak_bytes, reset_peak
from loram.recipe import TrainingSection, TrainSection
from loram.training import checkpoints, verdicts
from loram.training.anchors import Anchors
from loram.training.history import HISTORY_NAME, MICRO_BATCH, History
from loram.training.reporters import require_reporters
from loram.training.signals import stop_signal
from loram.training.speed import StepFlops
from loram.training.steps import StepSampler, count_loss_tokens
from loram.training.trainer import StepTrainer
from loram.training.watcher import Evaluations, Watcher

REPORTS_NAME = "runs"
"""Folder of TensorBoard's files, as torch calls it."""
# Optimizers of the Trainer, as patterns of names, whose steps are not what this loop takes for one.
_UNFIT_OPTIMIZERS = {
    "*lomo": "moves weights in each backward pass, before the gradients of a whole step are there",
    "*_layerwise": "moves weights in each backward pass, before the gradients of a whole step are there",
    "schedule_free_*": "trains other weights than those to evaluate and keep",
}
# Besides the best one, where evaluations choose it.
_KEPT_CHECKPOINTS = 2


@dataclass(frozen=True)
class TrainingRun:
    """What a run did: for the manifest. Rates count training time only, not evaluation or saving.

    `evaluation`: losses and perplexities of the state that is the result, which is that after `kept_step`.
    `micro_batch`: rows at once, in the end. `flops`: operations that the steps needed, less what was computed again.
    """

    steps: int
    tokens: int
    loss_tokens: int
    train_seconds: float
    final_loss: float
    resumed_from_step: int
    peaks: dict[str, int]
    kept_step: int
    micro_batch: int
    flops: int | None = None
    evaluation: dict[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, Any]:
        """As manifest entries; tokens are without padding."""
        return {
            "steps": self.steps,
            "kept_step": self.kept_step,
            "tokens": self.tokens,
            "loss_tokens": self.loss_tokens,
            "train_seconds": round(self.train_seconds, 2),
            "tokens_per_second": round(self.tokens / self.train_seconds, 1) if self.train_seconds else 0.0,
            "final_loss": self.final_loss,
            "resumed_from_step": self.resumed_from_step,
            MICRO_BATCH: self.micro_batch,
            **({} if self.flops is None else {"flops": self.flops}),
            **self.peaks,
            **self.evaluation,
        }


def check(section: TrainingSection, evaluation_names: Sequence[str] = ()) -> None:
    """Refuses what would only fail once the model is loaded.

    Raises:
        RecipeError: an unknown or unfit optimizer, or no evaluation set of the name to decide by.
        MissingPackageError: what metrics should go to is not installed.
    """
    known = [name.value for name in OptimizerNames]
    if section.optim not in known:
        raise RecipeError(f"optim: unknown optimizer '{section.optim}'{did_you_mean(section.optim, known)}.")
    for names, reason in _UNFIT_OPTIMIZERS.items():
        if fnmatch(section.optim, names):
            raise RecipeError(f"optim: '{section.optim}' {reason}.", fix="Use another, e.g. adamw_torch.")
    require_reporters(section.report_to)
    verdicts.selection(section, evaluation_names)


def train(
    model: nn.Module,
    rows: PackedRows,
    section: TrainingSection,
    scratch: Path,
    dtype: torch.dtype,
    evaluations: Evaluations | None = None,
    check_saved: Callable[[Path], None] | None = None,
    flops: StepFlops | None = None,
    run_name: str = "loram",
    trainer_class: type[StepTrainer] = StepTrainer,
    anchors: Anchors | None = None,
) -> TrainingRun:
    """Trains the parameters that require gradients, going on from the newest sound checkpoint in `scratch`.

    Args:
        model: a causal LM, maybe with a PEFT adapter.
        rows: packed training rows.
        section: recipe settings.
        scratch: where checkpoints and the history go.
        dtype: bfloat16 turns on autocast; float32 does not.
        evaluations: by the name of the set; made every `eval_steps` steps and at the end.
        check_saved: looks at each saved checkpoint folder and raises when it is not sound.
        flops: of a step, for the share of the card's peak.
        run_name: what the run is called where metrics are reported to.
        trainer_class: how a step gets its gradients.
        anchors: of the rows, if the model is anchored while it trains.

    Raises:
        DivergenceError: the loss or the gradient norm became NaN or infinite, or the loss spiked.
        InputError: the checkpoint to go on from was made with other settings.
        Interrupted: Ctrl-C or SIGTERM; a checkpoint was written.
        NoRoomError: out of memory.
    """
    evaluations = evaluations or {}
    check(section, list(evaluations))
    with processes.first():
        resume = checkpoints.newest(scratch)
    settings = section.settings() | {"compute_dtype": str(dtype)} | checkpoints.rows_identity(rows, len(rows))
    if resume is not None:
        checkpoints.require_same_settings(resume, settings)
    # Every process decides by the same history; one file is kept.
    history = History(scratch / (HISTORY_NAME if processes.is_writer() else f"{processes.rank()}.jsonl"), resume)
    reset_peak()
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))  # some reporters print; results have stdout for themselves
        stop = stack.enter_context(stop_signal())
        watcher = Watcher(section, scratch, settings, history, stop, evaluations, check_saved, flops, dtype, stack)
        trainer = trainer_class(
            steps=steps(section, rows),
            micro_batch=int(history.last(MICRO_BATCH, section.per_device_train_batch_size)),
            section=section,
            after_step=watcher.after_step,
            anchors=anchors,
            model=model,
            args=_arguments(section, scratch, dtype, run_name),
            train_dataset=rows,
            callbacks=[*_tensorboard(section, scratch, checkpoints.step_of(resume), stack), watcher],
        )
        watcher.trainer = trainer
        # The Trainer prints its metrics by default; ours go to the history.
        for unwanted in [c for c in trainer.callback_handler.callbacks if type(c).__name__ == "PrinterCallback"]:
            trainer.remove_callback(type(unwanted))
        try:
            trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        except ImportError as error:
            raise MissingPackageError(f"optim '{section.optim}' needs a package: {error}", fix="Install it.") from error
        if not watcher.finished:
            raise Interrupted(
                f"Stopped at step {trainer.state.global_step} of {trainer.state.max_steps}; a checkpoint was saved.",
                fix="Run the same command again to go on from there (without --remake, which starts over).",
            )
        kept = watcher.keep_best()
    return TrainingRun(
        steps=trainer.state.global_step,
        tokens=history.total("tokens"),
        loss_tokens=history.total("loss_tokens"),
        train_seconds=history.total("seconds"),
        final_loss=history.last("loss"),
        resumed_from_step=checkpoints.step_of(resume),
        peaks=peak_bytes(),
        kept_step=kept.pop("step", trainer.state.global_step),
        micro_batch=trainer.micro_batch,
        flops=None if flops is None else flops.step(history.total("tokens"), history.total("loss_tokens")),
        evaluation=kept,
    )


def steps(section: TrainingSection, rows: PackedRows) -> StepSampler:
    """Which rows each optimizer step takes."""
    return StepSampler(
        len(rows),
        section.seed,
        section.per_device_train_batch_size * section.gradient_accumulation_steps,
        section.tokens_per_step,
        () if section.tokens_per_step is None else count_loss_tokens(rows, len(rows)),
    )


def rows_trained(section: TrainingSection, rows: PackedRows) -> list[int]:
    """The numbers of the rows that a run takes, ascending."""
    sampler = steps(section, rows)
    count = section.max_steps if section.max_steps > 0 else math.ceil(section.num_train_epochs * len(sampler))
    return sampler.rows_used(count)


def _arguments(section: TrainingSection, scratch: Path, dtype: torch.dtype, run_name: str) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=str(scratch),
        run_name=run_name,
        project="loram",
        # A batch is a whole step; `StepTrainer` cuts it.
        per_device_train_batch_size=section.per_device_train_batch_size,
        gradient_accumulation_steps=1,
        max_steps=section.max_steps,
        num_train_epochs=section.num_train_epochs,
        learning_rate=section.learning_rate,
        lr_scheduler_type=section.lr_scheduler_type,
        warmup_steps=section.warmup_steps,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        optim=section.optim,
        neftune_noise_alpha=section.neftune_noise_alpha if isinstance(section, TrainSection) else None,
        seed=section.seed,
        data_seed=section.seed,
        bf16=dtype == torch.bfloat16,
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,  # the default replaces NaN by the last mean and hides it
        save_strategy="steps",
        save_steps=section.save_steps,
        save_total_limit=_KEPT_CHECKPOINTS + section.load_best_model_at_end,
        eval_strategy="no",
        report_to=[name for name in section.report_to if name != "tensorboard"] or "none",
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    # On a machine with several GPUs a lone process would wrap the model in DataParallel, which cuts up what belongs to
    # whole steps.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def _tensorboard(section: TrainingSection, scratch: Path, after: int, stack: ExitStack) -> list[TrainerCallback]:
    """transformers' callback, writing where the stage takes the files from; what came after a checkpoint is hidden."""
    if "tensorboard" not in section.report_to or not processes.is_writer():
        return []
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    folder = os.environ.get("TENSORBOARD_LOGGING_DIR") or str(scratch / REPORTS_NAME)
    writer = SummaryWriter(log_dir=folder, purge_step=after + 1 if after else None)
    stack.callback(writer.close)
    return [TensorBoardCallback(writer)]
