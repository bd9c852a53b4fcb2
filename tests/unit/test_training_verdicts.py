"""What evaluations and losses decide, as functions of a history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from loram_stages.graph import STAGES
from pydantic import ValidationError

from loram.errors import DivergenceError, MissingPackageError, RecipeError
from loram.recipe import AlignSection, Recipe, TrainingSection, TrainSection
from loram.training.history import History
from loram.training.reporters import require_reporters
from loram.training.verdicts import (
    FEWEST_STEPS,
    losses_watched,
    require_finite,
    require_no_spike,
    rows_text,
    selection,
)

CHOOSING: dict[str, Any] = {"eval_steps": 5, "eval_datasets": {"a": "held.jsonl"}}


def evaluations(*losses: float) -> list[dict[str, Any]]:
    return [{"step": step, "eval_a_loss": loss} for step, loss in enumerate(losses, 1)]


def test_patience_counts_evaluations_since_the_lowest_loss() -> None:
    section = TrainSection(early_stopping_patience=2, **CHOOSING)
    chosen = selection(section, ["a"])
    assert chosen is not None
    assert not chosen.exhausted([])
    assert not chosen.exhausted(evaluations(3.0, 2.0, 2.0))
    assert chosen.exhausted(evaluations(3.0, 2.0, 2.0, 2.5))
    assert not chosen.exhausted(evaluations(3.0, 2.0, 2.1, 1.9))


def test_the_earliest_of_equal_states_is_the_best() -> None:
    chosen = selection(TrainSection(load_best_model_at_end=True, **CHOOSING), ["a"])
    assert chosen is not None
    assert [entry["step"] for entry in chosen.ranked(evaluations(3.0, 1.0, 2.0, 1.0))] == [2, 4, 3, 1]
    assert not chosen.exhausted(evaluations(*range(50)))


@pytest.mark.parametrize("name", ["b", "eval_b_loss"])
def test_one_of_several_sets_decides(name: str) -> None:
    section = TrainSection(load_best_model_at_end=True, metric_for_best_model=name, **CHOOSING)
    chosen = selection(section, ["a", "b"])
    assert chosen is not None
    assert chosen.key == "eval_b_loss"


def test_a_set_that_is_not_there_is_refused() -> None:
    section = TrainSection(load_best_model_at_end=True, metric_for_best_model="dosc", **CHOOSING)
    with pytest.raises(RecipeError, match="did you mean 'docs'"):
        selection(section, ["docs", "text"])
    with pytest.raises(RecipeError, match="2 evaluation sets"):
        selection(TrainSection(load_best_model_at_end=True, **CHOOSING), ["docs", "text"])
    assert selection(TrainSection(), []) is None


@pytest.mark.parametrize("missing", ["eval_steps", "eval_datasets"])
@pytest.mark.parametrize("wish", [{"early_stopping_patience": 1}, {"load_best_model_at_end": True}])
@pytest.mark.parametrize("kind", [TrainSection, AlignSection])
def test_deciding_needs_evaluations(missing: str, wish: dict[str, Any], kind: type[TrainingSection]) -> None:
    with pytest.raises(ValidationError, match="need an evaluation set and eval_steps"):
        kind(**wish, **{name: value for name, value in CHOOSING.items() if name != missing})


def test_a_step_has_one_size() -> None:
    with pytest.raises(ValidationError, match="not both"):
        TrainSection(tokens_per_step=100, gradient_accumulation_steps=2)


def test_evaluations_enter_the_fingerprint_where_they_decide(tmp_path: Path) -> None:
    """And only there; so do the contents of their set. What is only shown never does."""
    held = tmp_path / "held.jsonl"
    held.write_text('{"text": "one"}\n')

    def settings(**train: Any) -> dict[str, Any]:
        value = {"name": "r", "model": {"path": "x"}, "train": {"eval_datasets": {"a": str(held)}, **train}}
        return STAGES["train"].settings(Recipe.model_validate(value))

    assert settings(eval_steps=1) == settings(eval_steps=2)
    shown = {"report_to": ["tensorboard"], "max_loss_spike": 2.0, "loss_spike_patience": 9, "logging_steps": 3}
    assert settings(**shown) == settings()
    deciding = {"early_stopping_patience": 1}
    one, other = settings(eval_steps=1, **deciding), settings(eval_steps=2, **deciding)
    assert (one["eval_steps"], other["eval_steps"]) == (1, 2)
    held.write_text('{"text": "two"}\n')
    assert settings(eval_steps=1, **deciding)["eval_datasets"] != one["eval_datasets"]


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, float("nan"))])
def test_nan_is_an_error_with_its_place(loss: float, norm: float) -> None:
    with pytest.raises(DivergenceError, match="at step 7, on packed rows 1, 2"):
        require_finite(loss, norm, "step 7, on packed rows 1, 2")
    require_finite(1.0, 1.0, "")


def test_a_spike_has_to_last() -> None:
    section = TrainSection(max_loss_spike=2.0, loss_spike_patience=3)
    calm = [1.0, 1.1, 0.9, 1.0] * 3
    require_no_spike([*calm, 5.0, 5.0], section, "")
    require_no_spike([*calm, 5.0, 1.0, 5.0, 5.0], section, "")
    with pytest.raises(DivergenceError, match=r"above 2 times its median of 1\.0000 for 3 steps .* up to step 15"):
        require_no_spike([*calm, 5.0, 5.0, 2.1], section, "step 15")
    require_no_spike([*calm, 5.0, 5.0, 2.1], TrainSection(), "")
    require_no_spike([*calm[: FEWEST_STEPS - 1], 5.0, 5.0, 5.0], section, "")


def test_the_history_gives_the_newest(tmp_path: Path) -> None:
    history = History(tmp_path / "history.jsonl")
    for step in range(1, 200):
        history.add({"step": step, "loss": float(step)})
        history.add({"step": step, "eval_a_loss": 0.0})
    count = losses_watched(TrainSection(max_loss_spike=2.0))
    assert history.recent("loss", count) == [float(step) for step in range(200 - count, 200)]
    assert history.last("loss") == 199
    assert len(history.evaluations) == len(history.steps) == 199


def test_rows_are_named_in_a_line() -> None:
    assert rows_text([4, 2]) == "packed rows 4, 2"
    assert rows_text(range(200)).endswith("14, 15 and 184 more")


def test_a_reporter_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_reporters(["tensorboard"])
    monkeypatch.setattr("loram.training.reporters.find_spec", lambda name: None if name != "mlflow" else object())
    with pytest.raises(MissingPackageError, match=r"wandb and trackio, which are not") as error:
        require_reporters(["wandb", "mlflow", "trackio"])
    assert "pip install wandb trackio" in error.value.fix
