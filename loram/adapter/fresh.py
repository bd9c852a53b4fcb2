"""A fresh adapter for a model that is not in memory, as a PEFT folder to start training from."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from loram.adapter.attach import lora_config, target_modules
from loram.adapter.folder import PREFIX, WEIGHTS_NAME, Adapter, write_config
from loram.adapter.patterns import matched
from loram.checkpoint import CheckpointReader
from loram.models.architecture import Architecture
from loram.recipe import TrainSection


def write_fresh(base: CheckpointReader, architecture: Architecture, section: TrainSection, folder: Path) -> None:
    """Writes A random by the section's seed and B zero, float32, for the projections it targets.

    A is uniform within ±1/√in, PEFT's default, or normal with deviation 1/r (`gaussian`). The weights of `base` are
    read for a DoRA alone, one matrix at a time: its magnitudes are the norms of their rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    targets = set(target_modules(architecture, section))
    generator = torch.Generator().manual_seed(section.seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(architecture.layers):
        for projection in architecture.projections:
            module = architecture.module(layer, projection)
            if module.rpartition(".")[2] not in targets:
                continue
            rows, columns = projection.shape(architecture.units(projection.unit))
            rank = matched(section.rank_pattern.items(), module, section.lora_r)
            a = torch.empty(rank, columns)
            if section.init_lora_weights == "gaussian":
                a.normal_(std=1 / rank, generator=generator)
            else:
                a.uniform_(-1 / math.sqrt(columns), 1 / math.sqrt(columns), generator=generator)
            tensors[f"{PREFIX}{module}.lora_A.weight"] = a
            tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.zeros(rows, rank)
            if section.use_dora:
                weight = base.read(f"{module}.weight")
                norms = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
                tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = norms
    save_file(tensors, folder / WEIGHTS_NAME, {"format": "pt"})
    lora_config(architecture, section).save_pretrained(str(folder))
    with Adapter(folder) as adapter:
        write_config(adapter.config, str(base.folder), folder)
