"""loram train RECIPE: a LoRA on the quantized small model (QLoRA), loss on completions only."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from loram import processes
from loram.adapter.attach import attach, ratios, target_modules
from loram.adapter.folder import Adapter, save_ratios, write_config
from loram.adapter.start import as_difference, start
from loram.artifact import Manifest
from loram.data.encode import resolve_template
from loram.data.packing import PackedRows
from loram.errors import InputError, RecipeError
from loram.memory.disk import train_disk
from loram.memory.plan import train_setup
from loram.models.discover import layers_prefix
from loram.models.loading import load_model, load_tokenizer, require_vocabulary, resolve_dtype
from loram.pruning.plan import PruningPlan
from loram.training import loop
from loram.training.activations import prepare_activations
from loram.training.anchors import Anchors
from loram.training.checkpoints import rows_identity

from .training import (
    count_weights,
    evaluations,
    finish,
    packed_rows,
    placement,
    require_room,
    step_flops,
    training_precision,
)
from .work import Work, require_model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def run(work: Work) -> None:
    """Does the stage's work."""
    train = work.recipe.train
    if not train.datasets:
        raise RecipeError(
            "train.datasets is empty.", fix="Name a data set in the recipe, e.g. train.datasets=rows.jsonl"
        )
    loop.check(train, list(train.eval_datasets))
    folder = work.inputs["model"]
    require_model_folder(folder)
    plan = PruningPlan.load(folder)
    if plan.widths().ranks and train.moves_weights:
        raise RecipeError(
            f"train.init_lora_weights '{train.init_lora_weights}' changes whole weights; {folder} has factors of them.",
            fix="Use init_lora_weights=default, or a model made with prune.method=cut.",
        )
    targets = target_modules(plan.architecture, train)
    dtype = resolve_dtype(train.dtype)
    setup = train_setup(train, plan.architecture, *placement(dtype))
    require_room(
        work, "train", folder, plan, setup, lambda shape: train_disk(shape, plan.widths(), train, setup).running
    )
    tokenizer = load_tokenizer(folder)
    rows = packed_rows(work, train, tokenizer)
    held_out = evaluations(work, train, tokenizer)
    model = load_model(folder, training_precision(train, dtype))
    require_vocabulary(model, tokenizer)
    prepare_activations(model, train, adapter=True)
    adapted = attach(model, plan.architecture, train)
    started = work.draft.scratch / "start.safetensors"
    start(adapted, train.init_lora_weights, folder, started)
    trainable = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    method = "DoRA" if train.use_dora else "LoRA"
    work.note(
        f"{method} r={train.lora_r} on {', '.join(targets)}: {trainable:,} parameters; base {train.quantizer}, {dtype}"
    )

    with _anchors(work, model, rows) as anchors:
        trained = loop.train(
            adapted.train(),
            rows,
            train,
            work.draft.scratch,
            dtype,
            evaluations=held_out,
            check_saved=_check,
            flops=step_flops(folder, plan, setup),
            run_name=f"{work.recipe.name} train",
            anchors=anchors,
        )
    adapted.save_pretrained(str(work.out), state_dict=processes.gathered(adapted), save_embedding_layers=False)
    with Adapter(work.out) as adapter:
        write_config(adapter.config, str(folder.resolve()), work.out)
    if started.is_file():
        as_difference(work.out, started)
    if train.use_dora:
        save_ratios(ratios(adapted), work.out)
    _check(work.out)
    # The adapter answers in the template it was trained with, so that goes with it.
    tokenizer.chat_template = resolve_template(work.recipe.data.chat_template, tokenizer)
    tokenizer.save_pretrained(str(work.out))
    plan.save(work.out)
    finish(work, trained)
    count_weights(work, folder, plan.widths(), setup)
    work.draft.metrics |= {"target_modules": targets, "trainable_parameters": trainable}


def _anchors(work: Work, model: PreTrainedModel, rows: PackedRows) -> AbstractContextManager[Anchors | None]:
    """Raises InputError where the rows are not those that the anchors were made of: a data set may have moved."""
    if "anchors" not in work.inputs:
        return nullcontext()
    folder = work.inputs["anchors"]
    made_of = Manifest.read(folder).metrics
    if any(made_of.get(name) != value for name, value in rows_identity(rows, len(rows)).items()):
        raise InputError(
            f"The training rows are not those that {folder} was made of.",
            fix="Make the anchors again: loram anchor RECIPE --remake.",
        )
    work.note("anchored to the full model; the adapter is for that one, and held-out perplexity is without anchors")
    return Anchors(folder, list(model.get_submodule(layers_prefix(model)).children()))


def _check(folder: Path) -> None:
    """Reads a saved adapter back: whole, and really trained."""
    with Adapter(folder) as adapter:
        adapter.require_trained()
