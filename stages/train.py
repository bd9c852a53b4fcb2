"""loram train RECIPE: a LoRA on the quantized small model (QLoRA), loss on completions only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from loram.adapter.attach import attach, ratios, target_modules
from loram.adapter.folder import Adapter, save_ratios, write_config
from loram.adapter.start import as_difference, start
from loram.data.encode import encode_dataset, resolve_template
from loram.data.packing import PackedRows
from loram.errors import RecipeError
from loram.evaluate.perplexity import Perplexity, perplexity
from loram.memory.disk import train_disk
from loram.memory.plan import train_setup
from loram.models.loading import load_model, load_tokenizer, require_vocabulary, resolve_dtype
from loram.pruning.plan import PruningPlan
from loram.recipe import DatasetSection
from loram.training import loop

from .training import finish, pad_id, placement, require_room, training_precision
from .work import Work, require_model_folder


def run(work: Work) -> None:
    """Does the stage's work."""
    train = work.recipe.train
    if train.dataset is None:
        raise RecipeError(
            "train.dataset is missing.", fix="Name a data set in the recipe, e.g. train.dataset.path=rows.jsonl"
        )
    folder = work.inputs["model"]
    require_model_folder(folder)
    plan = PruningPlan.load(folder)
    targets = target_modules(plan.architecture, train)
    dtype = resolve_dtype(train.dtype)
    setup = train_setup(train, plan.architecture, *placement(dtype))
    require_room(
        work, "train", folder, plan, setup, lambda shape: train_disk(shape, plan.widths(), train, setup).running
    )
    tokenizer = load_tokenizer(folder)
    pad = pad_id(tokenizer)

    def encode(dataset: DatasetSection) -> Any:
        encoded = encode_dataset(dataset, tokenizer, train.max_length, work.recipe.data.chat_template)
        work.note(f"{dataset.path} ({dataset.split}): {encoded.describe()}")
        return encoded

    rows = PackedRows(encode(train.dataset).examples, train.max_length, pad, train.seed)
    held_out = None if train.eval_dataset is None else encode(train.eval_dataset)
    model = load_model(folder, training_precision(train, dtype))
    require_vocabulary(model, tokenizer)
    if train.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    adapted = attach(model, plan.architecture, train)
    started = work.draft.scratch / "start.safetensors"
    start(adapted, train.init_lora_weights, folder, started)
    trainable = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    method = "DoRA" if train.use_dora else "LoRA"
    work.note(
        f"{method} r={train.lora_r} on {', '.join(targets)}: {trainable:,} parameters; base {train.quantizer}, {dtype}"
    )

    def evaluate(current: nn.Module) -> Perplexity:
        assert held_out is not None
        return perplexity(current, held_out.examples, train.max_length, pad)

    trained = loop.train(
        adapted.train(),
        rows,
        train,
        work.draft.scratch,
        dtype,
        evaluate=None if held_out is None else evaluate,
        check_saved=_check,
    )
    adapted.save_pretrained(str(work.out), save_embedding_layers=False)
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
    work.draft.metrics |= {"target_modules": targets, "trainable_parameters": trainable}
    if held_out is not None:
        final = evaluate(adapted)
        work.draft.metrics |= {"eval_loss": final.loss, "eval_perplexity": final.value}
        work.note(f"perplexity on {final.tokens:,} held-out tokens, on the small model: {final.value:.3f}")


def _check(folder: Path) -> None:
    """Reads a saved adapter back: whole, and really trained."""
    with Adapter(folder) as adapter:
        adapter.require_trained()
