"""From a recipe to what the memory model computes with: geometries, training setups, and their alternatives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from loram.adapter.attach import target_modules
from loram.memory.setup import Device, Optimizer, TrainingSetup
from loram.memory.training import TrainingMemory
from loram.models.architecture import Architecture
from loram.models.shape import ModelShape, Widths
from loram.pruning.geometry import recipe_geometry
from loram.recipe import AlignSection, PruneSection, Recipe, TrainingSection, TrainSection

ComputeBytes = Literal[2, 4]

# transformers' names (`OptimizerNames`) of the optimizers whose state is known. Any other is counted as AdamW with
# two moments in the parameter's dtype, which few exceed.
_OPTIMIZERS: dict[str, Optimizer] = {
    "adamw_torch": "adamw_torch",
    "adamw_torch_fused": "adamw_torch",
    "adamw_8bit": "adamw_bnb_8bit",
    "adamw_bnb_8bit": "adamw_bnb_8bit",
    "paged_adamw": "paged_adamw_32bit",
    "paged_adamw_32bit": "paged_adamw_32bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
}


@dataclass(frozen=True)
class Alternative:
    """A way to train: a model at some widths in some setup. `key` is for machines, `label` for people."""

    key: str
    label: str
    widths: Widths
    setup: TrainingSetup


def pruned_widths(architecture: Architecture, prune: PruneSection, ratio: float | None = None) -> Widths:
    """Units that the recipe's pruning leaves, or would leave at another ratio.

    Raises:
        RecipeError: no layer is left to cut.
    """
    return recipe_geometry(architecture, prune, ratio).widths(architecture)


def compute_bytes(section: TrainingSection) -> ComputeBytes:
    """Of the compute dtype on a card, where `auto` is bfloat16."""
    return 4 if section.dtype == "float32" else 2


def rows_per_step(section: TrainingSection) -> int:
    """Rows of an optimizer step; by tokens, as many as it takes if every token of a row counts."""
    if section.tokens_per_step is not None:
        return -(-section.tokens_per_step // section.max_length)
    return section.per_device_train_batch_size * section.gradient_accumulation_steps


def _common(section: TrainingSection, compute: ComputeBytes, device: Device) -> TrainingSetup:
    return TrainingSetup(
        batch=section.per_device_train_batch_size,
        length=section.max_length,
        compute_bytes=compute,
        quantizer="none",
        activation_checkpointing=section.activation_checkpointing,
        checkpoint_every=section.checkpoint_every,
        offloading=section.activation_offloading and device == "cuda",
        optimizer=_OPTIMIZERS.get(section.optim, "adamw_torch"),
        accumulating=section.gradient_accumulation_steps > 1 or section.tokens_per_step is not None,
        device=device,
    )


def train_setup(
    section: TrainSection, architecture: Architecture, compute: ComputeBytes | None = None, device: Device = "cuda"
) -> TrainingSetup:
    """The train stage's step; every position but the last counts as labelled, the most that rows can have.

    Raises:
        RecipeError: a target that is no projection of the architecture.
    """
    target_modules(architecture, section)
    targets = section.target_modules
    return replace(
        _common(section, compute or compute_bytes(section), device),
        quantizer=section.quantizer,
        double_quant=section.bnb_4bit_use_double_quant,
        quantize_embeddings=section.quantize_embeddings,
        lora_r=section.lora_r,
        lora_dropout=section.lora_dropout > 0,
        targets="all" if targets == "all" else tuple(targets),
        lora_head=section.lora_lm_head,
        dora=section.use_dora,
        lora_embedding=section.lora_embedding,
        rank_pattern=tuple(section.rank_pattern.items()),
        saved_embedding="embedding" in section.modules_to_save,
        saved_head="lm_head" in section.modules_to_save,
    )


def recovered_setup(
    section: TrainSection, architecture: Architecture, compute: ComputeBytes | None = None, device: Device = "cuda"
) -> TrainingSetup:
    """`train_setup` with the ranks of the adapter that comes out, which holds its start too where that moved weights
    (`loram.adapter.start`)."""
    setup = train_setup(section, architecture, compute, device)
    if not section.moves_weights:
        return setup
    doubled = tuple((module, 2 * rank) for module, rank in setup.rank_pattern)
    return replace(setup, lora_r=2 * setup.lora_r, rank_pattern=doubled)


def align_setup(section: AlignSection, compute: ComputeBytes | None = None, device: Device = "cuda") -> TrainingSetup:
    """The align stage's step. If embedding or head train, both are counted as training."""
    whole = section.train_embeddings or section.train_lm_head
    common = _common(section, compute or compute_bytes(section), device)
    return replace(common, method="all" if whole else "align", float8=section.float8)


def own_key(recipe: Recipe) -> str:
    """The alternative that the recipe itself trains."""
    return "loram" if recipe.train.quantizer == "none" else "qloram"


def alternatives(recipe: Recipe, shape: ModelShape, pruned: Widths) -> list[Alternative]:
    """The same training on the whole and the pruned model, in 16 and in 4 bits, and of all parameters.

    All have the recipe's batch, length, optimizer and checkpointing. Those in 4 bits take NF4 where the recipe
    quantizes nothing.
    """
    whole = Widths.whole(shape.architecture)
    setup = train_setup(recipe.train, shape.architecture)
    quantized = replace(setup, quantizer="nf4") if setup.quantizer == "none" else setup
    plain = replace(setup, quantizer="none", quantize_embeddings=False)
    return [
        Alternative("full", "full", whole, replace(_common(recipe.train, plain.compute_bytes, "cuda"), method="all")),
        Alternative("lora", "LoRA", whole, plain),
        Alternative("qlora", "QLoRA", whole, quantized),
        Alternative("loram", "LoRAM", pruned, plain),
        Alternative("qloram", "QLoRAM", pruned, quantized),
    ]


# Labels of the parts of a step's memory, in the order they are shown.
COMPONENTS = {
    "quantized_linears": "packed linears",
    "linears": "other linears",
    "embedding": "embedding",
    "head": "head",
    "norms_and_biases": "norms and biases",
    "adapter": "adapter",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "logits_and_loss": "logits and loss",
    "dequantization": "dequantization",
}


def components(memory: TrainingMemory) -> dict[str, int]:
    """Bytes of each part. They are not all alive at once, so they add up to more than the peak."""
    return {
        "quantized_linears": memory.quantized_linears,
        "linears": memory.linears,
        "embedding": memory.embedding,
        "head": memory.head,
        "norms_and_biases": memory.norms + memory.biases + memory.buffers,
        "adapter": memory.adapter,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations + memory.loss_activations,
        "logits_and_loss": memory.logits,
        "dequantization": memory.dequantization,
    }
