"""Graphics cards in numbers: what time and memory of a plan are held against.

All numbers are the manufacturer's, per card. Tensor throughput is bfloat16 with float32 accumulation and *without*
structured sparsity: half of the figure where a datasheet prints only the sparse one (L4, H100, H200), a quarter where
only sparse float8 (RTX 6000 Ada, B200). What a program reaches is less.
"""

from __future__ import annotations

from dataclasses import dataclass

from loram.errors import RecipeError, did_you_mean

_GIB = 2**30


@dataclass(frozen=True)
class Card:
    """One card; `memory_bytes` takes the advertised gigabytes as GiB, `source` names the manufacturer's document."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    bf16_flops: float
    source: str


def _card(name: str, gib: int, gigabytes_per_s: float, teraflops: float, source: str) -> Card:
    return Card(name, gib * _GIB, gigabytes_per_s * 1e9, teraflops * 1e12, source)


# The 3090, 4090 and 5090 do half as much with float32 accumulation as with float16; the figures are the halves.
# A100 and H100 are the SXM modules; the PCIe cards have less bandwidth (A100 80 GB: 1,935 GB/s).
# B200 as in the DGX: 1,440 GB and 64 TB/s over eight cards, 180 GB of each card's 192 in use.
CARDS: dict[str, Card] = {
    "rtx-3090": _card("RTX 3090", 24, 936, 71, "NVIDIA Ampere GA102 GPU Architecture"),
    "rtx-4090": _card("RTX 4090", 24, 1008, 165.2, "NVIDIA Ada GPU Architecture"),
    "rtx-5090": _card("RTX 5090", 32, 1792, 209.5, "NVIDIA RTX Blackwell GPU Architecture"),
    "rtx-a6000": _card("RTX A6000", 48, 768, 154.8, "NVIDIA Ampere GA102 GPU Architecture"),
    "rtx-6000-ada": _card("RTX 6000 Ada", 48, 960, 364.2, "NVIDIA RTX 6000 Ada Generation Datasheet"),
    "a10": _card("A10", 24, 600, 125, "NVIDIA A10 Tensor Core GPU Datasheet"),
    "l4": _card("L4", 24, 300, 121, "NVIDIA L4 Tensor Core GPU Datasheet"),
    "l40s": _card("L40S", 48, 864, 362, "NVIDIA L40S Datasheet"),
    "a100-40gb": _card("A100 40GB", 40, 1555, 312, "NVIDIA A100 Tensor Core GPU Datasheet"),
    "a100-80gb": _card("A100 80GB", 80, 2039, 312, "NVIDIA A100 Tensor Core GPU Datasheet"),
    "h100-sxm": _card("H100 SXM", 80, 3350, 989, "NVIDIA H100 Tensor Core GPU Datasheet"),
    "h200": _card("H200", 141, 4800, 989, "NVIDIA H200 Tensor Core GPU Datasheet"),
    "b200": _card("B200", 180, 8000, 2250, "NVIDIA DGX B200 Datasheet"),
}


def card(name: str) -> Card:
    """The card of that short name, `rtx-4090`.

    Raises:
        RecipeError: no such card; says the nearest name and all that are known.
    """
    if name not in CARDS:
        raise RecipeError(f"Unknown card '{name}'{did_you_mean(name, CARDS)}.", fix=f"One of: {', '.join(CARDS)}.")
    return CARDS[name]
