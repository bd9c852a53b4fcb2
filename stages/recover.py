"""loram recover RECIPE: scatter the pruned adapter back to the base model's shapes, corrected if the recipe says so."""

from __future__ import annotations

import contextlib
from pathlib import Path

from loram.adapter.card import model_card
from loram.adapter.correct import Correction
from loram.adapter.folder import Adapter
from loram.adapter.recover import recover, recovered_bytes
from loram.artifact import MANIFEST_NAME, Manifest
from loram.checkpoint import CheckpointReader, copy_side_files
from loram.errors import WrongBaseError
from loram.models.loading import resolve_dtype
from loram.pruning.plan import PruningPlan

from .training import training_precision
from .work import Work


def run(work: Work) -> None:
    """Does the stage's work."""
    folder = work.inputs["adapter"]
    plan = PruningPlan.load(folder)
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(CheckpointReader(work.inputs["base"]))
        adapter = stack.enter_context(Adapter(folder))
        plan.require_base(base.identity(), str(work.inputs["base"]))
        adapter.require_trained()
        work.require_disk(recovered_bytes(adapter, plan), "recover")
        correction = _correction(work, base, plan)
        if correction is not None:
            stack.enter_context(correction)
        copy_side_files(folder, work.out)  # tokenizer and chat template travel with the adapter
        work.draft.digests |= recover(adapter, plan, base, work.out, correction)
        modules = len(adapter.modules)
    training = Manifest.read(folder).metrics if (folder / MANIFEST_NAME).is_file() else {}
    (work.out / "README.md").write_text(model_card(work.recipe, plan, training), encoding="utf-8")
    work.draft.metrics |= {"modules": modules, "training": training}
    work.note(f"{modules:,} modules recovered for {plan.base_model}")
    if correction is not None:
        work.draft.metrics |= correction.metrics()
        work.note(correction.describe())


def _correction(work: Work, base: CheckpointReader, plan: PruningPlan) -> Correction | None:
    section = work.recipe.recover
    if section.correction == "none":
        return None
    adapter, model = work.inputs["adapter"], work.inputs["model"]
    _require_trained_on(adapter, model)
    precision = training_precision(work.recipe.train, resolve_dtype(work.recipe.train.dtype))
    return Correction(model, precision, base, plan, section.correction_limit)


def _require_trained_on(adapter: Path, model: Path) -> None:
    """Refuses a small model that is not the one that the adapter's manifest names (WrongBaseError)."""
    if not all((folder / MANIFEST_NAME).is_file() for folder in (adapter, model)):
        return
    if Manifest.read(adapter).inputs.get("model") != Manifest.read(model).fingerprint:
        raise WrongBaseError(
            f"The adapter {adapter} was not trained on {model}, whose weights its correction would be made with.",
            fix="Recover with the recipe that the adapter was trained with, or set recover.correction=none.",
        )
