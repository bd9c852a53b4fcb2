"""A plan as people read it."""

from __future__ import annotations

import shlex
from typing import Any

from loram.memory.devices import DEVICE_LINES
from loram.memory.plan import COMPONENTS
from loram.memory.units import size
from loram.report.table import text_table


def render_plan(planned: dict[str, Any]) -> str:
    """Every part of a plan (`loram plan`), with what its numbers mean."""
    parts = [
        f"{planned['model_type']}: {planned['geometry']}",
        _sizes(planned),
        _training(planned),
        *([_devices(planned)] if planned["devices"] > 1 else []),
        _speed(planned),
        *([_polish(planned)] if planned["polish"] is not None else []),
        _disk(planned),
        *_answers(planned),
    ]
    return "\n\n".join(parts)


def _sizes(planned: dict[str, Any]) -> str:
    base, pruned = planned["base"], planned["pruned"]

    def row(label: str, key: str, reduction: str | None) -> list[str]:
        times = "" if reduction is None else f"{planned[reduction]:.2f}×"
        return [label, size(base[key]), size(pruned[key]), times]

    parameters = [f"{base['parameters']:,}", f"{pruned['parameters']:,}", f"{planned['parameter_reduction']:.2f}×"]
    rows = [
        ["parameters", *parameters],
        row("16-bit weights", "bf16_bytes", None),
        row("4 bits a parameter", "four_bit_bytes", "reduction_counted_at_4_bits"),
        row("NF4 as stored", "stored_bytes", "reduction_in_stored_bytes"),
        row(
            "  with embeddings",
            "stored_bytes_quantized_embeddings",
            "reduction_in_stored_bytes_quantized_embeddings",
        ),
    ]
    used = "with embeddings" if planned["quantize_embeddings"] else "NF4 as stored"
    return (
        text_table(["", "base", "pruned", "reduction"], rows)
        + "\nReductions of the last three rows are against the base in 16 bits; '4 bits a parameter' is how the paper"
        f"\ncounts. NF4 with its constants; embedding and head in 16 bits, or in NF4 too. This recipe: '{used}'."
    )


def _labels(planned: dict[str, Any]) -> list[str]:
    own = planned["own"]
    return [way["label"] + ("*" if key == own else "") for key, way in planned["training"].items()]


def _training(planned: dict[str, Any]) -> str:
    step, ways = planned["step"], planned["training"].values()
    rows = [[label, *(_shown(way["components"][key]) for way in ways)] for key, label in COMPONENTS.items()]
    rows.append(["peak", *(size(way["peak"]) for way in ways)])
    rows.append(["DoRA's extra at peak", *(_shown(way["dora_extra_peak"]) for way in ways)])
    checkpointing = "with" if step["activation_checkpointing"] else "without"
    return (
        f"A training step: {step['batch']} × {step['length']} tokens, rank {step['lora_r']}, {step['optimizer']}, "
        f"{checkpointing} checkpointing, {'bfloat16' if step['compute_bytes'] == 2 else 'float32'}"
        "\n(align: its own batch, length and optimizer; * is what this recipe trains)\n\n"
        + text_table(["", *_labels(planned)], rows)
        + "\nLines are not all alive at once, so the peak is less than their sum. Not counted: CUDA context, allocator."
        f"\nDoRA's extra (train.use_dora) is {'included' if step['dora'] else 'not included'}."
    )


def _devices(planned: dict[str, Any]) -> str:
    ways = planned["training"].values()
    rows = [[label, *(_shown(way["per_device"][key]) for way in ways)] for key, label in DEVICE_LINES.items()]
    return f"Each of {planned['devices']} devices, {planned['sharding'].upper()}\n\n" + text_table(
        ["", *_labels(planned)], rows
    )


