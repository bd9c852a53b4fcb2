"""loram recover RECIPE: scatter the pruned adapter back to the base model's shapes."""

from __future__ import annotations

from typing import Any

from loram.adapter.card import model_card
from loram.adapter.folder import Adapter
from loram.adapter.recover import recover
from loram.artifact import MANIFEST_NAME, Manifest
from loram.checkpoint import CheckpointReader, copy_side_files
from loram.pruning.plan import PruningPlan
from loram.recipe import Recipe

from .stage import Stage, Work


def _settings(recipe: Recipe) -> dict[str, Any]:
    return {}


def _run(work: Work) -> None:
    folder = work.inputs["adapter"]
    plan = PruningPlan.load(folder)
    with CheckpointReader(work.inputs["base"]) as base:
        plan.require_base(base.identity(), str(work.inputs["base"]))
    with Adapter(folder) as adapter:
        adapter.require_trained()
        copy_side_files(folder, work.out)  # tokenizer and chat template travel with the adapter
        work.draft.digests |= recover(adapter, plan, work.out)
        modules = len(adapter.modules)
    training = Manifest.read(folder).metrics if (folder / MANIFEST_NAME).is_file() else {}
    (work.out / "README.md").write_text(model_card(work.recipe, plan, training), encoding="utf-8")
    work.draft.metrics |= {"modules": modules}
    work.note(f"{modules:,} modules recovered for {plan.base_model}")


STAGE = Stage(
    "recover",
    1,
    main="adapter",
    inputs=lambda recipe: {"adapter": "train", "base": "base"},
    settings=_settings,
    run=_run,
)
