"""Recovery is an exact scatter; a merge is PEFT's merge; both ways of using the result agree."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from loram.adapter.attach import ratios
from loram.adapter.folder import Adapter, save_ratios
from loram.adapter.linear import fused
from loram.adapter.merge import merge
from loram.adapter.recover import recover
from loram.adapter.rows import Change
from loram.checkpoint import CheckpointReader, writer
from loram.models.loading import Precision, load_model
from loram.models.quantizers import weight_blocks
from loram.pruning.plan import PruningPlan
from tests.conftest import make_model
from tests.numerics.test_pruned_forward import TOKENS, prune

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def trained_adapter(model_folder: Path, out: Path, seed: int = 0, **options: Any) -> Path:
    """An adapter with random, non-zero A and B on a model folder, saved by PEFT."""
    trained(load_model(model_folder, torch.float32), out, seed, **options)
    return out


def trained(model: PreTrainedModel, out: Path, seed: int = 0, **options: Any) -> Any:
    """The same for a loaded model; returns it with the adapter on."""
    options = {"r": 4, "lora_alpha": 10, "target_modules": ALL, **options}
    adapted = get_peft_model(model, fused(LoraConfig(task_type="CAUSAL_LM", **options)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                noise = torch.randn(parameter.shape, generator=generator) * 0.1
                parameter.copy_(parameter * (1 + noise) if "magnitude" in name else noise)
    adapted.save_pretrained(out)
    if adapted.peft_config["default"].use_dora:
        save_ratios(ratios(adapted), out)
    return adapted


def pipeline(folder: Path, seed: int, config: dict[str, Any], **options: Any) -> tuple[Path, PruningPlan]:
    """base → pruned → adapter → recovered, in subfolders; returns the folder and the plan."""
    plan = prune(make_model(folder / "base", seed=seed, **config), folder / "pruned", seed)
    trained_adapter(folder / "pruned", folder / "adapter", seed, **options)
    recovered(folder, plan)
    return folder, plan


def recovered(folder: Path, plan: PruningPlan) -> Path:
    with Adapter(folder / "adapter") as adapter, CheckpointReader(folder / "base") as base:
        recover(adapter, plan, base, folder / "recovered")
    return folder / "recovered"


def product(b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """B·A in float64, summed in the order of the rank whatever the shapes (a BLAS may change its order with them)."""
    total = torch.zeros(b.shape[0], a.shape[1], dtype=torch.float64)
    for r in range(a.shape[0]):
        total += b[:, r : r + 1].double() * a[r].double()
    return total


def merged(folder: Path, plan: PruningPlan) -> Path:
    with CheckpointReader(folder / "base") as reader, Adapter(folder / "recovered") as adapter:
        merge(reader, plan.architecture, adapter, folder / "merged")
    return folder / "merged"


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 99),
    model_type=st.sampled_from(["llama", "qwen2", "qwen3"]),
    groups=st.integers(1, 3),
    neurons=st.integers(7, 40),
    rank=st.integers(1, 9),
    rslora=st.booleans(),
)
def test_recovered_delta_is_the_scattered_delta(
    seed: int, model_type: str, groups: int, neurons: int, rank: int, rslora: bool
) -> None:
    config = {
        "model_type": model_type, "num_key_value_heads": groups, "num_attention_heads": 2 * groups,
        "hidden_size": 24 * groups, "intermediate_size": neurons, "head_dim": 8,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder, plan = pipeline(Path(name), seed, config, r=rank, use_rslora=rslora)
        with Adapter(folder / "adapter") as small, Adapter(folder / "recovered") as full:
            assert small.modules == full.modules
            for module in small.modules:
                found = plan.architecture.locate(module)
                assert found is not None
                layer, projection = found
                (a_small, b_small), (a_full, b_full) = small.factors(module), full.factors(module)
                expected = torch.zeros(projection.out_features, projection.in_features, dtype=torch.float64)
                index = torch.tensor(plan.index(layer, projection))
                expected.index_copy_(projection.axis, index, product(b_small, a_small) * small.scale(module))
                # Bit-equal on what was kept, exactly zero elsewhere.
                assert torch.equal(product(b_full, a_full) * full.scale(module), expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 6}, "alpha_pattern": {"k_proj": 3}},
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": [*ALL, "lm_head"]},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": [*ALL, "embed_tokens"], "rank_pattern": {"embed_tokens": 3}},
        {"target_modules": [*ALL, "embed_tokens", "lm_head"], "use_rslora": True},
        {"use_dora": True},
        {"use_dora": True, "target_modules": [*ALL, "lm_head"]},
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_merge_equals_peft_merge_in_float32(tmp_path: Path, options: dict[str, Any], tied: bool) -> None:
    adapted = options.get("modules_to_save", []) + options.get("target_modules", [])
    adapts_head = bool({"lm_head", "embed_tokens"} & set(adapted))
    folder, plan = pipeline(tmp_path, 5, {"tie_word_embeddings": tied}, **options)
    ours = AutoModelForCausalLM.from_pretrained(merged(folder, plan))
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    if tied and adapts_head:  # PEFT would change the embedding too; on an untied copy it does what is meant
        base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.clone())
        base.config.tie_word_embeddings = False
        assert ours.config.tie_word_embeddings is False
    theirs = PeftModel.from_pretrained(base, folder / "recovered").merge_and_unload()
    expected = theirs.state_dict()
    got = ours.state_dict()
    assert got.keys() == expected.keys()
    for name in expected:
        if options.get("use_dora"):  # ours sums squares in float64, PEFT's in float32
            torch.testing.assert_close(got[name], expected[name], rtol=2e-6, atol=1e-7, msg=name)
        else:
            assert torch.equal(got[name], expected[name]), name


@pytest.mark.parametrize("quantizer", ["none", "nf4"])
def test_a_dora_scales_kept_rows_as_in_training_and_leaves_removed_ones(tmp_path: Path, quantizer: str) -> None:
    plan = prune(make_model(tmp_path / "base", seed=4), tmp_path / "pruned", 4)
    small = load_model(tmp_path / "pruned", Precision(torch.float32, quantizer))
    dense = {
        name.removeprefix("base_model.model."): next(weight_blocks(module.base_layer, torch.float32))[1].double()
        for name, module in trained(small, use_dora=True, target_modules=ALL, out=tmp_path / "adapter").named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "base_layer")
    }
    recovered(tmp_path, plan)
    with (
        Adapter(tmp_path / "adapter") as before,
        Adapter(tmp_path / "recovered") as after,
        CheckpointReader(tmp_path / "base") as base,
        CheckpointReader(merged(tmp_path, plan)) as result,
    ):
        for module in before.modules:
            found = plan.architecture.locate(module)
            assert found is not None
            layer, projection = found
            kept = torch.tensor(plan.index(layer, projection))
            a, b = (factor.double() for factor in before.factors(module))
            small_sum = dense[module] + before.scale(module) * b @ a
            ratio = before.magnitude(module).double() / small_sum.norm(dim=1)
            a, b = (factor.double() for factor in after.factors(module))
            weight = base.read(f"{module}.weight")
            whole_sum = weight.double() + after.scale(module) * b @ a
            factor = torch.ones(len(weight), dtype=torch.float64)
            factor[kept if projection.axis == 0 else slice(None)] = ratio
            got = result.read(f"{module}.weight")
            torch.testing.assert_close(got.double(), factor[:, None] * whole_sum, rtol=1e-5, atol=1e-6, msg=module)
            if projection.axis == 0:
                removed = sorted(set(range(len(weight))) - set(kept.tolist()))
                assert torch.equal(got[removed], weight[removed]), module


def test_adapter_on_base_and_merged_folder_give_the_same_logits(tmp_path: Path) -> None:
    folder, plan = pipeline(tmp_path, 2, {"num_hidden_layers": 3, "model_type": "qwen2"})
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)
    with torch.no_grad():
        plain = base(TOKENS).logits
        adapted = PeftModel.from_pretrained(base, folder / "recovered").double()(TOKENS).logits
        ours = AutoModelForCausalLM.from_pretrained(merged(folder, plan), dtype=torch.float64)(TOKENS).logits
    torch.testing.assert_close(ours, adapted, rtol=1e-5, atol=1e-6)  # the merged weights were rounded to float32
    assert float((plain - adapted).abs().max()) > 1e-2


def test_recovered_adapter_acts_on_kept_units_like_the_small_one(tmp_path: Path) -> None:
    """Base + recovered, with the removed units silenced, is the pruned model with its own adapter."""
    folder, plan = pipeline(tmp_path, 7, {})
    architecture = plan.architecture
    model = AutoModelForCausalLM.from_pretrained(merged(folder, plan), dtype=torch.float64)
    for layer in range(architecture.layers):
        for projection in (p for p in architecture.projections if p.axis == 1):
            removed = sorted(set(range(projection.in_features)) - set(plan.index(layer, projection)))
            model.get_submodule(architecture.module(layer, projection)).weight.data[:, removed] = 0
    small = PeftModel.from_pretrained(load_model(folder / "pruned", torch.float64), folder / "adapter").double()
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, small(TOKENS).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_is_made_in_float32_and_cast_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((300, 200), generator=generator).to(dtype)
    a, b = torch.randn((8, 200), generator=generator) * 1e-3, torch.randn((300, 8), generator=generator) * 1e-2
    expected = (weight.float() + (b @ a) * 2.0).to(dtype)
    assert torch.equal(Change(a, b, 2.0).merged(weight), expected)


def test_a_merge_in_small_blocks_and_on_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, plan = pipeline(tmp_path, 3, {})
    written: list[int] = []
    real = writer.write_at

    def counting(descriptor: int, data: memoryview, offset: int) -> None:
        written.append(len(data))
        real(descriptor, data, offset)

    def clone(source: Path, target: Any) -> bool:
        target.write(source.read_bytes())
        return True

    def merged(name: str) -> Path:
        written.clear()
        with CheckpointReader(folder / "base") as reader, Adapter(folder / "recovered") as adapter:
            digests = merge(reader, plan.architecture, adapter, folder / name).digests
        path = folder / name / "model.safetensors"
        assert digests[path.name] == hashlib.sha256(path.read_bytes()).hexdigest()
        return path

    monkeypatch.setattr("loram.checkpoint.writer.write_at", counting)
    whole = load_file(merged("whole"))
    monkeypatch.setattr("loram.checkpoint.reader.BLOCK_BYTES", 3_000)
    blocks = merged("blocks")
    assert sum(written) == blocks.stat().st_size
    for name, tensor in load_file(blocks).items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-6, atol=1e-7)
    monkeypatch.setattr("loram.checkpoint.writer.clone_file", clone)
    cloned = merged("cloned")
    assert load_file(cloned).keys() == whole.keys()
    assert all(torch.equal(tensor, load_file(blocks)[name]) for name, tensor in load_file(cloned).items())
    # A clone has the embedding, head, norms and untouched rows already.
    assert sum(written) < 0.9 * cloned.stat().st_size


def test_recovered_config_names_the_full_model_and_lists_are_sorted(tmp_path: Path) -> None:
    folder, plan = pipeline(tmp_path, 3, {})
    config = json.loads((folder / "recovered" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == plan.base_model
    assert config["target_modules"] == sorted(ALL)
