"""loram merge RECIPE: write W0 + s·B·A as a normal model folder, shard by shard."""

from __future__ import annotations

from loram.adapter.folder import Adapter
from loram.adapter.merge import merge
from loram.checkpoint import CheckpointReader
from loram.data.templates import TEMPLATE_NAME, stored_template
from loram.models.discover import discover
from loram.models.pruned import load_config
from loram.pruning.plan import PLAN_NAME, PruningPlan

from .work import Work


def run(work: Work) -> None:
    """Does the stage's work."""
    folder, base = work.inputs["adapter"], work.inputs["base"]
    with CheckpointReader(base) as reader, Adapter(folder) as adapter:
        if (folder / PLAN_NAME).is_file():
            plan = PruningPlan.load(folder)
            plan.require_base(reader.identity(), str(base))
            architecture = plan.architecture
        else:
            work.note("the adapter has no plan.json, so only shapes were checked, not that the base is the right one")
            architecture = discover(load_config(base))
        work.require_disk(reader.nbytes, "merge")
        merged = merge(reader, architecture, adapter, work.out)
        work.draft.metrics |= {
            "changed_tensors": merged.changed,
            "bytes_read": reader.bytes_read,
            "bytes_written": merged.bytes_written,
        }
    work.draft.digests |= merged.digests
    template = stored_template(folder)
    if template is not None and template != stored_template(base):
        (work.out / TEMPLATE_NAME).write_text(template, encoding="utf-8")
        work.note("the chat template is the adapter's; the base's differs or is missing")
    for note in merged.notes:
        work.note(note)
    work.note(f"{merged.changed:,} tensors changed")
