"""loram recover RECIPE: scatter the pruned adapter back to the base model's shapes."""

from __future__ import annotations

from loram.adapter.card import model_card
from loram.adapter.folder import Adapter
from loram.adapter.recover import recover, recovered_bytes
from loram.artifact import MANIFEST_NAME, Manifest
from loram.checkpoint import CheckpointReader, copy_side_files
from loram.pruning.plan import PruningPlan

from .work import Work


def run(work: Work) -> None:
    """Does the stage's work."""
    folder = work.inputs["adapter"]
    plan = PruningPlan.load(folder)
    with CheckpointReader(work.inputs["base"]) as base, Adapter(folder) as adapter:
        plan.require_base(base.identity(), str(work.inputs["base"]))
        adapter.require_trained()
        work.require_disk(recovered_bytes(adapter, plan), "recover")
        copy_side_files(folder, work.out)  # tokenizer and chat template travel with the adapter
        work.draft.digests |= recover(adapter, plan, base, work.out)
        modules = len(adapter.modules)
    training = Manifest.read(folder).metrics if (folder / MANIFEST_NAME).is_file() else {}
    (work.out / "README.md").write_text(model_card(work.recipe, plan, training), encoding="utf-8")
    work.draft.metrics |= {"modules": modules, "training": training}
    work.note(f"{modules:,} modules recovered for {plan.base_model}")
