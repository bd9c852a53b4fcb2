"""Faults that others met when recovering and merging: each must stay fixed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from loram.adapter.folder import CONFIG_NAME, WEIGHTS_NAME, Adapter
from loram.adapter.merge import merge
from loram.checkpoint import CheckpointReader
from loram.errors import InputError, WrongBaseError
from loram.models.loading import load_model
from tests.conftest import Result, make_model
from tests.numerics.test_pruned_forward import TOKENS, prune
from tests.numerics.test_recover_merge import merged, pipeline, recovered, trained_adapter


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_adapter_of_another_plan_is_refused(tmp_path: Path) -> None:
    folder, _ = pipeline(tmp_path, 3, {})
    other = prune(folder / "base", folder / "other", 8)
    with pytest.raises(WrongBaseError, match="the plan"):
        recovered(folder, other)


@pytest.mark.parametrize("difference", ["weights", "shapes"])
def test_another_base_is_refused(tmp_path: Path, difference: str) -> None:
    folder, plan = pipeline(tmp_path, 3, {})
    other = make_model(
        tmp_path / "other",
        seed=9 if difference == "weights" else 3,
        intermediate_size=48 if difference == "weights" else 40,
    )
    with (
        CheckpointReader(other) as reader,
        pytest.raises(WrongBaseError, match="other weights" if difference == "weights" else "other tensors"),
    ):
        plan.require_base(reader.identity(), "other")
    if difference == "shapes":
        with (
            CheckpointReader(other) as reader,
            Adapter(folder / "recovered") as adapter,
            pytest.raises(WrongBaseError, match="shape"),
        ):
            merge(reader, plan.architecture, adapter, folder / "merged")


def test_the_commands_refuse_another_base(loram: Callable[..., Result], recipe: Path, tmp_path: Path) -> None:
    root = tmp_path / "artifacts"
    command = (recipe, "--artifacts", root, "align.max_steps=0")
    for stage in ("prune", "train", "recover"):
        assert loram(stage, *command).code == 0
    before = sorted((root / "test").iterdir())
    adapter, recovered = (next((root / "test").glob(f"{stage}-*")) for stage in ("train", "recover"))
    other = make_model(tmp_path / "other", seed=77)
    for stage, source in (("recover", adapter), ("merge", recovered)):
        result = loram(stage, *command, f"model.path={other}", "--from", source)
        assert result.code == 1
        assert "not the base model of this plan" in result.err
        assert "model.path" in result.err
    assert sorted((root / "test").iterdir()) == before


def test_an_unrecovered_adapter_does_not_merge(tmp_path: Path) -> None:
    folder, plan = pipeline(tmp_path, 3, {})
    with (
        CheckpointReader(folder / "base") as reader,
        Adapter(folder / "adapter") as adapter,
        pytest.raises(WrongBaseError, match="loram recover"),
    ):
        merge(reader, plan.architecture, adapter, folder / "merged")


def test_lora_on_a_tied_head_leaves_the_embedding_alone(tmp_path: Path) -> None:
    folder, plan = pipeline(tmp_path, 1, {"tie_word_embeddings": True}, target_modules=["lm_head", "q_proj"])
    with CheckpointReader(folder / "base") as reader, Adapter(folder / "recovered") as adapter:
        notes = merge(reader, plan.architecture, adapter, folder / "merged").notes
    assert any("untied" in note for note in notes)
    base, result = load_file(folder / "base/model.safetensors"), load_file(folder / "merged/model.safetensors")
    assert torch.equal(result["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    assert not torch.equal(result["lm_head.weight"], result["model.embed_tokens.weight"])
    again = AutoModelForCausalLM.from_pretrained(folder / "merged")
    assert torch.equal(again.lm_head.weight, result["lm_head.weight"])
    assert again.config.tie_word_embeddings is False


@pytest.mark.parametrize("stored", ["copy", "differs"])
def test_a_tied_base_that_stores_its_head_merges_to_what_it_computes(tmp_path: Path, stored: str) -> None:
    base = make_model(tmp_path / "base", tie_word_embeddings=True)
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() + (stored == "differs")
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    plan = prune(base, tmp_path / "pruned", 2)
    trained_adapter(tmp_path / "pruned", tmp_path / "adapter", 2)
    recovered(tmp_path, plan)
    out = merged(tmp_path, plan)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is (stored == "copy")
    assert ("lm_head.weight" in load_file(out / "model.safetensors")) is (stored == "differs")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(out).lm_head.weight, tensors["lm_head.weight"])


def test_modules_to_save_arrive_bit_equal(tmp_path: Path) -> None:
    folder, plan = pipeline(tmp_path, 1, {}, modules_to_save=["embed_tokens", "lm_head"])
    result = load_file(merged(folder, plan) / "model.safetensors")
    with Adapter(folder / "recovered") as adapter:
        assert sorted(adapter.saved) == ["lm_head.weight", "model.embed_tokens.weight"]
        for name, key in adapter.saved.items():
            assert torch.equal(result[name], adapter.reader.read(key))


def test_small_deltas_are_not_lost_to_bfloat16_sums(tmp_path: Path) -> None:
    plan = prune(make_model(tmp_path / "base", dtype=torch.bfloat16), tmp_path / "pruned", 2)
    trained_adapter(tmp_path / "pruned", tmp_path / "adapter", 2)
    recovered(tmp_path, plan)
    result = load_file(merged(tmp_path, plan) / "model.safetensors")
    base = load_file(tmp_path / "base/model.safetensors")
    with Adapter(tmp_path / "recovered") as adapter:
        for module in adapter.modules:
            a, b = adapter.factors(module)
            exact = (base[f"{module}.weight"].float() + (b @ a) * adapter.scale(module)).to(torch.bfloat16)
            assert torch.equal(result[f"{module}.weight"], exact)


def test_the_merge_is_onto_the_original_not_the_4_bit_weights(tmp_path: Path) -> None:
    folder, plan = pipeline(tmp_path, 4, {})
    result, base = load_file(merged(folder, plan) / "model.safetensors"), load_file(folder / "base/model.safetensors")
    with Adapter(folder / "recovered") as adapter:
        for module in adapter.modules:
            a, b = adapter.factors(module)
            delta = (b.double() @ a.double()) * adapter.scale(module)
            torch.testing.assert_close(
                (result[f"{module}.weight"] - base[f"{module}.weight"]).double(), delta, rtol=1e-4, atol=1e-6
            )


def test_a_quantized_base_is_refused(tmp_path: Path) -> None:
    folder, plan = pipeline(tmp_path, 4, {})
    edit(folder / "base/config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    with (
        CheckpointReader(folder / "base") as reader,
        Adapter(folder / "recovered") as adapter,
        pytest.raises(InputError, match="quantized"),
    ):
        merge(reader, plan.architecture, adapter, folder / "merged")


def test_exactly_the_adapted_tensors_change(tmp_path: Path) -> None:
    folder, plan = pipeline(tmp_path, 4, {}, target_modules=["q_proj", "down_proj"])
    result, base = load_file(merged(folder, plan) / "model.safetensors"), load_file(folder / "base/model.safetensors")
    changed = {name for name in base if not torch.equal(base[name], result[name])}
    with Adapter(folder / "recovered") as adapter:
        assert changed == {f"{module}.weight" for module in adapter.modules}
        assert len(changed) == 4


def test_a_merge_that_changes_nothing_is_an_error(tmp_path: Path) -> None:
    plan = prune(make_model(tmp_path / "base", dtype=torch.bfloat16), tmp_path / "pruned", 2)
    trained_adapter(tmp_path / "pruned", tmp_path / "adapter", 2, lora_alpha=1e-12)
    recovered(tmp_path, plan)
    with pytest.raises(InputError, match="equals its base"):
        merged(tmp_path, plan)
    zero = {
        key: torch.zeros_like(t) if "lora_B" in key else t
        for key, t in load_file(tmp_path / "recovered" / WEIGHTS_NAME).items()
    }
    save_file(zero, tmp_path / "recovered" / WEIGHTS_NAME, {"format": "pt"})
    with pytest.raises(InputError, match="not trained"):
        merged(tmp_path, plan)


def test_every_shard_carries_its_format_and_keeps_its_name(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", shard="60KB", dtype=torch.bfloat16)
    plan = prune(base, tmp_path / "pruned", 2)
    trained_adapter(tmp_path / "pruned", tmp_path / "adapter", 2)
    recovered(tmp_path, plan)
    out = merged(tmp_path, plan)
    names = sorted(path.name for path in base.glob("*.safetensors"))
    assert len(names) > 2
    for folder in (tmp_path / "pruned", out):
        assert sorted(path.name for path in folder.glob("*.safetensors")) == names
    for path in [
        *out.glob("*.safetensors"),
        *(tmp_path / "pruned").glob("*.safetensors"),
        tmp_path / "recovered" / WEIGHTS_NAME,
    ]:
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    before, after = (json.loads((f / "model.safetensors.index.json").read_text()) for f in (base, out))
    assert before["weight_map"] == after["weight_map"]


def test_merged_config_has_the_base_dtype_and_no_quantization(tmp_path: Path) -> None:
    plan = prune(make_model(tmp_path / "base", dtype=torch.bfloat16), tmp_path / "pruned", 2)
    trained_adapter(tmp_path / "pruned", tmp_path / "adapter", 2)
    recovered(tmp_path, plan)
    out = merged(tmp_path, plan)
    assert json.loads((out / "config.json").read_text()) == json.loads((tmp_path / "base/config.json").read_text())
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert not (out / "plan.json").exists()


def test_tokenizer_template_and_generation_config_survive_byte_for_byte(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    edit(base / "generation_config.json", eos_token_id=[2, 5, 7], temperature=0.6, do_sample=True)
    (base / "LICENSE").write_text("terms")
    plan = prune(base, tmp_path / "pruned", 2)
    trained_adapter(tmp_path / "pruned", tmp_path / "adapter", 2)
    recovered(tmp_path, plan)
    out = merged(tmp_path, plan)
    names = {path.name for path in base.iterdir()} - {"config.json", "model.safetensors"}
    assert {"chat_template.jinja", "tokenizer.json", "generation_config.json", "LICENSE"} <= names
    for folder in (out, tmp_path / "pruned"):
        for name in names:
            assert (folder / name).read_bytes() == (base / name).read_bytes(), name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "lacks lora_magnitude_vector"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "IA3"}, "IA3"),
    ],
)
def test_adapters_that_cannot_be_handled_exactly_are_refused(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    folder, _ = pipeline(tmp_path, 3, {})
    edit(folder / "adapter" / CONFIG_NAME, **change)
    with pytest.raises(InputError, match=words):
        Adapter(folder / "adapter")


def test_half_an_adapter_is_refused(tmp_path: Path) -> None:
    folder, _ = pipeline(tmp_path, 3, {})
    tensors = load_file(folder / "adapter" / WEIGHTS_NAME)
    key = next(key for key in tensors if "lora_A" in key)
    save_file({k: t for k, t in tensors.items() if k != key}, folder / "adapter" / WEIGHTS_NAME, {"format": "pt"})
    with pytest.raises(InputError, match="lacks lora_A"):
        Adapter(folder / "adapter")


def test_an_adapter_that_was_not_applied_is_warned_about(tmp_path: Path) -> None:
    from loram_stages.evaluate import identical

    from loram.evaluate.perplexity import Perplexity

    base, other = {"s": Perplexity(10.0, 5)}, {"s": Perplexity(9.0, 5)}
    healthy = {"base": base, "pruned": base, "pruned + adapter": other, "base + recovered": other, "merged": other}
    assert identical(healthy) == []
    warnings = identical({**healthy, "base + recovered": base})
    assert len(warnings) == 1
    assert "'base + recovered' scores exactly like 'base'" in warnings[0]


def test_prune_recover_merge_and_plan_work_without_bitsandbytes(
    tmp_path: Path, recipe: Path, loram: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    command = (recipe, "--artifacts", tmp_path / "a", "align.max_steps=0")
    assert loram("prune", *command).code == 0
    assert loram("train", *command).code == 0
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for stage in ("plan", "recover", "merge"):
        result = loram(stage, *command)
        assert result.code == 0, result.err
    result = loram("train", *command, "train.seed=5")
    assert result.code == 1
    assert "pip install bitsandbytes" in result.err


def test_the_merged_model_loads_like_any_other(tmp_path: Path) -> None:
    folder, plan = pipeline(tmp_path, 6, {"model_type": "qwen3"})
    out = merged(folder, plan)
    plain = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        assert torch.equal(plain(TOKENS).logits, load_model(out, torch.float32)(TOKENS).logits)
