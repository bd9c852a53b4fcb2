"""LoRA steps with one layer in memory against the ordinary ones, step by step, on PEFT's own layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from loram.adapter.apply import save_applied
from loram.adapter.attach import attach
from loram.adapter.folder import WEIGHTS_NAME, Adapter
from loram.adapter.fresh import write_fresh
from loram.checkpoint import CheckpointReader
from loram.data.encode import encode_text
from loram.errors import Interrupted
from loram.evaluate.perplexity import Perplexity, perplexity
from loram.models import layerwise
from loram.models.discover import discover
from loram.models.layerwise import LayerwiseModel
from loram.models.loading import Precision, load_model
from loram.models.pruned import load_config
from loram.models.source import byte_tokenizer
from loram.recipe import PolishSection
from loram.training import loop
from loram.training.layerwise import LayerwiseAdapter, LayerwiseTrainer, layerwise_perplexity
from tests.conftest import make_model
from tests.faults.test_resume import events, send_after
from tests.faults.test_training import history, rows, same, section
from tests.numerics.test_layerwise import FAMILIES
from tests.numerics.test_recover_merge import trained_adapter

HELD_OUT = [encode_text(f"held out {i}", byte_tokenizer()) for i in range(3)]
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora, patterns": {"use_rslora": True, "rank_pattern": {"down_proj": 2}, "alpha_pattern": {"q_proj": 3}},
    "vocabulary": {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
    "saved": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
}


def settings(**changes: Any) -> PolishSection:
    return PolishSection.model_validate(
        {
            "max_steps": 5,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 0.01,
            "max_length": 64,
            "max_grad_norm": 0.5,
            **changes,
        }
    )


def polish(
    base: Path, adapter: Path, scratch: Path, chosen: PolishSection, precision: Precision | None = None,
    memory: int = 10**9, keep: int = 0, **options: Any,
) -> tuple[dict[str, torch.Tensor], LayerwiseModel]:  # fmt: skip
    """Trains layer by layer; returns the adapter as it is saved."""
    scratch.mkdir(exist_ok=True)
    precision = precision or Precision(torch.float32)
    with LayerwiseModel(
        base, precision, memory, scratch / "hidden", adapter, trains=lambda name: ".default" in name, keep=keep
    ) as engine:
        loop.train(
            LayerwiseAdapter(engine), rows(), chosen, scratch, torch.float32, trainer_class=LayerwiseTrainer, **options
        )
        (scratch / "out").mkdir(exist_ok=True)
        save_applied(engine.model, adapter, scratch / "out")
    return load_file(scratch / "out" / WEIGHTS_NAME), engine


def ordinary(
    base: Path, adapter: Path, scratch: Path, chosen: PolishSection, precision: Precision | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    scratch.mkdir(exist_ok=True)
    model = PeftModel.from_pretrained(
        load_model(base, precision or Precision(torch.float32)), str(adapter), is_trainable=True
    )
    loop.train(model.train(), rows(), chosen, scratch, torch.float32, **options)
    model.save_pretrained(scratch / "out")
    return {
        name: tensor for name, tensor in load_file(scratch / "out" / WEIGHTS_NAME).items() if ".base_layer" not in name
    }


def require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], one: Path, other: Path) -> None:
    for mine, theirs in zip(history(one), history(other), strict=True):
        for name in ("loss", "grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=2e-4), f"step {mine['step']}: {name}"
        for name in ("tokens", "padding_tokens", "loss_tokens", "rows", "learning_rate"):
            assert mine[name] == theirs[name]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize("options", ADAPTERS.values(), ids=list(ADAPTERS))
def test_steps_equal_those_of_the_whole_model(tmp_path: Path, options: dict[str, Any]) -> None:
    base = make_model(tmp_path / "base", num_hidden_layers=3, tie_word_embeddings=False)
    adapter = trained_adapter(base, tmp_path / "adapter", **options)
    found, _ = polish(base, adapter, tmp_path / "layerwise", settings())
    expected = ordinary(base, adapter, tmp_path / "whole", settings())
    require_equal(found, expected, tmp_path / "layerwise", tmp_path / "whole")
    assert not same(found, load_file(adapter / WEIGHTS_NAME))


@pytest.mark.parametrize("family", ["llama tied", "gemma3", "phi3", "granite"])
def test_steps_of_other_families(tmp_path: Path, family: str) -> None:
    base = make_model(tmp_path / "base", **FAMILIES[family])
    adapter = trained_adapter(base, tmp_path / "adapter", target_modules="all-linear")
    found, _ = polish(base, adapter, tmp_path / "layerwise", settings(max_steps=3))
    expected = ordinary(base, adapter, tmp_path / "whole", settings(max_steps=3))
    require_equal(found, expected, tmp_path / "layerwise", tmp_path / "whole")


def test_steps_on_packed_weights(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    adapter = trained_adapter(base, tmp_path / "adapter")
    precision = Precision(torch.float32, "nf4")
    found, _ = polish(base, adapter, tmp_path / "layerwise", settings(), precision, keep=10**9)
    expected = ordinary(base, adapter, tmp_path / "whole", settings(), precision)
    require_equal(found, expected, tmp_path / "layerwise", tmp_path / "whole")


def test_memory_changes_nothing(tmp_path: Path) -> None:
    """Hidden states on disk, weights read every time, some layers kept or all: the same bits."""
    base = make_model(tmp_path / "base", num_hidden_layers=4)
    adapter = trained_adapter(base, tmp_path / "adapter")
    reads: dict[str, int] = {}
    results = {}
    for name, memory, keep in (("scarce", 200_000, 0), ("some", 10**9, 250_000), ("all", 10**9, 10**9)):
        results[name], engine = polish(base, adapter, tmp_path / name, settings(max_steps=3), memory=memory, keep=keep)
        assert (engine.spilled > 0) == (name == "scarce")
        reads[name] = engine.bytes_read
    assert same(results["scarce"], results["all"])
    assert same(results["some"], results["all"])
    assert reads["all"] < reads["some"] < reads["scarce"]


def test_an_interrupted_run_equals_the_whole_one(tmp_path: Path) -> None:
    """With dropout, accumulation and evaluations, in a later epoch (three steps each)."""
    base = make_model(tmp_path / "base")
    adapter = trained_adapter(base, tmp_path / "adapter", lora_dropout=0.2)
    chosen = settings(max_steps=7, eval_steps=3)
    measured = {"held": lambda model: layerwise_perplexity(model, HELD_OUT, 64, 0)}
    whole, _ = polish(base, adapter, tmp_path / "whole", chosen, evaluations=measured)
    with pytest.MonkeyPatch.context() as patch:
        send_after(patch, 4)
        with pytest.raises(Interrupted, match="step 5 of 7"):
            polish(base, adapter, tmp_path / "halves", chosen, evaluations=measured)
    halves, _ = polish(base, adapter, tmp_path / "halves", chosen, evaluations=measured)
    assert same(halves, whole)
    assert events(tmp_path / "halves") == events(tmp_path / "whole")


def test_the_best_state_is_the_result(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    adapter = trained_adapter(base, tmp_path / "adapter")
    seen: list[float] = []

    def rising(model: torch.nn.Module) -> Perplexity:
        seen.append(0.0)
        return Perplexity(float(len(seen)), 1)

    chosen = settings(
        max_steps=4,
        eval_steps=2,
        load_best_model_at_end=True,
        eval_datasets={"held": "unused"},
        lr_scheduler_type="constant",
    )
    best, _ = polish(base, adapter, tmp_path / "four", chosen, evaluations={"held": rising})
    two, _ = polish(base, adapter, tmp_path / "two", settings(max_steps=2, lr_scheduler_type="constant"))
    assert same(best, two)


def test_evaluation_is_that_of_the_whole_model(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    adapter = trained_adapter(base, tmp_path / "adapter", lora_dropout=0.5)
    with LayerwiseModel(
        base, Precision(torch.float32), 10**9, tmp_path / "hidden", adapter, lambda name: ".default" in name
    ) as engine:
        training = LayerwiseAdapter(engine).train()
        found = layerwise_perplexity(training, HELD_OUT, 64, 0)
        assert training.training
        assert engine.model.training
    reference = PeftModel.from_pretrained(load_model(base, torch.float32), str(adapter))
    assert found.loss == pytest.approx(perplexity(reference, HELD_OUT, 64, 0).loss, rel=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"use_dora": True}, {"init_lora_weights": "gaussian", "use_rslora": True}], ids=str
)
def test_a_fresh_adapter_is_what_attach_makes(tmp_path: Path, options: dict[str, Any]) -> None:
    base = make_model(tmp_path / "base")
    chosen = section(rank_pattern={"layers.0.mlp.down_proj": 3}, lora_r=5, seed=4, **options)
    architecture = discover(load_config(base))
    with CheckpointReader(base) as reader:
        write_fresh(reader, architecture, chosen, tmp_path / "fresh")
    model = attach(load_model(base, torch.float32), architecture, chosen)
    model.save_pretrained(tmp_path / "attached")
    fresh, attached = (load_file(tmp_path / name / WEIGHTS_NAME) for name in ("fresh", "attached"))
    assert fresh.keys() == attached.keys()
    with Adapter(tmp_path / "fresh") as one, Adapter(tmp_path / "attached") as other:
        assert {m: one.scale(m) for m in one.modules} == {m: other.scale(m) for m in other.modules}
    for name, tensor in attached.items():
        assert fresh[name].shape == tensor.shape
        if "lora_A" in name:
            assert float(fresh[name].std()) == pytest.approx(float(tensor.std()), rel=0.3)
        else:
            torch.testing.assert_close(fresh[name], tensor)
    loaded = PeftModel.from_pretrained(load_model(base, torch.float32), str(tmp_path / "fresh"))
    plain = load_model(base, torch.float32)
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(loaded(ids).logits, plain(ids).logits)


def test_any_seed_will_do(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    adapter = trained_adapter(base, tmp_path / "adapter")
    for seed in (20_260_101, 2**32 - 1):
        polish(base, adapter, tmp_path / str(seed), settings(seed=seed, max_steps=1))


def test_out_of_memory_halves_the_rows_that_were_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of the step's last micro-batch, which has fewer: steps of 6 rows, 5 at a time."""
    computed = layerwise.summed_nll
    tried: list[int] = []

    def limited(forward: Any, batch: Any, model: Any) -> Any:
        tried.append(len(batch["labels"]))
        if tried[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return computed(forward, batch, model)

    monkeypatch.setattr(layerwise, "summed_nll", limited)
    base = make_model(tmp_path / "base")
    adapter = trained_adapter(base, tmp_path / "adapter")
    changes = {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 2, "max_steps": 2}
    assert len(rows()) == 6
    polish(base, adapter, tmp_path / "run", settings(**changes, auto_find_batch_size=True))
    assert tried == [5, 2, 2, 2, 2, 2, 2]
