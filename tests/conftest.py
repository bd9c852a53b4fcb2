"""Small models and a command line for all tests: no network, no GPU, no files outside the repository."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TQDM_DISABLE"] = "1"

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from loram.models.source import byte_tokenizer
from loram.pruning.plan import LayerPlan, PruningPlan

ROOT = Path(__file__).resolve().parents[1]
ModelMaker = Callable[..., Path]

# Hidden 64 with 4 heads of 32: head_dim differs from hidden / heads.
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 272,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def make_model(
    folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, shard: str = "5GB", **config: Any
) -> Path:
    """A model folder with random weights (biases and norms too) and the byte tokenizer."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TINY, **config}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(1 + noise if "norm" in name else noise)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    byte_tokenizer().save_pretrained(folder)
    return folder


def random_plan(plan: PruningPlan, seed: int) -> PruningPlan:
    """A plan with another random, non-empty set of units in every layer."""
    generator = torch.Generator().manual_seed(seed)

    def some(total: int) -> tuple[int, ...]:
        count = int(torch.randint(1, total + 1, (1,), generator=generator))
        return tuple(sorted(torch.randperm(total, generator=generator)[:count].tolist()))

    layers = tuple(LayerPlan(some(plan.architecture.kv_groups), some(plan.architecture.neurons)) for _ in plan.layers)
    return PruningPlan(plan.architecture, layers, plan.base_model, plan.base)


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A tiny Llama folder."""
    return make_model(tmp_path / "base")


@dataclass
class Result:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def loram(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command line in this process, through the real entry point."""
    from loram_stages import cli

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["loram", *map(str, arguments)])
        capfd.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capfd.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def recipe(tmp_path: Path, tiny: Path) -> Path:
    """A recipe on the tiny model with rows of its own: every stage in a second or two."""
    rows = [{"prompt": f"Add {i} and {i}.", "completion": f"It is {2 * i}."} for i in range(24)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"Document {i}. " * 20}) + "\n" for i in range(8)))
    value = {
        "name": "test",
        "model": {"path": str(tiny)},
        "prune": {
            "ratio": 0.5,
            "criterion": "activation",
            "keep_first_layers": 0,
            "keep_last_layers": 1,
            "calibration": {"path": str(data)},
            "calibration_rows": 2,
            "calibration_length": 256,
        },
        "align": {
            "datasets": [{"path": str(text)}],
            "max_steps": 2,
            "per_device_train_batch_size": 1,
            "max_length": 128,
            "learning_rate": 0.001,
        },
        "train": {
            "datasets": [{"path": str(data)}],
            "max_steps": 3,
            "per_device_train_batch_size": 1,
            "max_length": 128,
            "learning_rate": 0.01,
        },
        "evaluate": {"datasets": {"sums": {"path": str(data), "limit": 4}}, "max_length": 256},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(value))
    return path
