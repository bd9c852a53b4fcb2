"""Model and adapter folders of true sizes with made-up contents, for the benchmarks, and a timed child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig

from loram.adapter.folder import WEIGHTS_NAME
from loram.checkpoint import Block, CheckpointReader, CheckpointWriter, TensorSpec
from loram.models.discover import discover
from loram.models.source import byte_tokenizer
from loram.pruning.geometry import plan_geometry
from loram.pruning.plan import PruningPlan
from loram.pruning.scores import make_plan, random_scores

RANK = 8
_SHARD_BYTES = 5_000_000_000

LLAMA_2_70B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_2_7B = LLAMA_2_70B | {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32,
}  # fmt: skip
# As LLaMA-3.2-3B, for what needs the whole model in memory more than once.
LLAMA_3B = LLAMA_2_70B | {
    "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
}  # fmt: skip


def model(folder: Path, config: dict[str, Any], dense: bool) -> int:
    """A bfloat16 model folder in shards of 5 GB; returns its bytes. Not dense: sparse files, all zeros.

    Every tensor of a dense one is another stretch of the same random numbers.
    """
    architecture = discover(AutoConfig.for_model(**config))
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(architecture.layers):
        for p in architecture.projections:
            shapes[f"{architecture.module(layer, p)}.weight"] = (p.out_features, p.in_features)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{architecture.layers_prefix}.{layer}.{norm}.weight"] = (hidden,)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    specs = [TensorSpec(name, torch.bfloat16, shape) for name, shape in shapes.items()]
    noise = (torch.randn(32 << 20, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    with CheckpointWriter(folder, _sharded(specs)) as writer:
        for number, spec in enumerate(specs):
            writer.write(spec.name, _content(spec, noise, number) if dense else _hole(spec))
    AutoConfig.for_model(**config, dtype="bfloat16").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return sum(spec.nbytes for spec in specs)


def _sharded(specs: list[TensorSpec]) -> dict[str, list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    for spec in specs:
        if sum(s.nbytes for s in shards[-1]) + spec.nbytes > _SHARD_BYTES:
            shards.append([])
        shards[-1].append(spec)
    return {f"model-{i + 1:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards)}


def _content(spec: TensorSpec, noise: torch.Tensor, number: int) -> list[Block]:
    width = spec.shape[-1]
    rows = spec.shape[0] if len(spec.shape) == 2 else 1
    step = max(1, (len(noise) - 4096) // width)
    start = number * 7 % 4096
    blocks = []
    for row in range(0, rows, step):
        count = min(step, rows - row)
        data = noise[start : start + count * width]
        blocks.append(Block(data.view(count, width) if len(spec.shape) == 2 else data))
    return blocks


def _hole(spec: TensorSpec) -> list[Block]:
    return [Block(torch.zeros((), dtype=spec.dtype).expand(spec.shape), hole=True)]


def random_plan(base: Path, ratio: float) -> PruningPlan:
    """A plan of random units for a model folder."""
    architecture = discover(AutoConfig.from_pretrained(str(base)))
    with CheckpointReader(base) as reader:
        geometry = plan_geometry(architecture, ratio, 4, 2)
        return make_plan(architecture, random_scores(architecture, 0), geometry, str(base), reader.identity())


def adapter(folder: Path, plan: PruningPlan) -> int:
    """A random adapter of the pruned shapes, rank 8 on every projection; returns its bytes."""
    specs = []
    for layer in range(plan.architecture.layers):
        for p in plan.architecture.projections:
            out_features, in_features = p.shape(len(plan.layers[layer].kept(p.unit)))
            prefix = f"base_model.model.{plan.architecture.module(layer, p)}"
            specs.append(TensorSpec(f"{prefix}.lora_A.weight", torch.float32, (RANK, in_features)))
            specs.append(TensorSpec(f"{prefix}.lora_B.weight", torch.float32, (out_features, RANK)))
    with CheckpointWriter(folder, {WEIGHTS_NAME: specs}) as writer:
        for spec in specs:
            writer.write(spec.name, torch.randn(spec.shape) * 0.01)
    names = sorted(p.name.rpartition(".")[2] for p in plan.architecture.projections)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "task_type": "CAUSAL_LM", "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    plan.save(folder)
    return sum(spec.nbytes for spec in specs)


def recipe(path: Path, base: Path, **sections: Any) -> Path:
    """A recipe file for a model folder."""
    path.write_text(yaml.safe_dump({"name": "benchmark", "model": {"path": str(base)}, **sections}))
    return path


@dataclass(frozen=True)
class Child:
    """What a command took: wall seconds, processor seconds, peak resident bytes, and what it printed."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    output: str


def run(command: list[str]) -> Child:
    """Runs a command to its end and measures that one process; SystemExit when it fails."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return Child(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, output)


def loram(*arguments: object) -> tuple[Child, dict[str, Any]]:
    """A loram command with --json in a process of its own."""
    child = run([sys.executable, "-m", "loram_stages", *map(str, arguments), "--json", "--quiet"])
    return child, json.loads(child.output)


def drop_caches() -> str:
    """Empties the page cache where that is allowed; says which state it is in."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return "page cache as it was"
    return "page cache empty"


def weights(folder: Path) -> int:
    """Bytes of a folder's safetensors files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
