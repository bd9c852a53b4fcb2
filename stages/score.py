"""loram score RECIPE: how much each unit of the base model matters, by the recipe's criterion.

Kept apart from the cut, so that another ratio needs no other pass over the model. `activation` and `adapter_gradient`
run the model one layer at a time, the latter forwards and backwards.
"""

from __future__ import annotations

from loram.checkpoint import CheckpointReader
from loram.errors import InputError
from loram.models.architecture import Architecture
from loram.models.discover import discover
from loram.models.layerwise import LayerwiseModel
from loram.models.loading import Precision, load_tokenizer, require_vocabulary, resolve_dtype
from loram.models.pruned import load_config, widths_of
from loram.progress import track
from loram.pruning.geometry import recipe_geometry
from loram.pruning.scores import (
    Scores,
    activation_scores,
    gradient_scores,
    magnitude_scores,
    projection_weights,
    random_scores,
    save_scores,
)
from loram.pruning.slicing import require_projections

from .calibration import calibration
from .work import Work


def run(work: Work) -> None:
    """Does the stage's work."""
    base = work.inputs["base"]
    config = load_config(base)
    if widths_of(config) is not None:
        raise InputError(f"{base} is already pruned.", fix="Set model.path to the full model.")
    architecture = discover(config)
    recipe_geometry(architecture, work.recipe.prune)  # what cannot be cut need not be scored
    with CheckpointReader(base) as reader:
        require_projections(reader, architecture)
        scores = _scores(work, reader, architecture)
        work.draft.metrics |= {"bytes_read": reader.bytes_read}
    work.draft.digests |= save_scores(scores, work.out)


def _scores(work: Work, reader: CheckpointReader, architecture: Architecture) -> Scores:
    prune = work.recipe.prune
    if prune.criterion == "random":
        return random_scores(architecture, prune.seed)
    if prune.criterion == "magnitude":
        return magnitude_scores(reader, architecture, lambda layers: track(list(layers), "score", "layers"))
    batches = calibration(work)
    precision = Precision(resolve_dtype("auto"))
    gradients = prune.criterion == "adapter_gradient"
    trains = projection_weights(architecture) if gradients else lambda name: False
    scratch = work.draft.scratch / "hidden"
    with LayerwiseModel(reader.folder, precision, work.memory, scratch, trains=trains) as engine:
        require_vocabulary(engine.model, load_tokenizer(reader.folder))
        return (gradient_scores if gradients else activation_scores)(engine, architecture, batches)