def _speed(planned: dict[str, Any]) -> str:
    speed = planned["speed"]
    ways = speed["ways"].values()
    ceilings = [way["tokens_per_second_ceiling"] for way in ways]
    rows = [
        ["GFLOPs a token, forward", *(f"{way['flops_per_token']['forward'] / 1e9:,.1f}" for way in ways)],
        ["GFLOPs a token, step", *(f"{way['flops_per_token']['step'] / 1e9:,.1f}" for way in ways)],
        ["tokens/s", *(f"{each['compute']:,.0f}" for each in ceilings)],
        ["tokens/s, dequantizing", *(f"{each['with_dequantization']:,.0f}" for each in ceilings)],
        ["time in dequantization", *(f"{each['dequantization_share']:.0%}" for each in ceilings)],
    ]
    return (
        f"{speed['name']} ({speed['bf16_flops_per_second'] / 1e12:g} TFLOP/s in bfloat16, "
        f"{speed['bandwidth_bytes_per_second'] / 1e9:,.0f} GB/s, {size(speed['memory_bytes'])}): "
        "a ceiling, not a prediction\n\n" + text_table(["", *_labels(planned)], rows)
    )


def _polish(planned: dict[str, Any]) -> str:
    polish = planned["polish"]
    seconds = polish["seconds"]
    slower = "computing" if seconds["computing"] >= seconds["reading"] else "reading"
    rows = [
        ["on the device", size(polish["device"])],
        ["  adapter, gradients, optimizer", size(polish["adapter"])],
        ["being read, in host memory", size(polish["host"])],
        ["hidden states, in host memory or on disk", size(polish["hidden"])],
        ["weights read a step", size(polish["weights_read"])],
        ["computing a step, at the card's peak", f"{seconds['computing']:,.1f} s"],
        [f"reading a step, from {polish['disk']}", f"{seconds['reading']:,.1f} s"],
    ]
    return (
        f"polish: {polish['rows']} × {polish['length']} tokens a step, {polish['micro_batch']} at once, on the full "
        f"model layer by layer (projections: {polish['quantizer']})\n\n"
        + text_table(["", "a step"], rows)
        + f"\nThe next layer is read while one computes, so a step takes {seconds['step']:,.1f} s at least, bound by "
        f"{slower}. Layers for which there\nis memory are read once; hidden states beyond --memory are written once "
        "and read twice a step besides."
    )


def _disk(planned: dict[str, Any]) -> str:
    disk, host = planned["disk"], planned["host_bytes"]
    free = disk["free_bytes"]
    names = list(dict.fromkeys([*disk["stages"], *host]))
    rows = []
    for name in names:
        of = disk["stages"].get(name)
        enough = "" if of is None else "yes" if of["running"] <= free else "NO"
        written = ["", ""] if of is None else [size(of["kept"]), size(of["running"])]
        rows.append([name, *written, enough, size(host[name]) if name in host else ""])
    return (
        text_table(["stage", "disk, kept", "while running", "room", "host memory"], rows)
        + f"\n{size(free)} are free below {disk['folder']}; 'room' is for each stage alone, all together keep "
        f"{size(sum(stage['kept'] for stage in disk['stages'].values()))}."
    )


def _answers(planned: dict[str, Any]) -> list[str]:
    lines = []
    fit, reduction = planned["fit"], planned["stored_reduction"]
    if fit is not None:
        verdict = "fits" if fit["fits"] else "does NOT fit"
        lines.append(
            f"Training {verdict}: {size(fit['needed'])} of {size(fit['available'])} on a device, "
            f"{size(fit['allowance'])} of it an estimate for context and allocator."
            f"\nWhat fits, all else as it is: {_limits(fit)}."
        )
    polish = planned["polish"]
    if polish is not None and polish["available"] is not None:
        verdict = "fits" if polish["needed"] <= polish["available"] else "does NOT fit"
        lines.append(f"Polishing {verdict}: {size(polish['needed'])} of {size(polish['available'])} on a device.")
    if planned["advice"] is not None:
        overrides, reason = planned["advice"]["overrides"], planned["advice"]["reason"]
        lines.append(f"Recommended: {shlex.join(overrides)}\n({reason})." if overrides else f"No way fits: {reason}.")
    if reduction is not None:
        lines.append(
            f"prune.ratio={reduction['ratio']:g} is the smallest with {reduction['wanted']:g}× in stored bytes "
            f"({reduction['reached']:.2f}×)."
        )
    return lines


def _limits(fit: dict[str, Any]) -> str:
    named = (("smallest", "ratio"), ("largest", "batch"), ("largest", "length"))
    values = [(edge, name, fit[f"{edge}_{name}"]) for edge, name in named]
    return ", ".join(f"no {name}" if value is None else f"{edge} {name} {value:g}" for edge, name, value in values)


def _shown(count: int) -> str:
    return size(count) if count else "–"
