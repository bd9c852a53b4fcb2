"""The one training loop, for align (all parameters) and train (an adapter): transformers' Trainer, kept honest.

The Trainer brings optimizers, schedules, accumulation, checkpoints and launchers. Added here: the loss on labelled
tokens only, normalised by tokens over the whole accumulated batch; a JSONL history; a watchdog for NaN; a
checkpoint on Ctrl-C and SIGTERM; checkpoints that are read back before they are trusted.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)
from transformers.training_args import OptimizerNames

from loram.data.packing import PackedRows, trimmed
from loram.errors import DivergenceError, InputError, Interrupted, MissingPackageError, RecipeError, did_you_mean
from loram.evaluate.perplexity import Perplexity
from loram.memory.measured import peak_bytes, reset_peak
from loram.progress import Advance, bar, logger
from loram.recipe import TrainingSection
from loram.store import COMPLETE_NAME
from loram.training.loss import summed_nll

HISTORY_NAME = "history.jsonl"
_KEPT_CHECKPOINTS = 2


@dataclass(frozen=True)
class TrainingRun:
    """What a run did: for the manifest. Rates count training time only, not evaluation or saving."""

    steps: int
    tokens: int
    loss_tokens: int
    train_seconds: float
    final_loss: float
    resumed_from_step: int
    peaks: dict[str, int]

    def metrics(self) -> dict[str, Any]:
        """As manifest entries; tokens are without padding."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "loss_tokens": self.loss_tokens,
            "train_seconds": round(self.train_seconds, 2),
            "tokens_per_second": round(self.tokens / self.train_seconds, 1) if self.train_seconds else 0.0,
            "final_loss": self.final_loss,
            "resumed_from_step": self.resumed_from_step,
            **self.peaks,
        }


def train(
    model: nn.Module,
    rows: PackedRows,
    section: TrainingSection,
    scratch: Path,
    dtype: torch.dtype,
    evaluate: Callable[[nn.Module], Perplexity] | None = None,
    check_saved: Callable[[Path], None] | None = None,
) -> TrainingRun:
    """Trains the parameters that require gradients, going on from the newest complete checkpoint in `scratch`.

    Args:
        model: a causal LM, maybe with a PEFT adapter.
        rows: packed training rows.
        section: recipe settings.
        scratch: where checkpoints and the history go.
        dtype: bfloat16 turns on autocast; float32 does not.
        evaluate: called every `eval_steps` steps; its perplexity goes into the history.
        check_saved: looks at each saved checkpoint folder and raises when it is not sound.

    Raises:
        DivergenceError: the loss or the gradient norm became NaN or infinite.
        Interrupted: Ctrl-C or SIGTERM; a checkpoint was written.
    """
    resume = _newest_checkpoint(scratch)
    history = _History(scratch / HISTORY_NAME, after=_step_of(resume))
    arguments = _arguments(section, scratch, dtype)
    reset_peak()
    with ExitStack() as stack:
        stop = stack.enter_context(_stop_signal())
        watcher = _Watcher(section, history, stop, evaluate, check_saved, stack)
        trainer = _Trainer(
            model=model,
            args=arguments,
            train_dataset=rows,
            data_collator=default_data_collator,
            callbacks=[watcher],
        )
        watcher.trainer = trainer
        # The Trainer prints its metrics by default; ours go to the history.
        for unwanted in [c for c in trainer.callback_handler.callbacks if type(c).__name__ == "PrinterCallback"]:
            trainer.remove_callback(type(unwanted))
        try:
            trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        except ImportError as error:
            raise MissingPackageError(f"optim '{section.optim}' needs a package: {error}", fix="Install it.") from error
    if stop.is_set() and trainer.state.global_step < trainer.state.max_steps:
        raise Interrupted(
            f"Stopped at step {trainer.state.global_step} of {trainer.state.max_steps}; a checkpoint was saved.",
            fix="Run the same command again to go on from there.",
        )
    return TrainingRun(
        steps=trainer.state.global_step,
        tokens=history.total("tokens"),
        loss_tokens=history.total("loss_tokens"),
        train_seconds=history.total("seconds"),
        final_loss=history.last("loss"),
        resumed_from_step=_step_of(resume),
        peaks=peak_bytes(),
    )


def _arguments(section: TrainingSection, scratch: Path, dtype: torch.dtype) -> TrainingArguments:
    known = [name.value for name in OptimizerNames]
    if section.optim not in known:
        raise RecipeError(f"optim: unknown optimizer '{section.optim}'{did_you_mean(section.optim, known)}.")
    return TrainingArguments(
        output_dir=str(scratch),
        per_device_train_batch_size=section.per_device_train_batch_size,
        gradient_accumulation_steps=section.gradient_accumulation_steps,
        max_steps=section.max_steps,
        num_train_epochs=section.num_train_epochs,
        learning_rate=section.learning_rate,
        lr_scheduler_type=section.lr_scheduler_type,
        warmup_steps=section.warmup_steps,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        optim=section.optim,
        seed=section.seed,
        data_seed=section.seed,
        bf16=dtype == torch.bfloat16,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,  # the default replaces NaN by the last mean and hides it
        save_strategy="steps",
        save_steps=section.save_steps,
        save_total_limit=_KEPT_CHECKPOINTS,
        eval_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
    )


