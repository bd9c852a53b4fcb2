"""8-bit products in training: near the full ones, on the linears that fit, and refused where the card cannot."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from loram.checkpoint import CheckpointReader
from loram.errors import MissingPackageError, RecipeError
from loram.training import float8
from loram.training.float8 import require_float8, use_float8
from loram.training.loss import summed_nll
from tests.conftest import TINY, Result


def model(**config: Any) -> Any:
    torch.manual_seed(0)
    pytest.importorskip("torchao")  # not in `make setup`: transformers imports it wherever it is, with warnings
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TINY, **config}))


def test_gradients_are_near_those_of_full_products() -> None:
    plain, eight = model(), model()
    names = [name for name, _ in eight.named_parameters()]
    assert use_float8(eight, "align.float8", emulate=True) == 14
    assert [name for name, _ in eight.named_parameters()] == names
    assert type(eight.lm_head) is nn.Linear
    ids = torch.randint(3, 272, (2, 64), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "position_ids": torch.arange(64).expand(2, 64), "labels": ids}
    losses = []
    for each in (plain, eight):
        each.gradient_checkpointing_enable({"use_reentrant": False})
        nll, _ = summed_nll(each.train(), batch)
        nll.backward()
        losses.append(float(nll))
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    for (name, whole), (_, rounded) in zip(plain.named_parameters(), eight.named_parameters(), strict=True):
        assert rounded.grad.dtype == torch.float32
        similar = torch.cosine_similarity(whole.grad.flatten(), rounded.grad.flatten(), dim=0)
        assert similar > 0.98, name


def test_only_linears_that_fit_are_replaced() -> None:
    odd = model(intermediate_size=44)
    assert use_float8(odd, "align.float8", emulate=True) == 8
    assert type(odd.model.layers[0].mlp.up_proj) is nn.Linear
    assert type(odd.model.layers[0].self_attn.q_proj) is not nn.Linear
    with pytest.raises(RecipeError, match=r"prune\.multiple_of=16"):
        use_float8(model(hidden_size=72), "align.float8", emulate=True)


def test_a_machine_without_such_units_is_told_so(
    loram: Callable[..., Result], recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loram("prune", recipe).code == 0
    result = loram("align", recipe, "align.float8=true")
    assert result.code == 2
    assert "Ada, Hopper or newer" in result.err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A10")
    with pytest.raises(RecipeError, match="A10 has no 8-bit"):
        require_float8("align.float8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(MissingPackageError, match=r"loram\[float8\]"):
        require_float8("align.float8")


def test_align_writes_what_it_always_writes(
    loram: Callable[..., Result], recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchao")
    monkeypatch.setattr("loram_stages.align.require_float8", lambda setting: None)
    monkeypatch.setattr("loram_stages.align.use_float8", partial(float8.use_float8, emulate=True))
    assert loram("prune", recipe, "prune.ratio=0").code == 0
    found = {}
    for eight in ("false", "true"):
        result = loram("align", recipe, "prune.ratio=0", f"align.float8={eight}", "--json")
        assert result.code == 0, result.err
        with CheckpointReader(Path(result.json["folder"])) as reader:
            found[eight] = {name: reader.read(name) for name in reader.tensors}
    assert found["true"].keys() == found["false"].keys()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert found["true"][name].dtype == found["false"][name].dtype
    assert not torch.equal(found["true"][name], found["false"][name])
    torch.testing.assert_close(found["true"][name], found["false"][name], rtol=0, atol=2e-2)
