"""A pruned model computes what the base computes with the removed units silenced, for any geometry."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from loram.checkpoint import CheckpointReader
from loram.models.architecture import Architecture
from loram.models.discover import discover
from loram.models.loading import load_model
from loram.models.pruned import load_config
from loram.pruning.plan import PruningPlan
from loram.pruning.slicing import write_pruned
from tests.conftest import make_model, random_plan

TOKENS = torch.arange(3, 33).view(2, 15)


def prune(base: Path, out: Path, seed: int | None) -> PruningPlan:
    architecture = discover(load_config(base))
    with CheckpointReader(base) as reader:
        plan = PruningPlan.identity(architecture, "base", reader.identity())
        plan = plan if seed is None else random_plan(plan, seed)
        write_pruned(reader, plan, out, iter)
    return plan


def masked_by_hand(base: Path, architecture: Architecture, plan: PruningPlan) -> torch.Tensor:
    """The base with the rows and columns of removed units set to zero in float64: no hooks, no slicing."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    for layer in range(architecture.layers):
        for projection in architecture.projections:
            if projection.axis == 1:
                removed = sorted(set(range(projection.in_features)) - set(plan.index(layer, projection)))
                model.get_submodule(architecture.module(layer, projection)).weight.data[:, removed] = 0
    with torch.no_grad():
        return model(TOKENS).logits


geometries = st.fixed_dictionaries(
    {
        "model_type": st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]),
        "groups": st.integers(1, 4),
        "heads_per_group": st.integers(1, 3),
        "head_dim": st.sampled_from([8, 16]),
        "intermediate_size": st.integers(5, 40),
        "num_hidden_layers": st.integers(1, 3),
        "tie_word_embeddings": st.booleans(),
        "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
    }
)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(geometry=geometries, seed=st.integers(0, 99))
def test_pruned_equals_masked_base(geometry: dict[str, Any], seed: int) -> None:
    config = copy.copy(geometry)
    config["num_key_value_heads"] = config.pop("groups")
    config["num_attention_heads"] = config["num_key_value_heads"] * config.pop("heads_per_group")
    # Not hidden / heads: a multiple of the heads, as transformers asks, but with heads of their own size.
    config["hidden_size"] = 20 * config["num_attention_heads"]
    if config["model_type"] != "llama":
        del config["mlp_bias"]
    if config["model_type"] in {"mistral", "qwen2"}:
        del config["attention_bias"]  # Qwen2 always has biases on q, k and v
    with tempfile.TemporaryDirectory() as folder:
        base = make_model(Path(folder) / "base", seed=seed, **config)
        plan = prune(base, Path(folder) / "pruned", seed)
        small = load_model(Path(folder) / "pruned", torch.float64)
        with torch.no_grad():
            got = small(TOKENS).logits
        torch.testing.assert_close(got, masked_by_hand(base, plan.architecture, plan), rtol=1e-9, atol=1e-9)


FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "granite", "phi3", "smollm3"]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_dtype_of_a_checkpoint_has_no_part_in_the_proof(tmp_path: Path, model_type: str) -> None:
    """Built in the config's 16 bits, Gemma's scale of the embedding was rounded in one skeleton, not in the other."""
    found = [
        discover(load_config(make_model(tmp_path / str(dtype), model_type=model_type, dtype=dtype)))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_architectures_beyond_the_first_four(tmp_path: Path, model_type: str) -> None:
    base = make_model(tmp_path / "base", model_type=model_type, hidden_size=128, num_hidden_layers=2)
    plan = prune(base, tmp_path / "pruned", seed=1)
    small = load_model(tmp_path / "pruned", torch.float64)
    with torch.no_grad():
        got = small(TOKENS).logits
    torch.testing.assert_close(got, masked_by_hand(base, plan.architecture, plan), rtol=1e-8, atol=1e-8)


def test_identity_plan_changes_no_bit(tmp_path: Path, tiny: Path) -> None:
    prune(tiny, tmp_path / "same", seed=None)
    with CheckpointReader(tiny) as before, CheckpointReader(tmp_path / "same") as after:
        assert before.tensors.keys() == after.tensors.keys()
        assert before.identity() == after.identity()
        for name in before.tensors:
            assert torch.equal(before.read(name), after.read(name))
    with torch.no_grad():
        one, other = load_model(tiny, torch.float32)(TOKENS), load_model(tmp_path / "same", torch.float32)(TOKENS)
    assert torch.equal(one.logits, other.logits)


def test_generation_uses_the_cache_of_narrow_layers(tmp_path: Path, tiny: Path) -> None:
    prune(tiny, tmp_path / "pruned", seed=3)
    model = load_model(tmp_path / "pruned", torch.float32)
    cached = model.generate(TOKENS, max_new_tokens=6, do_sample=False, use_cache=True)
    uncached = model.generate(TOKENS, max_new_tokens=6, do_sample=False, use_cache=False)
    assert torch.equal(cached, uncached)