class _Trainer(Trainer):
    """The Trainer with our loss; counts the tokens of each optimizer step."""

    # The loss is divided by the labelled tokens of the whole accumulated batch, so nothing is left to scale.
    loss_is_scaled_for_ga = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = True  # makes it count those tokens for us
        self.step_tokens = 0
        self.step_loss_tokens = 0

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        batch = trimmed(inputs)
        nll, count = summed_nll(model, batch)
        self.step_tokens += int(batch["tokens"].sum())
        self.step_loss_tokens += count
        loss = nll / (count if num_items_in_batch is None else num_items_in_batch)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        return loss


class _History:
    """Steps and evaluations, a JSON object a line; on resume, what came after the checkpoint is dropped."""

    def __init__(self, path: Path, after: int) -> None:
        self._path = path
        self.entries: list[dict[str, Any]] = []
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            self.entries = [entry for entry in map(_parse, lines) if entry and entry["step"] <= after]
        path.write_text("".join(json.dumps(entry) + "\n" for entry in self.entries), encoding="utf-8")

    def add(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def total(self, name: str) -> Any:
        return sum(entry.get(name, 0) for entry in self.entries)

    def last(self, name: str) -> float:
        return next((float(entry[name]) for entry in reversed(self.entries) if name in entry), math.nan)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None  # the line that was being written when the process was killed
    return entry if isinstance(entry, dict) and "step" in entry else None


class _Watcher(TrainerCallback):
    """Writes the history, moves the bar, stops on NaN or a signal, evaluates, and reads checkpoints back."""

    def __init__(
        self,
        section: TrainingSection,
        history: _History,
        stop: threading.Event,
        evaluate: Callable[[nn.Module], Perplexity] | None,
        check_saved: Callable[[Path], None] | None,
        stack: ExitStack,
    ) -> None:
        self.trainer: _Trainer
        self._section = section
        self._history = history
        self._stop = stop
        self._evaluate = evaluate
        self._check_saved = check_saved
        self._stack = stack
        self._advance: Advance = lambda amount, state="": None
        self._began = 0.0
        self._seconds = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._advance = self._stack.enter_context(bar("train", state.max_steps, "steps"))
        self._advance(state.global_step)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._began = time.perf_counter()
        self.trainer.step_tokens = self.trainer.step_loss_tokens = 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._seconds = time.perf_counter() - self._began
        if self._stop.is_set():
            control.should_save = control.should_training_stop = True
        if state.global_step >= state.max_steps:
            control.should_save = False  # the stage saves the result itself

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if not logs or "loss" not in logs:
            return
        loss, norm = logs["loss"], logs.get("grad_norm", 0.0)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DivergenceError(
                f"The loss is {loss} and the gradient norm {norm} at step {state.global_step}.",
                fix="Lower learning_rate, raise warmup_steps, or look at the data around that step.",
            )
        entry = {
            "step": state.global_step,
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": logs["learning_rate"],
            "tokens": self.trainer.step_tokens,
            "loss_tokens": self.trainer.step_loss_tokens,
            "seconds": round(self._seconds, 4),
        }
        self._history.add(entry)
        rate = self.trainer.step_tokens / self._seconds if self._seconds else 0.0
        self._advance(1, f"loss {loss:.3f} · {rate:,.0f} tokens/s")
        if state.global_step % self._section.logging_steps == 0:
            logger.debug("step %d: loss %.4f, %.0f tokens/s", state.global_step, loss, rate)
        due = self._section.eval_steps is not None and state.global_step % self._section.eval_steps == 0
        if due and self._evaluate is not None and state.global_step < state.max_steps:
            result = self._evaluate(self.trainer.model)
            self._history.add({"step": state.global_step, "eval_loss": result.loss, "eval_perplexity": result.value})
            logger.info("step %d: loss %.3f, evaluation perplexity %.3f", state.global_step, loss, result.value)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self._check_saved is not None:
            self._check_saved(folder)
        (folder / COMPLETE_NAME).write_text("", encoding="utf-8")


def _newest_checkpoint(scratch: Path) -> Path | None:
    """The newest complete checkpoint; half-written ones are removed."""
    found = sorted(scratch.glob("checkpoint-*"), key=_step_of)
    for folder in found:
        if not (folder / COMPLETE_NAME).is_file():
            shutil.rmtree(folder)
    complete = [folder for folder in found if folder.is_dir()]
    return complete[-1] if complete else None


def _step_of(checkpoint: Path | None) -> int:
    if checkpoint is None:
        return 0
    number = checkpoint.name.rpartition("-")[2]
    if not number.isdigit():
        raise InputError(f"{checkpoint} is not a checkpoint folder.", fix="Remove it.")
    return int(number)


@contextmanager
def _stop_signal() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C or SIGTERM into an event; a second one interrupts at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handler(number: int, frame: FrameType | None) -> None:
        event.set()
        restore()
        logger.warning("stopping after this step to save a checkpoint; once more to stop at once")

    for number in signals:
        signal.signal(number, handler)
    try:
        yield event
    finally:
        restore()
