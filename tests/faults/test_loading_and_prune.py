"""Faults that others met with checkpoints and pruned models: each must stay fixed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from loram.checkpoint import CheckpointReader
from loram.errors import CheckpointError, InputError, UnsupportedModelError
from loram.models.architecture import Cut
from loram.models.discover import discover
from loram.models.loading import load_model
from loram.models.pruned import load_config
from loram.pruning.plan import LayerPlan, PruningPlan
from loram.pruning.slicing import write_pruned
from tests.conftest import make_model
from tests.numerics.test_pruned_forward import TOKENS, prune

INDEX = "model.safetensors.index.json"


def test_a_missing_shard_is_named_before_any_work(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", shard="60KB")
    victim = sorted(base.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=victim.name):
        CheckpointReader(base)


def test_a_tensor_the_index_lists_but_no_shard_holds_is_named(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", shard="60KB")
    index = json.loads((base / INDEX).read_text())
    shard = next(iter(index["weight_map"].values()))
    index["weight_map"]["model.ghost.weight"] = shard
    (base / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.ghost\.weight"):
        CheckpointReader(base)


@pytest.mark.parametrize("damage", ["truncate", "header", "empty", "length", "shape"])
def test_a_corrupt_shard_is_refused(tiny: Path, damage: str) -> None:
    path = tiny / "model.safetensors"
    data = path.read_bytes()
    broken = {
        "truncate": data[:-100],
        "header": data[:8] + b"x" * 50 + data[58:],
        "empty": b"",
        "length": b"\xff" * 8 + data[8:],
        "shape": data.replace(b'"shape":[272,64]', b'"shape":[272,65]', 1),
    }[damage]
    assert broken != data
    path.write_bytes(broken)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        CheckpointReader(tiny)


def test_a_tensor_missing_from_a_single_file_is_named(tmp_path: Path, tiny: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tiny / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        prune(tiny, tmp_path / "pruned", 0)


@pytest.mark.parametrize("stored", ["absent", "copy", "differs"])
def test_tied_flag_and_tensors_agree_in_what_is_written(tmp_path: Path, stored: str) -> None:
    base = make_model(tmp_path / "base", tie_word_embeddings=True)
    tensors = load_file(base / "model.safetensors")
    assert "lm_head.weight" not in tensors
    if stored != "absent":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() + (stored == "differs")
        save_file(tensors, base / "model.safetensors", {"format": "pt"})
    prune(base, tmp_path / "pruned", seed=1)
    config = json.loads((tmp_path / "pruned" / "config.json").read_text())
    written = load_file(tmp_path / "pruned" / "model.safetensors")
    assert config["tie_word_embeddings"] is (stored != "differs")
    assert ("lm_head.weight" in written) is (stored == "differs")
    load_model(tmp_path / "pruned", torch.float32)


def test_head_dim_of_its_own_gives_right_shapes(tmp_path: Path, tiny: Path) -> None:
    architecture = discover(load_config(tiny))
    sizes = {p.name: (p.out_features, p.in_features) for p in architecture.projections}
    assert sizes["self_attn.q_proj"] == (128, 64)
    assert sizes["self_attn.o_proj"] == (64, 128)
    prune(tiny, tmp_path / "pruned", seed=0)
    load_model(tmp_path / "pruned", torch.float32)


def test_llama3_rope_survives_the_cut(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_theta": 500000.0,
    }  # fmt: skip
    base = make_model(tmp_path / "base", rope_parameters=rope)
    prune(base, tmp_path / "pruned", seed=0)
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("base", "pruned"))
    assert after["rope_parameters"] == before["rope_parameters"]
    assert after["rope_parameters"]["factor"] == 8.0


def test_each_kept_kv_head_keeps_its_query_heads_in_order(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", num_attention_heads=6, num_key_value_heads=2, hidden_size=48, head_dim=4)
    architecture = discover(load_config(base))
    queries = next(p for p in architecture.projections if p.name.endswith("q_proj"))
    assert queries.index((1,)) == list(range(12, 24))  # heads 3, 4, 5 of 4 rows each
    assert queries.index((0,)) == list(range(12))
    with CheckpointReader(base) as reader:
        layer = LayerPlan((1,), tuple(range(48)))
        write_pruned(reader, PruningPlan(architecture, (layer,) * 2, "b", reader.identity()), tmp_path / "p", iter)
        whole = reader.read("model.layers.0.self_attn.q_proj.weight")
    assert torch.equal(
        load_file(tmp_path / "p" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"], whole[12:24]
    )


def test_one_kv_head_leaves_attention_whole(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", num_key_value_heads=1)
    plan = prune(base, tmp_path / "pruned", seed=4)
    assert all(layer.kept_kv_groups == (0,) for layer in plan.layers)
    assert any(len(layer.kept_neurons) < 48 for layer in plan.layers)


def test_a_pruned_model_loads_bit_equal_in_a_fresh_process(tmp_path: Path, tiny: Path) -> None:
    prune(tiny, tmp_path / "pruned", seed=2)
    code = (
        "import sys, torch; from pathlib import Path; from loram.models.loading import load_model\n"
        "torch.set_num_threads(2); model = load_model(Path(sys.argv[1]), torch.float32)\n"
        "torch.save(model(torch.arange(3, 33).view(2, 15)).logits.detach(), sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "pruned", tmp_path / "logits"], check=True, timeout=120)
    with torch.no_grad():
        here = load_model(tmp_path / "pruned", torch.float32)(TOKENS).logits
    assert torch.equal(torch.load(tmp_path / "logits", weights_only=True), here)


def test_a_pruned_model_survives_save_pretrained(tmp_path: Path, tiny: Path) -> None:
    prune(tiny, tmp_path / "pruned", seed=2)
    model = load_model(tmp_path / "pruned", torch.float32)
    model.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "again", torch.float32)(TOKENS).logits, model(TOKENS).logits)


def test_loading_a_pruned_folder_as_an_ordinary_model_fails_loudly(tmp_path: Path, tiny: Path) -> None:
    prune(tiny, tmp_path / "pruned", seed=2)
    with pytest.raises(RuntimeError):
        AutoModelForCausalLM.from_pretrained(tmp_path / "pruned")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mixtral"}, "mixture of experts"),
        ({"model_type": "gpt2"}, "dense decoder"),
        ({"model_type": "olmo2"}, "attention group"),
        ({"model_type": "helium", "num_hidden_layers": 2}, "cannot be traced"),
        ({"model_type": "llama", "pad_token_id": 40_000}, "llama"),
    ],
)
def test_unsupported_architectures_are_refused_with_the_reason(config: dict[str, str], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        discover(AutoConfig.for_model(**config))


def test_a_wrong_table_does_not_pass_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof looks at results: interleaved query heads (right sizes, wrong rows) are caught, not believed."""
    import loram.models.discover as module

    honest = module._slabs

    def interleaved(config: Any, unit: Any, size: int) -> tuple[Cut, ...] | None:
        cuts = honest(config, unit, size)
        if unit == "kv_group" and cuts and cuts[0].extent == 2 * module.head_dim(config):
            half = cuts[0].extent // 2
            return (Cut(unit, 0, half), Cut(unit, size // 2, half))
        return cuts

    monkeypatch.setattr(module, "_slabs", interleaved)
    with pytest.raises(UnsupportedModelError, match="attention group"):
        discover(AutoConfig.for_model("llama", num_attention_heads=8, num_key_value_heads=4, hidden_size=64))


def test_damaged_plans_are_refused(tmp_path: Path, tiny: Path) -> None:
    prune(tiny, tmp_path / "pruned", seed=1)
    good = json.loads((tmp_path / "pruned" / "plan.json").read_text())
    for damage in ({"kept_neurons": [3, 1]}, {"kept_neurons": [1, 1]}, {"kept_kv_groups": [9]}, {"kept_neurons": []}):
        bad = {**good, "layers": [{**good["layers"][0], **damage}, *good["layers"][1:]]}
        (tmp_path / "pruned" / "plan.json").write_text(json.dumps(bad))
        with pytest.raises(InputError, match="layer 0"):
            PruningPlan.load(tmp_path / "pruned")
    for text in ("{", "[]", json.dumps({**good, "format": 99}), json.dumps({"format": 1})):
        (tmp_path / "pruned" / "plan.json").write_text(text)
        with pytest.raises(InputError):
            PruningPlan.load(tmp_path / "pruned")
