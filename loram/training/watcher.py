"""What happens around the optimizer steps: history, verdicts, evaluation, and making checkpoints complete."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from loram import processes
from loram.evaluate.perplexity import Perplexity
from loram.memory.measured import peak_bytes
from loram.progress import Advance, bar, logger
from loram.recipe import TrainingSection
from loram.training import checkpoints, verdicts
from loram.training.history import MICRO_BATCH, History
from loram.training.randomness import undisturbed
from loram.training.speed import StepFlops, peak_flops, rates
from loram.training.trainer import StepTrainer

Evaluations = Mapping[str, Callable[[nn.Module], Perplexity]]


class _Stopped(Exception):
    """An evaluation was given up because the run has to stop."""


class Watcher(TrainerCallback):
    """Writes the history, moves the bar, stops on divergence or a signal, evaluates, and makes checkpoints complete.

    Args:
        section, scratch, evaluations, check_saved, flops, dtype: as `loram.training.loop.train` has them.
        settings: what a checkpoint must have been made with to be gone on from.
        history: of the run.
        stop: set when the run has to stop.
        stack: closes the bar.

    `trainer` is set before training begins.
    """

    trainer: StepTrainer

    def __init__(
        self,
        section: TrainingSection,
        scratch: Path,
        settings: Mapping[str, Any],
        history: History,
        stop: threading.Event,
        evaluations: Evaluations,
        check_saved: Callable[[Path], None] | None,
        flops: StepFlops | None,
        dtype: torch.dtype,
        stack: ExitStack,
    ) -> None:
        self._section = section
        self._scratch = scratch
        self._settings = settings
        self._history = history
        self._stop = stop
        self._evaluations = evaluations
        self._selection = verdicts.selection(section, list(evaluations))
        self._check_saved = check_saved
        self._flops = flops
        self._stack = stack
        on_card = torch.cuda.is_available() and dtype == torch.bfloat16
        self._peak = peak_flops(torch.cuda.get_device_name()) if on_card else None
        self._advance: Advance = lambda amount, state="": None

    @property
    def finished(self) -> bool:
        """Nothing is left to train or to evaluate."""
        state = self.trainer.state
        done = state.global_step >= state.max_steps or self._exhausted
        return done and not self._due(state)

    @property
    def _exhausted(self) -> bool:
        return self._selection is not None and self._selection.exhausted(self._history.evaluations)

    def _due(self, state: TrainerState) -> bool:
        """Whether the step that was just made has to be evaluated and was not yet."""
        step, every = state.global_step, self._section.eval_steps
        if not self._evaluations or step == 0 or self._history.entries[-1]["step"] != step:
            return False
        now = step >= state.max_steps or (every is not None and step % every == 0)
        return now and "loss" in self._history.entries[-1]

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        state.save_steps = self._section.save_steps  # a checkpoint brings its own, and this one may change
        self._advance = self._stack.enter_context(bar("train", state.max_steps, "steps"))
        self._advance(state.global_step)
        if self._due(state):
            self._evaluate(state, control)
            control.should_save = False
        control.should_training_stop = self._must_stop() or self._exhausted

    def _must_stop(self) -> bool:
        """A signal reaches processes at different steps; they stop at the same one."""
        if processes.any_of(self._stop.is_set()):
            self._stop.set()
        return self._stop.is_set()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._must_stop():
            control.should_save = control.should_training_stop = True
        if state.global_step >= state.max_steps:
            control.should_save = False  # the stage saves the result itself

    def after_step(self, logs: dict[str, float]) -> None:
        """Everything that follows an optimizer step, before its checkpoint is saved."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the optimizer's kernels may still be at work
        seconds = time.perf_counter() - self.trainer.began
        state, control = self.trainer.state, self.trainer.control
        self._require_sound(state, logs["loss"], logs["grad_norm"])
        counts = processes.totals(self.trainer.counts)
        values = {
            "loss": logs["loss"],
            "grad_norm": logs["grad_norm"],
            "learning_rate": logs["learning_rate"],
            **counts,
            MICRO_BATCH: self.trainer.micro_batch,
            "seconds": round(seconds, 4),
            **rates(counts, seconds, self._flops, self._peak),
            **peak_bytes(),
        }
        self._history.add({"step": state.global_step, **values})
        rate = counts["tokens"] / seconds if seconds else 0.0
        self._advance(1, f"loss {logs['loss']:.3f} · {rate:,.0f} tokens/s")
        if state.global_step % self._section.logging_steps == 0:
            logger.debug("step %d: loss %.4f, %.0f tokens/s", state.global_step, logs["loss"], rate)
            self.trainer.report(values)
        if self._due(state) and not self._evaluate(state, control):
            control.should_save = control.should_training_stop = True

    def _require_sound(self, state: TrainerState, loss: float, norm: float) -> None:
        step = state.global_step
        last = checkpoints.last_before(self._scratch, step)
        where = f"step {step}, on {verdicts.rows_text(self.trainer.steps.rows_of(step))}; " + (
            "there is no checkpoint before it." if last is None else f"the last checkpoint before it is {last}."
        )
        verdicts.require_finite(loss, norm, where)
        watched = verdicts.losses_watched(self._section) - 1
        verdicts.require_no_spike([*self._history.recent("loss", watched), loss], self._section, where)

    def _evaluate(self, state: TrainerState, control: TrainerControl) -> bool:
        """Evaluates on every set; False if a stop was asked for meanwhile, and a resumed run has to do it.

        A new best state is saved, so that it can be the result; without one for long enough training ends.
        """

        def unless_stopped(*_: Any) -> None:
            if self._stop.is_set() and processes.count() == 1:  # else some would wait for those that stopped
                raise _Stopped

        model = self.trainer.model
        hook = model.register_forward_pre_hook(unless_stopped)
        values: dict[str, float] = {}
        try:
            unless_stopped()
            for name, evaluate in self._evaluations.items():
                with undisturbed():
                    result = evaluate(model)
                values |= {verdicts.loss_key(name): result.loss, f"eval_{name}_perplexity": result.value}
                logger.info("step %d: perplexity on %s %.3f", state.global_step, name, result.value)
        except _Stopped:
            return False
        finally:
            hook.remove()
        self._history.add({"step": state.global_step, **values})
        self.trainer.report(values)
        ends = state.global_step >= state.max_steps or self._exhausted
        control.should_training_stop |= ends
        if self._selection is not None and self._selection.keeps_best:
            best = self._selection.ranked(self._history.evaluations)[0]["step"]
            state.best_global_step = best  # the Trainer never removes that checkpoint
            control.should_save |= best == state.global_step and not ends
        return True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        folder = checkpoints.folder_of(self._scratch, state.global_step)
        processes.wait()  # each has its own random state to save
        if processes.is_writer():
            # As long as the schedule warms up from zero, nothing can have been learnt.
            if self._check_saved is not None and any(entry["learning_rate"] > 0 for entry in self._history.steps):
                self._check_saved(folder)
            checkpoints.seal(folder, self._settings, self._history)
        processes.wait()

    def keep_best(self) -> dict[str, Any]:
        """Goes back to the best evaluated state if the recipe says so; returns the evaluation of the state there is.

        A state that is in no sound checkpoint any more cannot be taken; then it is the next best, with a warning.
        """
        evaluations, step = self._history.evaluations, self.trainer.state.global_step
        if self._selection is None or not self._selection.keeps_best:
            return dict(evaluations[-1]) if evaluations else {}
        return next(dict(e) for e in self._selection.ranked(evaluations) if e["step"] == step or self._take(e["step"]))

    def _take(self, step: int) -> bool:
        """Puts the weights after a step into the model; False, with a warning, if they are in no sound checkpoint."""
        folder = checkpoints.folder_of(self._scratch, step)
        problem = checkpoints.damage(folder)
        if problem is not None:
            logger.warning("the state after step %d cannot be taken: in %s %s", step, folder, problem)
            return False
        self.trainer._load_from_checkpoint(str(folder))
        return True
