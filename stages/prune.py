"""loram prune RECIPE: score the base model's units, keep the best, write the smaller model.

Reads and writes the checkpoint a few rows at a time; the `activation` criterion runs it one layer at a time.
"""

from __future__ import annotations

from loram.checkpoint import CheckpointReader
from loram.data.cache import tokenized
from loram.data.encode import Encoder, resolve_template
from loram.data.packing import Batch, PackedRows
from loram.errors import InputError
from loram.models import source
from loram.models.architecture import Architecture
from loram.models.discover import discover
from loram.models.layerwise import LayerwiseModel
from loram.models.loading import Precision, load_tokenizer, require_vocabulary, resolve_dtype
from loram.models.pruned import load_config, widths_of
from loram.progress import track
from loram.pruning.geometry import recipe_geometry
from loram.pruning.plan import PruningPlan
from loram.pruning.scores import Scores, activation_scores, magnitude_scores, make_plan, random_scores
from loram.pruning.slicing import require_projections, write_pruned

from .work import Work


def run(work: Work) -> None:
    """Does the stage's work."""
    prune = work.recipe.prune
    base = work.inputs["base"]
    config = load_config(base)
    if widths_of(config) is not None:
        raise InputError(f"{base} is already pruned.", fix="Set model.path to the full model.")
    architecture = discover(config)
    with CheckpointReader(base) as reader:
        require_projections(reader, architecture)
        geometry = recipe_geometry(architecture, prune)
        before = reader.parameters
        removed = geometry.widths(architecture).removed_parameters()
        work.require_disk(reader.nbytes - removed * (reader.nbytes // before), "prune")
        identity = reader.identity()
        name = source.public_name(work.recipe.model, base)
        if prune.ratio == 0:
            plan = PruningPlan.identity(architecture, name, identity)
        else:
            plan = make_plan(architecture, _scores(work, reader, architecture), geometry, name, identity)
        work.draft.digests |= write_pruned(reader, plan, work.out, lambda items: track(list(items), "prune", "tensors"))
        work.draft.metrics |= {"bytes_read": reader.bytes_read}
    with CheckpointReader(work.out) as written:
        after = written.parameters
    work.note(geometry.describe(architecture, prune.ratio))
    work.note(f"{before:,} parameters became {after:,} ({before / after:.2f}× fewer)")
    work.draft.metrics |= {
        "base_parameters": before,
        "parameters": after,
        "bytes_written": sum(path.stat().st_size for path in work.out.glob("*.safetensors")),
    }


def _scores(work: Work, reader: CheckpointReader, architecture: Architecture) -> Scores:
    prune = work.recipe.prune
    if prune.criterion == "random":
        return random_scores(architecture, prune.seed)
    if prune.criterion == "magnitude":
        return magnitude_scores(reader, architecture, lambda layers: track(list(layers), "score", "layers"))
    batches = _calibration(work)
    precision = Precision(resolve_dtype("auto"))
    with LayerwiseModel(reader.folder, precision, work.memory, work.draft.scratch / "hidden") as engine:
        require_vocabulary(engine.model, load_tokenizer(reader.folder))
        return activation_scores(engine, architecture, batches)


def _calibration(work: Work) -> list[Batch]:
    """Packed rows of the calibration set, one a batch, without padding."""
    prune = work.recipe.prune
    assert prune.calibration is not None  # the recipe refuses `activation` without it
    tokenizer = load_tokenizer(work.inputs["base"])
    template = resolve_template(work.recipe.data.chat_template, tokenizer)
    examples = tokenized(prune.calibration, Encoder(tokenizer, template, prune.calibration_length), work.tokens)
    rows = PackedRows(examples, prune.calibration_length, 0)
    chosen = [rows[number] for number in range(min(len(rows), prune.calibration_rows))]
    tokens = sum(int(row["tokens"]) for row in chosen)
    work.note(f"calibrated on {len(chosen)} rows of {prune.calibration.path}, {tokens:,} tokens")
    return [
        {name: row[name][: int(row["tokens"])].unsqueeze(0) for name in ("input_ids", "position_ids")} for row in chosen
    ]
