"""loram plan RECIPE: what a recipe keeps, needs and could reach, from the config alone, offline, without torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from loram.errors import InputError, NoRoomError
from loram.memory.advice import advise
from loram.memory.cards import card
from loram.memory.devices import Sharding, per_device
from loram.memory.disk import free_disk, stage_disk
from loram.memory.fit import ALLOWANCE_BYTES, Fit, fit, smallest_ratio
from loram.memory.flops import ceiling, token_flops
from loram.memory.host import stage_memory
from loram.memory.plan import Alternative, align_setup, alternatives, components, own_key, pruned_widths, rows_per_step
from loram.memory.polish import PolishMemory, disk_speed, polish_memory, polish_setup, step_seconds
from loram.memory.setup import TrainingSetup
from loram.memory.stored import sizes, stored_bytes
from loram.memory.training import dora_extra, training_memory
from loram.models import source
from loram.models.shape import ModelShape, Widths
from loram.models.sizes import folder_shape, inline_shape, item_bytes, read_config
from loram.pruning.geometry import recipe_geometry
from loram.recipe import Recipe

from .pipeline import Pipeline


@dataclass(frozen=True)
class Question:
    """What is asked besides the recipe; sizes in bytes."""

    device_memory: int | None = None
    devices: int = 1
    sharding: Sharding = "fsdp"
    card: str = "rtx-4090"
    stored_reduction: float | None = None
    disk: str = "nvme-gen4"


def base_of(recipe: Recipe, pipeline: Pipeline) -> tuple[dict[str, Any], ModelShape]:
    """The base's config and sizes: from the recipe, else from the model folder; never from the network.

    Raises:
        InputError: neither is there, or the model is pruned already.
        RecipeError: the recipe's config cannot be used.
    """
    if "model_type" in recipe.model.config:
        return recipe.model.config, inline_shape(recipe.model.config)
    folder = _folder(recipe, pipeline)
    if folder is None:
        raise InputError(
            f"No config of '{recipe.model.path}' is at hand.",
            fix="Put its numbers under model.config, or run `loram prune`.",
        )
    config = read_config(folder)
    if "loram" in config:
        raise InputError(f"{folder} is already pruned.", fix="Set model.path to the full model.")
    return config, folder_shape(folder)


def _folder(recipe: Recipe, pipeline: Pipeline) -> Path | None:
    if source.needs_conversion(recipe.model):
        made = pipeline.find(pipeline.node("base"))
        return None if made is None else made.path
    try:
        return source.find_folder(recipe.model, download=False)
    except InputError:
        return None


def plan(recipe: Recipe, pipeline: Pipeline, question: Question) -> dict[str, Any]:
    """The whole plan as JSON values; bytes are integers.

    Raises:
        NoRoomError: no ratio reaches the stored reduction that was asked for.
    """
    config, shape = base_of(recipe, pipeline)
    prune, train, architecture = recipe.prune, recipe.train, shape.architecture
    geometry = recipe_geometry(architecture, prune)
    pruned = geometry.widths(architecture)
    base_sizes, pruned_sizes = (
        sizes(shape, widths, train.bnb_4bit_use_double_quant) for widths in (Widths.whole(architecture), pruned)
    )
    ways = alternatives(recipe, shape, pruned)
    if recipe.align.max_steps != 0:
        ways.append(Alternative("align", "align", pruned, align_setup(recipe.align)))
    own = next(way for way in ways if way.key == own_key(recipe))
    parameter_bytes = item_bytes(config, default=4 if recipe.model.path == source.RANDOM else 2)
    disk = stage_disk(recipe, shape, pruned, parameter_bytes)
    fitted, advice = None, None
    if question.device_memory is not None:
        advice = advise(shape, recipe, question.device_memory, question.devices, question.sharding)
        if recipe.small:
            fitted = fit(
                shape, own.widths, own.setup, question.device_memory, prune, question.devices, question.sharding
            )
    return {
        "recipe": recipe.name,
        "model_type": architecture.model_type,
        "geometry": geometry.describe(architecture, prune.ratio),
        "ratio": prune.ratio,
        "kept_kv_groups": geometry.kept["kv_group"],
        "kept_neurons": geometry.kept["neuron"],
        "cut_layers": len(geometry.cut_layers),
        "projections": [projection.name for projection in architecture.projections],
        "base": base_sizes.to_dict(),
        "pruned": pruned_sizes.to_dict(),
        "parameter_reduction": base_sizes.parameters / pruned_sizes.parameters,
        "reduction_counted_at_4_bits": base_sizes.bf16_bytes / pruned_sizes.four_bit_bytes,
        "reduction_in_stored_bytes": base_sizes.bf16_bytes / pruned_sizes.stored_bytes,
        "reduction_in_stored_bytes_quantized_embeddings": (
            base_sizes.bf16_bytes / pruned_sizes.stored_bytes_quantized_embeddings
        ),
        "quantize_embeddings": train.quantize_embeddings,
        "own": own.key,
        "step": _described(own.setup),
        "training": {way.key: _training(shape, way, question) for way in ways},
        "devices": question.devices,
        "sharding": question.sharding if question.devices > 1 else None,
        "speed": _speed(shape, ways, question),
        "polish": _polish(recipe, shape, question, parameter_bytes),
        "disk": {
            "folder": str(pipeline.store.root),
            "free_bytes": free_disk(pipeline.store.root),
            "stages": {name: stage.to_dict() for name, stage in disk.items()},
        },
        "host_bytes": stage_memory(recipe, shape),
        "advice": None if advice is None else advice.to_dict(),
        "fit": None if fitted is None else fitted.to_dict(),
        "stored_reduction": _stored_reduction(recipe, shape, question.stored_reduction),
    }


def require_fit(planned: dict[str, Any]) -> None:
    """Refuses a plan whose training or polishing does not fit the device that was asked about (NoRoomError)."""
    if planned["fit"] is not None:
        numbers = {name: value for name, value in planned["fit"].items() if name != "fits"}
        Fit(**numbers).require("train", "the device")
    polish = planned["polish"]
    if polish is not None and polish["available"] is not None:
        memory = PolishMemory(**{each.name: polish[each.name] for each in fields(PolishMemory)})
        memory.require(polish["available"], "the device", ALLOWANCE_BYTES)


def _described(setup: TrainingSetup) -> dict[str, Any]:
    return {
        "batch": setup.batch,
        "length": setup.length,
        "lora_r": setup.lora_r,
        "dora": setup.dora,
        "optimizer": setup.optimizer,
        "activation_checkpointing": setup.activation_checkpointing,
        "compute_bytes": setup.compute_bytes,
    }


def _training(shape: ModelShape, way: Alternative, question: Question) -> dict[str, Any]:
    memory = training_memory(shape, way.widths, way.setup)
    extra = dora_extra(shape, way.widths, way.setup)
    device = per_device(shape, way.widths, way.setup, question.devices, question.sharding)
    return {
        "label": way.label,
        "components": components(memory),
        "resident": memory.resident,
        "peak": memory.peak,
        "dora_extra_resident": extra.resident,
        "dora_extra_peak": extra.peak,
        "per_device": device.to_dict(),
    }


def _speed(shape: ModelShape, ways: list[Alternative], question: Question) -> dict[str, Any]:
    chosen = card(question.card)
    return {
        "card": question.card,
        "name": chosen.name,
        "memory_bytes": chosen.memory_bytes,
        "bf16_flops_per_second": chosen.bf16_flops,
        "bandwidth_bytes_per_second": chosen.bandwidth_bytes_per_s,
        "source": chosen.source,
        "ways": {
            way.key: {
                "flops_per_token": token_flops(shape, way.widths, way.setup).to_dict(),
                "tokens_per_second_ceiling": ceiling(shape, way.widths, way.setup, chosen).to_dict(),
            }
            for way in ways
        },
    }


def _polish(recipe: Recipe, shape: ModelShape, question: Question, stored_bytes: int) -> dict[str, Any] | None:
    """What a step on the full model takes, layer by layer; None for a recipe without such steps."""
    if recipe.polish.max_steps == 0:
        return None
    setup, rows = polish_setup(recipe, shape.architecture), rows_per_step(recipe.polish)
    memory = polish_memory(shape, setup, rows, stored_bytes)
    speed = disk_speed(question.disk)
    return {
        "steps": recipe.polish.max_steps,
        "rows": rows,
        "micro_batch": setup.batch,
        "length": setup.length,
        "quantizer": setup.quantizer,
        **memory.to_dict(),
        "needed": memory.device + ALLOWANCE_BYTES,
        "available": question.device_memory,
        "disk": question.disk,
        "disk_bytes_per_second": speed,
        "seconds": step_seconds(memory, card(question.card), speed),
    }


def _stored_reduction(recipe: Recipe, shape: ModelShape, wanted: float | None) -> dict[str, Any] | None:
    """The smallest ratio at which the 4-bit model is so much smaller than the base in 16 bits."""
    if wanted is None:
        return None
    train, base_bytes = recipe.train, 2 * shape.parameters()

    def reached(ratio: float) -> float:
        widths = pruned_widths(shape.architecture, recipe.prune, ratio)
        return base_bytes / stored_bytes(shape, widths, train.bnb_4bit_use_double_quant, train.quantize_embeddings)

    ratio = smallest_ratio(lambda candidate: reached(candidate) >= wanted)
    if ratio is None:
        raise NoRoomError(
            f"No ratio makes the stored bytes {wanted:g}× smaller; at 0.999 it is {reached(0.999):.2f}×.",
            fix="Ask for less, or set train.quantize_embeddings=true.",
        )
    return {"wanted": wanted, "ratio": ratio, "reached": reached(ratio)}
