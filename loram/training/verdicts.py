"""When a run must end, and which of its states counts: divergence, loss spikes, early stopping, the best evaluation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loram.errors import DivergenceError, RecipeError, did_you_mean
from loram.recipe import TrainingSection

# Steps that the running median looks back on, and how many there must be before a spike can be told.
MEDIAN_STEPS = 64
FEWEST_STEPS = 8
# Rows of a step that a message names.
_NAMED_ROWS = 16


def loss_key(name: str) -> str:
    """What the loss on an evaluation set is called in history and manifest."""
    return f"eval_{name}_loss"


@dataclass(frozen=True)
class Selection:
    """Evaluations that decide about the result.

    `key`: the loss they are compared by, in the history. `patience`: evaluations in a row without a new lowest loss
    after which training ends; None: it does not. `keeps_best`: the result is the state with the lowest loss.
    """

    key: str
    patience: int | None
    keeps_best: bool

    def ranked(self, evaluations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Evaluations from the lowest loss on, the earlier of equals first."""
        return sorted(evaluations, key=lambda entry: float(entry[self.key]))

    def exhausted(self, evaluations: Sequence[dict[str, Any]]) -> bool:
        """Whether the last `patience` evaluations all brought nothing new."""
        if self.patience is None or not evaluations:
            return False
        losses = [float(entry[self.key]) for entry in evaluations]
        return len(losses) - 1 - losses.index(min(losses)) >= self.patience


def selection(section: TrainingSection, names: Sequence[str]) -> Selection | None:
    """What the recipe asks for; None where evaluations only inform.

    Args:
        section: recipe settings.
        names: the evaluation sets there are.

    Raises:
        RecipeError: it is not clear by which set to decide, or there is none of that name.
    """
    if not section.selects:
        return None
    wanted = section.metric_for_best_model
    if wanted is None:
        if len(names) != 1:
            raise RecipeError(
                f"There are {len(names)} evaluation sets ({', '.join(names)}) to decide by.",
                fix="Name one with metric_for_best_model.",
            )
        wanted = names[0]
    name = next((name for name in names if wanted in (name, loss_key(name))), None)
    if name is None:
        raise RecipeError(
            f"metric_for_best_model: there is no evaluation set '{wanted}'{did_you_mean(wanted, names)}.",
            fix=f"One of: {', '.join(names)}.",
        )
    return Selection(loss_key(name), section.early_stopping_patience, section.load_best_model_at_end)


def require_finite(loss: float, gradient_norm: float, where: str) -> None:
    """Stops on NaN and infinity.

    Args:
        loss: nats a token.
        gradient_norm: before clipping.
        where: step, rows and checkpoint, for the message.

    Raises:
        DivergenceError: either is not finite.
    """
    if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
        raise DivergenceError(
            f"The loss is {loss} and the gradient norm {gradient_norm} at {where}",
            fix="Lower learning_rate, raise warmup_steps, or look at the data of that step.",
        )


def require_no_spike(losses: Sequence[float], section: TrainingSection, where: str) -> None:
    """Stops when the newest losses all lie above `max_loss_spike` times the median of those before them.

    Args:
        losses: of the newest steps, as many as `losses_watched` says, fewer at the beginning.
        section: recipe settings.
        where: step, rows and checkpoint, for the message.

    Raises:
        DivergenceError: they do.
    """
    if section.max_loss_spike is None:
        return
    before, newest = losses[: -section.loss_spike_patience], losses[-section.loss_spike_patience :]
    if len(before) < FEWEST_STEPS:
        return
    median = statistics.median(before)
    if min(newest) > section.max_loss_spike * median:
        raise DivergenceError(
            f"The loss has been above {section.max_loss_spike:g} times its median of {median:.4f} for {len(newest)} "
            f"steps ({', '.join(f'{loss:.4f}' for loss in newest)}), up to {where}",
            fix="Lower learning_rate, raise warmup_steps, look at the data of these steps, or raise max_loss_spike.",
        )


def losses_watched(section: TrainingSection) -> int:
    """How many of the newest losses `require_no_spike` looks at."""
    return MEDIAN_STEPS + section.loss_spike_patience


def rows_text(rows: Sequence[int]) -> str:
    """`packed rows 4, 17 and 120 more`."""
    named = ", ".join(map(str, rows[:_NAMED_ROWS]))
    return f"packed rows {named}" + (f" and {len(rows) - _NAMED_ROWS} more" if len(rows) > _NAMED_ROWS else "")
