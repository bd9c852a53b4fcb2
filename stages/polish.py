"""loram polish RECIPE: a few LoRA steps on the full model, with one decoder layer of it in memory.

Starts from the recovered adapter, or from a fresh one, which makes it plain LoRA on a model larger than memory.
"""

from __future__ import annotations

from pathlib import Path

import torch

from loram.adapter.apply import save_applied
from loram.adapter.card import model_card
from loram.adapter.folder import Adapter
from loram.adapter.fresh import write_fresh
from loram.artifact import MANIFEST_NAME, Manifest
from loram.checkpoint import CheckpointReader
from loram.data.encode import resolve_template
from loram.errors import UnsupportedModelError
from loram.memory.disk import polish_disk
from loram.memory.measured import free_memory
from loram.memory.plan import rows_per_step
from loram.memory.polish import polish_memory, polish_setup
from loram.models import source
from loram.models.discover import discover
from loram.models.layerwise import LayerwiseModel
from loram.models.loading import Precision, load_tokenizer, require_vocabulary, resolve_dtype
from loram.models.pruned import load_config
from loram.models.sizes import folder_shape
from loram.progress import logger
from loram.pruning.plan import PLAN_NAME, PruningPlan
from loram.training import loop
from loram.training.layerwise import LayerwiseAdapter, LayerwiseTrainer, layerwise_perplexity

from .training import evaluations, finish, packed_rows, placement, step_flops
from .work import Work

# Of what is free beyond a step, the share in which layers stay from one step to the next.
_SHARE_KEPT = 0.5


def run(work: Work) -> None:
    """Does the stage's work."""
    polish = work.recipe.polishing
    loop.check(polish, list(polish.eval_datasets))
    base = work.inputs["base"]
    dtype = resolve_dtype(polish.dtype)
    plan = _plan(work, base)
    keep, memory = _room(work, base, dtype)
    adapter = work.inputs.get("adapter") or _fresh(work, base, plan)
    tokenizer = load_tokenizer(adapter if (adapter / "tokenizer_config.json").is_file() else base)
    rows = packed_rows(work, polish, tokenizer)
    held_out = evaluations(work, polish, tokenizer, layerwise_perplexity)
    setup = polish_setup(work.recipe, plan.architecture, *placement(dtype))
    whole = PruningPlan.identity(plan.architecture, plan.base_model, plan.base)
    precision = Precision(dtype, polish.quantizer, polish.bnb_4bit_use_double_quant)
    scratch = work.draft.scratch
    with LayerwiseModel(base, precision, memory, scratch / "hidden", adapter, _of_an_adapter, keep) as engine:
        require_vocabulary(engine.model, tokenizer)
        trained = loop.train(
            LayerwiseAdapter(engine),
            rows,
            polish,
            scratch,
            dtype,
            evaluations=held_out,
            flops=step_flops(base, whole, setup),
            run_name=f"{work.recipe.name} polish",
            trainer_class=LayerwiseTrainer,
        )
        save_applied(engine.model, adapter, work.out)
        work.draft.metrics |= {"spilled_bytes": engine.spilled}
    with Adapter(work.out) as written:
        written.require_trained()
    tokenizer.chat_template = resolve_template(work.recipe.data.chat_template, tokenizer)
    tokenizer.save_pretrained(str(work.out))
    plan.save(work.out)
    known = Manifest.read(adapter).metrics if (adapter / MANIFEST_NAME).is_file() else {}
    finish(work, trained)
    card = model_card(work.recipe, plan, known.get("training", {}), trained.metrics())
    (work.out / "README.md").write_text(card, encoding="utf-8")


def _of_an_adapter(name: str) -> bool:
    """Whether a parameter of the model with an adapter on it is the adapter's, by PEFT's names."""
    return ".default." in f".{name}."


def _plan(work: Work, base: Path) -> PruningPlan:
    """The adapter's, if it brings one, held against the base; else one that says that nothing was cut."""
    adapter = work.inputs.get("adapter")
    with CheckpointReader(base) as reader:
        identity = reader.identity()
    if adapter is not None and (adapter / PLAN_NAME).is_file():
        plan = PruningPlan.load(adapter)
        plan.require_base(identity, str(base))
        return plan
    if adapter is not None:
        work.note("the adapter has no plan.json, so only shapes are checked, not that the base is the right one")
    return PruningPlan.identity(discover(load_config(base)), source.public_name(work.recipe.model, base), identity)


def _fresh(work: Work, base: Path, plan: PruningPlan) -> Path:
    folder = work.draft.scratch / "fresh"
    with CheckpointReader(base) as reader:
        write_fresh(reader, plan.architecture, work.recipe.train, folder)
    return folder


def _room(work: Work, base: Path, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes for layers that stay on the device, and of host memory for the engine; refuses what does not fit.

    Raises:
        NoRoomError: the device or the disk is too small; says what a step needs.
    """
    on_host = not torch.cuda.is_available()
    try:
        shape = folder_shape(base)
    except UnsupportedModelError as error:
        logger.warning("memory and disk are not checked: %s", error.what)
        return 0, work.memory
    setup = polish_setup(work.recipe, shape.architecture, *placement(dtype))
    needed = polish_memory(shape, setup, rows_per_step(work.recipe.polish))
    work.require_disk(polish_disk(shape, work.recipe, setup).running, "polish")
    free = free_memory()
    if free is not None and not work.force:
        needed.require(free, "this machine" if on_host else "the GPU", hint="; --force goes on all the same")
    available = needed.device if free is None else min(free, work.memory) if on_host else free
    keep = int(max(0, available - needed.device) * _SHARE_KEPT)
    return keep, max(0, work.memory - keep - needed.adapter) if on_host else work.memory
