"""Run by torchrun in two processes: a QLoRA step with every layer sharded (FSDP2) equals the step in one process.

python -m torch.distributed.run --nproc-per-node 2 tests/stages/sharded_step.py FOLDER QUANTIZER DORA
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from loram.adapter.attach import attach, ratios
from loram.models.discover import discover
from loram.models.loading import Precision, load_model
from loram.models.pruned import load_config
from loram.recipe import TrainSection
from loram.training.loss import summed_nll


def model_of(folder: Path, quantizer: str, dora: bool) -> Any:
    model = load_model(folder, Precision(torch.float32, quantizer))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    section = TrainSection(quantizer=quantizer, use_dora=dora, lora_lm_head=True)  # type: ignore[arg-type]
    torch.manual_seed(0)
    adapted: Any = attach(model, discover(load_config(folder)), section)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    return adapted.train()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(folder: Path, quantizer: str, dora: bool) -> None:
    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 270, (2, 24), generator=generator)
    batch = {"input_ids": ids, "position_ids": (torch.arange(24) % 12).expand(2, 24).contiguous(), "labels": ids}
    plain, sharded = (model_of(folder, quantizer, dora) for _ in range(2))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for layer in sharded.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    assert sum(isinstance(module, FSDPModule) for module in sharded.modules()) == 3
    packed = [p for name, p in sharded.named_parameters() if "base_layer.weight" in name and "layers" in name]
    assert all(isinstance(p, DTensor) and len(p.to_local()) <= (len(p) + 1) // 2 for p in packed)
    for model in (plain, sharded):
        for _ in range(2):  # the second time after weights were gathered and given back
            model.zero_grad()
            nll, count = summed_nll(model, batch)
            (nll / count).backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    found = {name: full(p.grad) for name, p in sharded.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    assert len(found) > 10
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    if dora:
        for name, ratio in ratios(plain).items():
            torch.testing.assert_close(ratios(sharded)[name], ratio, rtol=1e-5, atol=1e-6)
    torch.distributed.destroy_process_group()
    print(f"same on {len(found)} gradients")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "dora")
