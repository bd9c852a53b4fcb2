"""loram align RECIPE: a short continual pre-training of the pruned model on packed text.

All parameters but the embedding and the head move, as in the paper; done once, by whoever publishes the model.
"""

from __future__ import annotations

from typing import Any

from loram import processes
from loram.checkpoint import CheckpointReader, CheckpointWriter, TensorSpec, copy_side_files
from loram.errors import RecipeError
from loram.memory.disk import align_disk
from loram.memory.plan import align_setup
from loram.models.loading import load_model, load_tokenizer, require_vocabulary, resolve_dtype
from loram.pruning.plan import PruningPlan
from loram.recipe import AlignSection
from loram.training import loop
from loram.training.activations import prepare_activations
from loram.training.float8 import require_float8, use_float8

from .training import evaluations, finish, packed_rows, placement, require_room, step_flops
from .work import Work, require_model_folder


def run(work: Work) -> None:
    """Does the stage's work."""
    align = work.recipe.align
    loop.check(align, list(align.eval_datasets))
    if align.float8:
        require_float8("align.float8")
    folder = work.inputs["model"]
    require_model_folder(folder)
    plan = PruningPlan.load(folder)
    dtype = resolve_dtype(align.dtype)
    setup = align_setup(align, *placement(dtype))
    with CheckpointReader(folder) as reader:
        kept = reader.nbytes
    require_room(work, "align", folder, plan, setup, lambda shape: align_disk(shape, plan.widths(), align, setup, kept))
    tokenizer = load_tokenizer(folder)
    rows = packed_rows(work, align, tokenizer)
    held_out = evaluations(work, align, tokenizer)
    model = load_model(folder, dtype)
    require_vocabulary(model, tokenizer)
    _require_one_answer_for_tied(plan, model, align)
    for name, train in (
        (plan.architecture.embedding, align.train_embeddings),
        (plan.architecture.head, align.train_lm_head),
    ):
        model.get_submodule(name).weight.requires_grad_(train)
    if align.float8:
        work.note(f"{use_float8(model, 'align.float8')} linears multiply in 8 bits")
    prepare_activations(model, align, adapter=False)
    trained = loop.train(
        model.train(),
        rows,
        align,
        work.draft.scratch,
        dtype,
        evaluations=held_out,
        flops=step_flops(folder, plan, setup),
        run_name=f"{work.recipe.name} align",
    )
    _write(work, model)
    copy_side_files(folder, work.out)
    (work.out / "config.json").write_bytes((folder / "config.json").read_bytes())
    plan.save(work.out)
    finish(work, trained)


def _require_one_answer_for_tied(plan: PruningPlan, model: Any, align: AlignSection) -> None:
    """A tied embedding and head are one matrix: it is trained or it is not (RecipeError)."""
    embedding, head = (
        model.get_submodule(name).weight for name in (plan.architecture.embedding, plan.architecture.head)
    )
    if embedding is head and align.train_embeddings != align.train_lm_head:
        raise RecipeError(
            "align: this model ties its embedding and head, so one cannot be trained without the other.",
            fix="Set align.train_embeddings and align.train_lm_head to the same value.",
        )


def _write(work: Work, model: Any) -> None:
    """The trained weights in the stored dtype and shard layout of the model that came in."""
    state = processes.gathered(model)
    if not processes.is_writer():
        return
    with CheckpointReader(work.inputs["model"]) as reader:
        layout = {
            shard: [TensorSpec(info.name, info.dtype, info.shape) for info in infos]
            for shard, infos in reader.shards.items()
        }
        with CheckpointWriter(work.out, layout) as writer:
            for spec in writer.specs:
                trained = state.get(spec.name)
                writer.write(spec.name, reader.read(spec.name) if trained is None else trained.to(spec.dtype))
    work.draft.digests |= writer.digests
