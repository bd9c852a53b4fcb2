"""loram anchor RECIPE: what the full model's hidden states have more than the small one's on the training rows.

Made when `train.anchors` asks for it. Both models run one decoder layer at a time, one after the other.
"""

from __future__ import annotations

from functools import partial

from loram.checkpoint import CheckpointReader
from loram.errors import RecipeError
from loram.memory.disk import anchor_disk
from loram.memory.measured import peak_bytes, reset_peak
from loram.memory.spill import Spill
from loram.memory.units import size
from loram.models.layerwise import LayerwiseModel
from loram.models.loading import Precision, load_tokenizer, resolve_dtype
from loram.models.pruned import load_config
from loram.pruning.plan import PruningPlan
from loram.training.anchors import anchored_layers, write_anchors
from loram.training.checkpoints import rows_identity
from loram.training.loop import rows_trained

from .training import count_pass, packed_rows, training_precision
from .work import Work, require_model_folder


def run(work: Work) -> None:
    """Does the stage's work."""
    train, base, small = work.recipe.train, work.inputs["base"], work.inputs["model"]
    if not train.anchors:
        raise RecipeError("train.anchors is 0, so there are none to make.", fix="Set it to 1 or more.")
    require_model_folder(small)
    plan = PruningPlan.load(small)
    with CheckpointReader(base) as reader:
        plan.require_base(reader.identity(), str(base))
    rows = packed_rows(work, train, load_tokenizer(small))
    numbers = rows_trained(train, rows)
    layers = anchored_layers(plan.architecture.layers, train.anchors)
    tokens = sum(int(rows[number]["tokens"]) for number in numbers)
    dtype = resolve_dtype(train.dtype)
    hidden_size = load_config(base).hidden_size
    disk = anchor_disk(hidden_size, plan.architecture.layers, train.anchors, tokens, dtype.itemsize)
    work.require_disk(disk.running, "anchor")
    reset_peak()
    hidden = work.draft.scratch / "hidden"
    # Half of the memory for what waits from one model to the other.
    spill = Spill(work.memory // 2, work.draft.scratch / "between")
    engine = partial(LayerwiseModel, memory=work.memory // 2, scratch=hidden)
    work.draft.digests |= write_anchors(
        partial(engine, base, Precision(dtype)),
        partial(engine, small, training_precision(train, dtype)),
        rows, numbers, layers, spill, work.out,
    )  # fmt: skip
    spill.close()
    for folder, widths in ((base, None), (small, plan.widths())):
        count_pass(work, folder, widths, train.max_length, tokens, gradients=False)
    points = f"{len(layers)} of {plan.architecture.layers} layers"
    work.note(f"{tokens:,} tokens of {len(numbers):,} rows anchored after {points}: {size(disk.kept)}")
    made = {"tokens": tokens, "rows_anchored": len(numbers), "bytes_written": disk.kept}
    work.draft.metrics |= rows_identity(rows, len(rows)) | made | peak_bytes()
