"""How fast a step was: rates, and the share of the card's peak that the model reaches (MFU, arXiv 2204.02311)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from loram.memory.cards import CARDS
from loram.memory.flops import token_flops
from loram.memory.setup import TrainingSetup
from loram.models.shape import ModelShape, Widths

# What CUDA calls the cards whose peak is known. Others of similar name differ (A10G, H100 PCIe, laptop models).
_CUDA_NAMES = {
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 5090": "rtx-5090",
    "NVIDIA RTX A6000": "rtx-a6000",
    "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada",
    "NVIDIA A10": "a10",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100 80GB PCIe": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}


def peak_flops(device_name: str) -> float | None:
    """bfloat16 operations a second of a card by its CUDA name; None where it is not known."""
    short = _CUDA_NAMES.get(device_name)
    return None if short is None else CARDS[short].bf16_flops


@dataclass(frozen=True)
class StepFlops:
    """Operations of a training step that the model needs: not those that checkpointing makes again.

    `per_token`: of the layers, for each token that is not padding. `per_label`: of the head, for each labelled token.
    """

    per_token: int
    per_label: int

    @classmethod
    def of(cls, shape: ModelShape, widths: Widths, setup: TrainingSetup) -> StepFlops:
        """From the model's sizes, with attention over whole rows."""
        once = replace(setup, activation_checkpointing=False)
        without, labelled = (
            token_flops(shape, widths, replace(once, labelled_positions=positions)).step
            for positions in (0, setup.length)
        )
        return cls(without, labelled - without)

    def step(self, tokens: int, loss_tokens: int) -> int:
        """Of a step with that many tokens."""
        return self.per_token * tokens + self.per_label * loss_tokens


def rates(counts: dict[str, int], seconds: float, flops: StepFlops | None, peak: float | None) -> dict[str, Any]:
    """What a step's counts (`tokens`, `loss_tokens`, `rows`) make a second, and `mfu` where it can be told."""
    if seconds <= 0:
        return {}
    found = {
        "tokens_per_second": round(counts["tokens"] / seconds, 1),
        "rows_per_second": round(counts["rows"] / seconds, 3),
    }
    if flops is not None and peak is not None:
        found["mfu"] = round(flops.step(counts["tokens"], counts["loss_tokens"]) / seconds / peak, 4)
    return found
