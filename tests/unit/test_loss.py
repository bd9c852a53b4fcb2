"""The chunked loss is cross-entropy over all labelled tokens, with its gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from loram.adapter.attach import attach
from loram.data.tokens import IGNORED
from loram.models.discover import discover
from loram.models.loading import Precision, load_model
from loram.models.pruned import load_config
from loram.recipe import TrainSection
from loram.training import loss
from loram.training.loss import summed_nll
from tests.conftest import TINY, make_model


def some_batch(rows: int = 3, length: int = 20) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 270, (rows, length), generator=generator)
    labels = torch.where(torch.rand(rows, length, generator=generator) < 0.4, ids, IGNORED)
    return {"input_ids": ids, "position_ids": torch.arange(length).expand(rows, length).contiguous(), "labels": labels}


def reference(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[:, :-1]
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
    )


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("rows", [1, 7, 10_000])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lora_lm_head": True, "lora_dropout": 0.0},
        {"lora_lm_head": True, "use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"quantize_embeddings": True, "lora_lm_head": True},
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_value_and_gradients_are_those_of_cross_entropy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], rows: int, tied: bool
) -> None:
    monkeypatch.setattr(loss, "logit_rows", lambda vocabulary: rows)
    base = make_model(tmp_path / "base", tie_word_embeddings=tied)
    section = TrainSection(**settings)
    model = load_model(base, Precision(torch.float32, "nf4", quantize_embeddings=section.quantize_embeddings))
    adapted: Any = attach(model, discover(load_config(base)), section)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    batch = some_batch()
    want = reference(adapted, batch)
    (want / 7).backward()
    expected = gradients(adapted)
    nll, count = summed_nll(adapted, batch)
    (nll / 7).backward()
    assert count == int((batch["labels"][:, 1:] != IGNORED).sum())
    torch.testing.assert_close(nll, want, rtol=1e-5, atol=1e-4)
    got = gradients(adapted)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(summed_nll(adapted, batch)[0], want, rtol=1e-5, atol=1e-4)
    assert "forward" not in vars(adapted.get_output_embeddings())


@pytest.mark.parametrize(
    "extra",
    [
        {"model_type": "gemma2", "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 32},
        {"model_type": "granite", "logits_scaling": 3.0},
        {"model_type": "cohere", "logit_scale": 0.5},
    ],
)
@pytest.mark.parametrize("train", ["all", "frozen head"])
def test_what_a_model_does_after_its_head_is_kept(extra: dict[str, Any], train: str) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TINY, **extra}))
    model.get_output_embeddings().weight.requires_grad_(train == "all")
    batch = some_batch()
    want = reference(model, batch)
    want.backward()
    expected = gradients(model)
    nll, _ = summed_nll(model, batch)
    nll.backward()
    torch.testing.assert_close(nll, want, rtol=1e-5, atol=1e-4)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_batch_without_labels_costs_nothing_and_breaks_nothing() -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY))
    batch = some_batch()
    batch["labels"].fill_(IGNORED)
    nll, count = summed_nll(model, batch)
    assert (float(nll), count) == (0.0, 0)
    nll.backward()


def test_logits_never_exist_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY))
    monkeypatch.setattr(loss, "logit_rows", lambda vocabulary: 4)
    seen: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda *a: None)
    head = model.get_output_embeddings()
    forward = head.forward

    def noted(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return forward(hidden)

    head.forward = noted
    summed_nll(model, some_batch())
    assert max(seen) == 4
    assert head.forward is noted
