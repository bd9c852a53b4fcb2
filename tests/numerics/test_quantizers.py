"""Every quantizer behind the one interface: what it keeps, what it weighs, and a model trained with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from bitsandbytes import functional as bnb
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from loram.errors import CheckpointError, MissingPackageError
from loram.memory.formats import FORMATS
from loram.memory.setup import Quantization
from loram.memory.tracker import tensor_bytes
from loram.models.loading import Precision, load_model
from loram.models.quantizers import PackedLinear, frozen_linear, get_quantizer, weight_blocks
from loram.recipe import Quantizer
from tests.conftest import Result, make_model
from tests.numerics.test_pruned_forward import TOKENS

# Relative error of normal weights: what the bits allow, with room.
ERRORS = {"nf4": 0.11, "fp4": 0.15, "int8": 0.01, "hqq4": 0.1, "hqq3": 0.2, "hqq2": 0.45}


def packed(
    name: str, rows: int, columns: int, double_quant: bool = True, dtype: torch.dtype = torch.float32
) -> PackedLinear:
    torch.manual_seed(rows * columns)
    own = nn.Linear(columns, rows, dtype=dtype)
    linear = PackedLinear(own, get_quantizer(name, double_quant))
    linear.fill(own.weight)
    return linear


def dense(linear: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.cat([rows.clone() for _, rows in weight_blocks(linear, dtype)])


def test_every_name_of_the_recipe_is_a_format() -> None:
    assert {*FORMATS, "none"} == set(get_args(Quantizer)) == set(get_args(Quantization))
    assert ERRORS.keys() == FORMATS.keys()


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)), rows=st.integers(1, 70), columns=st.integers(1, 130),
    double_quant=st.booleans(),
)  # fmt: skip
def test_bytes_are_those_of_the_plan_and_weights_come_back(
    name: str, rows: int, columns: int, double_quant: bool
) -> None:
    linear = packed(name, rows, columns, double_quant)
    tensors = [linear.weight, *linear.buffers()]
    assert tensor_bytes(tensors) == FORMATS[name].nbytes(rows, columns, double_quant)
    back = dense(linear)
    assert back.shape == (rows, columns)
    torch.manual_seed(rows * columns)
    weight = nn.Linear(columns, rows).weight.detach()
    few = 2 if weight.numel() < 256 else 1  # a block's worst case averages out over several
    assert float((back - weight).norm()) <= few * ERRORS[name] * float(weight.norm())


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_zero_rows_and_zero_weights_stay_finite(name: str) -> None:
    own = nn.Linear(64, 8, bias=False)
    with torch.no_grad():
        own.weight[3] = 0
    for weight in (own.weight, torch.zeros(8, 64)):
        linear = PackedLinear(own, get_quantizer(name))
        linear.fill(weight)
        back = dense(linear)
        assert bool(torch.isfinite(back).all())
        assert float(back[3].abs().max()) <= 1e-3


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double_quant", [False, True])
def test_4_bits_are_bitsandbytes_own(quant_type: str, double_quant: bool) -> None:
    linear = packed(quant_type, 24, 128, double_quant)
    torch.manual_seed(24 * 128)
    weight = nn.Linear(128, 24).weight.detach()
    data, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=double_quant, quant_type=quant_type)
    assert torch.equal(dense(linear), bnb.dequantize_4bit(data, state))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_forward_and_gradient_are_those_of_the_unpacked_weight(name: str) -> None:
    linear = packed(name, 24, 40)
    x = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y = frozen_linear(x, linear)
    y.square().sum().backward()
    reference = x.detach().clone().requires_grad_()
    want = nn.functional.linear(reference, dense(linear), linear.bias)
    want.square().sum().backward()
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, reference.grad, rtol=1e-5, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x).dtype == torch.bfloat16


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_quantized_model_goes_all_the_way(
    loram: Callable[..., Result], recipe: Path, tmp_path: Path, name: str
) -> None:
    """Train, evaluate, save, reload, recover and merge with each quantizer."""
    settings = (f"train.quantizer={name}", "train.learning_rate=0.01", "align.max_steps=0")
    run = loram("run", recipe, *settings, "--json", "--artifacts", tmp_path / "a")
    assert run.code == 0, run.err
    made = {entry["stage"]: entry for entry in run.json}
    losses = {name: of["sums"]["loss"] for name, of in made["evaluate"]["metrics"]["variants"].items()}
    assert losses["pruned + adapter"] < losses["pruned"]
    assert losses["merged"] == pytest.approx(losses["base + recovered"], rel=1e-5)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_loading_packs_every_projection_and_nothing_else(tmp_path: Path, name: str) -> None:
    base = make_model(tmp_path / "base")
    model = load_model(base, Precision(torch.float32, name))
    kinds = {path for path, module in model.named_modules() if isinstance(module, PackedLinear)}
    linears = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert linears - kinds == {"lm_head"}
    exact = load_model(base, torch.float32)
    with torch.no_grad():
        one, other = exact(TOKENS).logits, model(TOKENS).logits
        for path in kinds:
            exact.get_submodule(path).weight.copy_(dense(model.get_submodule(path)))
        torch.testing.assert_close(exact(TOKENS).logits, other, rtol=1e-4, atol=1e-4)
    assert float((one - other).norm()) > 0


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_weights_that_are_stored_quantized_are_refused_by_name(tmp_path: Path, method: str) -> None:
    base = make_model(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"stored quantized \\({method}"):
        load_model(base, Precision(torch.float32, "nf4"))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hqq", None)
    with pytest.raises(MissingPackageError, match="hqq2 needs hqq") as caught:
        get_quantizer("hqq2")
    assert "pip install hqq" in str(caught.value.fix)
