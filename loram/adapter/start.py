"""Starts that move part of a weight into its adapter: PiSSA and LoftQ, and what their training then changed.

Both make the base another one, W' + s·B0·A0 with W' quantized anew, and train A and B from A0 and B0 on. What was
learnt is the difference s·(B·A - B0·A0), a LoRA of twice the rank, and only that may be recovered and merged onto the
full model: W0 never lost what A0 and B0 hold.

Shape suffixes: O out features, I in features, R rank.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from loram import processes
from loram.adapter.folder import WEIGHTS_NAME, Adapter, write_config
from loram.adapter.linear import AdaptedLinear
from loram.checkpoint import CheckpointReader
from loram.models.quantizers import PackedLinear, weight_blocks
from loram.progress import track
from loram.recipe import LoraInit

_LOFTQ_ITERATIONS = 5
# svd_lowrank: directions beyond the rank, and power iterations; enough for float32's precision in the leading ones.
_OVERSAMPLED = 16
_POWER_ITERATIONS = 8
# What is kept of each linear: its first A and B, and the factors of what was taken from its weight.
_PARTS = ("A", "B", "moved_A", "moved_B")
# Below this a whole SVD is as fast.
_SMALL = 512


@torch.no_grad()
def start(adapted: Any, init: LoraInit, folder: Path, saved: Path) -> None:
    """Sets A, B and the frozen weights of every projection, or does nothing for other starts.

    Args:
        adapted: a PEFT model with fresh adapters.
        init: `pissa`: A0 and B0 are the leading singular triplets, W' is the rest (arXiv 2404.02948). `loftq`: W' is
            the quantized weight and A0, B0 the best of that rank for what it lost, alternating (arXiv 2310.08659).
        folder: the model's, for its exact weights.
        saved: a file for A0 and B0, and for what was taken from the base; where it is there already, all is taken
            from it, so that a resumed run goes on from the very same base.
    """
    if init not in ("pissa", "loftq"):
        return
    known = load_file(saved) if saved.is_file() else {}
    layers = {
        name: module
        for name, module in adapted.get_base_model().named_modules()
        if isinstance(module, AdaptedLinear) and ".layers." in f".{name}"
    }
    factors: dict[str, torch.Tensor] = {}
    with CheckpointReader(folder) as reader:
        for name, module in track(list(layers.items()), init, "linears"):
            base, device = module.base_layer, module.lora_A["default"].weight.device
            weight_OI = reader.read(f"{name}.weight").to(device, torch.float32)
            rank, scale = module.r["default"], module.scaling["default"]
            if init == "loftq" and not known:
                a_RI, b_OR = weight_OI.new_zeros(rank, weight_OI.shape[1]), weight_OI.new_zeros(len(weight_OI), rank)
                for _ in range(_LOFTQ_ITERATIONS):
                    moved_RI, moved_OR = a_RI, b_OR
                    _put(base, weight_OI - scale * moved_OR @ moved_RI)
                    kept_OI = torch.cat([block for _, block in weight_blocks(base, torch.float32)])
                    a_RI, b_OR = _leading(weight_OI - kept_OI, rank, scale)
            else:
                if known:
                    a_RI, b_OR, moved_RI, moved_OR = (known[f"{name}.{part}"].to(device) for part in _PARTS)
                else:
                    moved_RI, moved_OR = a_RI, b_OR = _leading(weight_OI, rank, scale)
                _put(base, weight_OI - scale * moved_OR @ moved_RI)
            module.lora_A["default"].weight.copy_(a_RI)
            module.lora_B["default"].weight.copy_(b_OR)
            for part, factor in zip(_PARTS, (a_RI, b_OR, moved_RI, moved_OR), strict=True):
                factors[f"{name}.{part}"] = factor.cpu().contiguous().clone()
    if not known:
        saved.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when it is whole: a killed process leaves none.
        hidden = saved.with_name(f".{saved.name}.{processes.rank()}")
        save_file(factors, hidden)
        hidden.replace(saved)


def as_difference(folder: Path, saved: Path) -> None:
    """Rewrites a saved adapter as what training changed: A above A0, B beside -B0, rank and alpha for both.

    Adapters that started otherwise get zeros for the second half.
    """
    first = load_file(saved)
    with Adapter(folder) as adapter:
        config, tensors = adapter.config, {}
        for tensor in adapter.tensors:
            values = adapter.reader.read(tensor.key)
            if tensor.part in ("A", "B"):
                second = first.get(f"{tensor.module}.{tensor.part}", torch.zeros_like(values)).to(values.dtype)
                rank_axis = int((tensor.part == "B") != tensor.transposed)
                values = torch.cat([values, second if tensor.part == "A" else -second], rank_axis)
            tensors[tensor.key] = values
    save_file(tensors, folder / WEIGHTS_NAME, {"format": "pt"})
    factor = math.sqrt(2) if config.get("use_rslora") else 2  # so that the scale stays what it was
    doubled = {
        "r": 2 * config["r"],
        "lora_alpha": factor * config["lora_alpha"],
        "rank_pattern": {name: 2 * rank for name, rank in (config.get("rank_pattern") or {}).items()},
        "alpha_pattern": {name: factor * alpha for name, alpha in (config.get("alpha_pattern") or {}).items()},
    }
    write_config(config | doubled, config["base_model_name_or_path"], folder)


def _put(base: Any, weight_OI: torch.Tensor) -> None:
    if isinstance(base, PackedLinear):
        base.fill(weight_OI)
    else:
        base.weight.data.copy_(weight_OI)


def _leading(matrix_OI: torch.Tensor, rank: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A [R, I] and B [O, R] with s·B·A the best approximation of that rank, zeros where the rank is more than full."""
    least = min(matrix_OI.shape)
    if least <= _SMALL or rank + _OVERSAMPLED >= least:
        left, values, right = torch.linalg.svd(matrix_OI, full_matrices=False)
    else:
        devices = [matrix_OI.device] if matrix_OI.is_cuda else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            left, values, transposed = torch.svd_lowrank(matrix_OI, rank + _OVERSAMPLED, niter=_POWER_ITERATIONS)
        right = transposed.T
    root = (values[:rank] / scale).sqrt()
    a_RI, b_OR = root[:, None] * right[:rank], left[:, :rank] * root
    missing = rank - len(root)
    return functional.pad(a_RI, (0, 0, 0, missing)), functional.pad(b_OR, (0, missing))
