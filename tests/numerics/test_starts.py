"""PiSSA and LoftQ: the start computes as the model did, and what is kept is exactly what training changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from loram.adapter.attach import attach
from loram.adapter.folder import Adapter
from loram.adapter.start import as_difference, start
from loram.checkpoint import CheckpointReader
from loram.models.discover import discover
from loram.models.loading import Precision, load_model
from loram.models.pruned import load_config
from loram.models.quantizers import weight_blocks
from loram.recipe import TrainSection
from tests.conftest import Result, make_model
from tests.numerics.test_pruned_forward import TOKENS


def started(base: Path, saved: Path, **settings: Any) -> Any:
    section = TrainSection(lora_r=4, lora_alpha=12, **settings)
    model = load_model(base, Precision(torch.float32, section.quantizer))
    adapted: Any = attach(model, discover(load_config(base)), section)
    start(adapted, section.init_lora_weights, base, saved)
    return adapted


def layers(adapted: Any) -> dict[str, Any]:
    root = adapted.get_base_model()
    return {
        name: module for name, module in root.named_modules() if hasattr(module, "lora_A") and "lm_head" not in name
    }


def dense(module: Any) -> torch.Tensor:
    return torch.cat([rows for _, rows in weight_blocks(module.base_layer, torch.float32)])


def change(module: Any) -> torch.Tensor:
    a, b = module.lora_A["default"].weight.double(), module.lora_B["default"].weight.double()
    return module.scaling["default"] * b @ a


def test_pissa_takes_the_leading_part_and_leaves_the_rest(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    exact = load_model(base, torch.float32)
    adapted = started(base, tmp_path / "start", init_lora_weights="pissa", quantizer="none")
    with torch.no_grad():
        torch.testing.assert_close(adapted(TOKENS).logits, exact(TOKENS).logits, rtol=1e-4, atol=1e-4)
    for name, module in layers(adapted).items():
        weight = exact.get_submodule(name).weight.detach().double()
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        leading = left[:, :4] * values[:4] @ right[:4]
        torch.testing.assert_close(change(module), leading, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(dense(module).double(), weight - leading, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantizer", ["nf4", "hqq2"])
@pytest.mark.parametrize("init", ["pissa", "loftq"])
def test_both_start_nearer_to_the_weight_than_quantization_alone(tmp_path: Path, init: str, quantizer: str) -> None:
    base = make_model(tmp_path / "base")
    exact = load_model(base, torch.float32)
    plain = load_model(base, Precision(torch.float32, quantizer))
    adapted = started(base, tmp_path / "start", init_lora_weights=init, quantizer=quantizer)
    for name, module in layers(adapted).items():
        weight = exact.get_submodule(name).weight.detach()
        lost = float(
            (torch.cat([w for _, w in weight_blocks(plain.get_submodule(name), torch.float32)]) - weight).norm()
        )
        assert float((dense(module) + change(module).float() - weight).norm()) < lost


@pytest.mark.parametrize(
    "settings", [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 6}, "alpha_pattern": {"up_proj": 3}}]
)
@pytest.mark.parametrize("init", ["pissa", "loftq"])
def test_what_is_kept_is_what_training_changed(tmp_path: Path, init: str, settings: dict[str, Any]) -> None:
    base = make_model(tmp_path / "base")
    adapted = started(base, tmp_path / "start", init_lora_weights=init, lora_lm_head=True, **settings)
    first = {name: change(module) for name, module in layers(adapted).items()}
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter += 0.01 * torch.randn_like(parameter)
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    as_difference(tmp_path / "adapter", tmp_path / "start")
    with Adapter(tmp_path / "adapter") as adapter:
        adapter.require_trained()
        for name, module in layers(adapted).items():
            a, b = (factor.double() for factor in adapter.factors(name))
            assert a.shape[0] == 2 * module.r["default"]
            torch.testing.assert_close(
                adapter.scale(name) * b @ a, change(module) - first[name], rtol=1e-5, atol=1e-6, msg=name
            )
        head = adapted.get_base_model().lm_head
        a, b = (factor.double() for factor in adapter.factors("lm_head"))
        torch.testing.assert_close(adapter.scale("lm_head") * b @ a, change(head), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("init", ["pissa", "loftq"])
def test_a_resumed_start_is_the_same_base_to_the_bit(tmp_path: Path, init: str) -> None:
    base = make_model(tmp_path / "base")
    one = started(base, tmp_path / "start", init_lora_weights=init)
    other = started(base, tmp_path / "start", init_lora_weights=init)
    for name, module in layers(one).items():
        twin = layers(other)[name]
        assert torch.equal(dense(module), dense(twin))
        assert torch.equal(change(module), change(twin))


def test_a_start_that_was_killed_in_the_middle_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_model(tmp_path / "base")

    def killed(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("loram.adapter.start.save_file", killed)
        with pytest.raises(KeyboardInterrupt):
            started(base, tmp_path / "start", init_lora_weights="pissa")
    whole = started(base, tmp_path / "start", init_lora_weights="pissa")
    assert (tmp_path / "start").is_file()
    assert all(float(change(module).norm()) > 0 for module in layers(whole).values())


def test_the_start_depends_on_the_seed_alone(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    found = []
    for seed in (1, 1, 2):
        torch.seed()  # as a new process does
        adapted = started(base, tmp_path / "start", seed=seed)
        found.append([module.lora_A["default"].weight for module in layers(adapted).values()])
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert not torch.equal(found[0][0], found[2][0])


def test_large_matrices_are_split_almost_as_well_as_by_a_whole_svd() -> None:
    from loram.adapter.start import _leading

    torch.manual_seed(0)
    matrix = torch.randn(700, 600) * torch.logspace(0, -2, 600)
    a, b = _leading(matrix, 8, 2.0)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    best = left[:, :8] * values[:8] @ right[:8]
    assert float((2.0 * b @ a - matrix).norm()) <= 1.001 * float((best - matrix).norm())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"init_lora_weights": "loftq", "quantizer": "none"}, "needs a quantizer"),
        ({"init_lora_weights": "pissa", "use_dora": True}, "use one of the two"),
        ({"lora_embedding": True, "use_dora": True}, "DoRA cannot be put on the embedding"),
        ({"modules_to_save": ["lm_head"], "lora_lm_head": True}, "choose one"),
        ({"modules_to_save": ["embedding"], "quantize_embeddings": True}, "cannot train whole"),
        ({"quantize_embeddings": True, "quantizer": "int8"}, "nf4 or fp4"),
    ],
)
def test_what_makes_no_sense_together_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TrainSection(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        ["train.init_lora_weights=pissa"],
        ["train.init_lora_weights=loftq", "train.quantizer=hqq3"],
        ["train.init_lora_weights=gaussian", "train.rank_pattern={q_proj: 2, down_proj: 6}", "train.use_rslora=true"],
        ["train.lora_embedding=true", "train.lora_lm_head=true"],
        ["train.modules_to_save=[embedding, lm_head]"],
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_every_method_goes_all_the_way(
    loram: Callable[..., Result], recipe: Path, tmp_path: Path, settings: list[str], tied: bool
) -> None:
    base = make_model(tmp_path / "model", tie_word_embeddings=tied)
    command = ("run", recipe, f"model.path={base}", "train.learning_rate=0.01", "align.max_steps=0", *settings)
    run = loram(*command, "--json", "--artifacts", tmp_path / "a")
    assert run.code == 0, run.err
    made = {entry["stage"]: entry for entry in run.json}
    losses = {name: of["sums"]["loss"] for name, of in made["evaluate"]["metrics"]["variants"].items()}
    assert losses["base + recovered"] < losses["base"]
    assert losses["merged"] == pytest.approx(losses["base + recovered"], rel=1e-5)
    with CheckpointReader(Path(made["merge"]["folder"])) as merged:
        assert ("lm_head.weight" in merged) is (not tied or any("embedding" in s or "lm_head" in s for s in settings))
