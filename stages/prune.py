"""loram prune RECIPE: keep the units with the highest scores, or factors of the linears, and write the smaller model.

Reads and writes the checkpoint a few rows at a time; factors run the model one layer at a time.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from loram.checkpoint import CheckpointReader
from loram.errors import InputError, NoRoomError
from loram.memory.disk import factor_parameters
from loram.memory.host import moment_bytes
from loram.memory.measured import free_memory
from loram.memory.units import size
from loram.models import source
from loram.models.architecture import Architecture
from loram.models.discover import discover
from loram.models.layerwise import LayerwiseModel
from loram.models.loading import Precision, load_tokenizer, require_vocabulary, resolve_dtype
from loram.models.pruned import load_config, widths_of
from loram.progress import track
from loram.pruning.factors import FACTORS_NAME, factorize
from loram.pruning.geometry import recipe_geometry
from loram.pruning.plan import PruningPlan
from loram.pruning.scores import load_scores, make_plan
from loram.pruning.slicing import require_projections, write_pruned

from .calibration import calibration
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
        item = reader.nbytes // before
        widths = geometry.widths(architecture)
        most = reader.nbytes - (widths.removed_parameters() - factor_parameters(widths)) * item
        work.require_disk(most, "prune")
        _require_moments(work, architecture)
        identity = reader.identity()
        name = source.public_name(work.recipe.model, base)
        if prune.ratio == 0:
            plan = PruningPlan.identity(architecture, name, identity)
        else:
            scores = load_scores(work.inputs["scores"], architecture) if prune.cuts else None
            plan = make_plan(architecture, scores, geometry, name, identity)
        with _factors(work, reader, plan) if plan.widths().ranks else nullcontext() as factors:
            work.draft.digests |= write_pruned(
                reader, plan, work.out, lambda items: track(list(items), "prune", "tensors"), factors
            )
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


def _require_moments(work: Work, architecture: Architecture) -> None:
    """Refuses factors whose moments the device does not hold (NoRoomError)."""
    needed, free = moment_bytes(architecture, work.recipe.prune), free_memory()
    if needed and free is not None and needed > free and not work.force:
        raise NoRoomError(
            f"prune: the moments of a layer's linears, in float64, take {size(needed)}; "
            f"{'the GPU' if torch.cuda.is_available() else 'this machine'} has {size(free)}.",
            fix="Use prune.method=cut or low_rank_attention, or a larger device; --force goes on all the same.",
        )


def _factors(work: Work, reader: CheckpointReader, plan: PruningPlan) -> CheckpointReader:
    """The factors of what does not stay one matrix, in a file of the stage's scratch folder."""
    prune, scratch = work.recipe.prune, work.draft.scratch / "factors"
    if not prune.runs_model:
        factorize(reader, plan, scratch, prune.criterion)
        return CheckpointReader(scratch, single=FACTORS_NAME)
    batches = calibration(work)
    precision, hidden = Precision(resolve_dtype("auto")), work.draft.scratch / "hidden"
    with LayerwiseModel(reader.folder, precision, work.memory, hidden) as engine:
        require_vocabulary(engine.model, load_tokenizer(reader.folder))
        factorize(reader, plan, scratch, prune.criterion, engine, batches)
    return CheckpointReader(scratch, single=FACTORS_NAME)
