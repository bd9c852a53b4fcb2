"""`loram recover` at LLaMA-2-70B shapes: seconds, peak memory, and the time of copying the same bytes.

    .venv/bin/python -m tests.benchmarks.recover_70b

The base is a sparse file of its true apparent size (138 GB, next to nothing on disk); the adapter, rank 8 on every
projection of a random plan at ratio .85, is dense. The peak is that of the whole `loram` process.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig

from loram.adapter.folder import WEIGHTS_NAME
from loram.checkpoint import CheckpointReader, CheckpointWriter
from loram.checkpoint.format import DTYPE_NAMES, SINGLE_NAME, TensorSpec
from loram.models.architecture import Architecture
from loram.models.discover import discover
from loram.pruning.geometry import plan_geometry
from loram.pruning.plan import PruningPlan
from loram.pruning.scores import make_plan, random_scores
from loram.recipe import load_recipe
from tests.conftest import ROOT

RECIPE = ROOT / "recipes" / "llama-2-70b.yaml"
RANK = 8


def sparse_base(folder: Path, architecture: Architecture, hidden: int, vocabulary: int) -> None:
    """A checkpoint of zeros in one sparse file."""
    folder.mkdir()
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    for layer in range(architecture.layers):
        for p in architecture.projections:
            shapes[f"{architecture.module(layer, p)}.weight"] = (p.out_features, p.in_features)
    for name, (rows, columns) in shapes.items():
        end = offset + 2 * rows * columns
        header[name] = {"dtype": DTYPE_NAMES[torch.bfloat16], "shape": [rows, columns], "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    with (folder / SINGLE_NAME).open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + offset)


def adapter(folder: Path, plan: PruningPlan) -> int:
    """A random adapter of the pruned shapes; returns its bytes."""
    folder.mkdir()
    specs = []
    for layer in range(plan.architecture.layers):
        for p in plan.architecture.projections:
            out_features, in_features = p.shape(len(plan.layers[layer].kept(p.unit)))
            prefix = f"base_model.model.{plan.architecture.module(layer, p)}"
            specs.append(TensorSpec(f"{prefix}.lora_A.weight", torch.float32, (RANK, in_features)))
            specs.append(TensorSpec(f"{prefix}.lora_B.weight", torch.float32, (out_features, RANK)))
    with CheckpointWriter(folder, {WEIGHTS_NAME: specs}) as writer:
        for spec in specs:
            writer.write(spec.name, torch.randn(spec.shape))
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    plan.save(folder)
    return sum(spec.nbytes for spec in specs)


def main() -> None:
    recipe = load_recipe(RECIPE)
    config = AutoConfig.for_model(**recipe.model.config)
    architecture = discover(config)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        work = Path(name)
        sparse_base(work / "base", architecture, config.hidden_size, config.vocab_size)
        with CheckpointReader(work / "base") as reader:
            plan = make_plan(
                architecture,
                random_scores(architecture, 0),
                plan_geometry(architecture, 0.85, 4, 2),
                "base",
                reader.identity(),
            )
        size = adapter(work / "adapter", plan)
        command = [
            sys.executable, "-m", "loram_stages", "recover", str(RECIPE), f"model.path={work / 'base'}",
            "--from", str(work / "adapter"), "--artifacts", str(work / "artifacts"), "--json",
        ]  # fmt: skip
        began = time.perf_counter()
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        whole = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        result = json.loads(done.stdout)
        written = sum(p.stat().st_size for p in Path(result["folder"]).glob("*.safetensors"))
        began = time.perf_counter()
        shutil.copyfile(Path(result["folder"]) / WEIGHTS_NAME, work / "copy")
        copy = time.perf_counter() - began
        print(f"base {(work / 'base' / SINGLE_NAME).stat().st_size / 1e9:.0f} GB apparent; adapter {size / 1e6:.0f} MB")
        print(f"recovered {written / 1e6:.0f} MB: stage {result['seconds']:.1f} s, whole command {whole:.1f} s")
        print(f"copying the recovered file: {copy:.2f} s; peak memory of the command {peak:.2f} GiB")


if __name__ == "__main__":
    main()
