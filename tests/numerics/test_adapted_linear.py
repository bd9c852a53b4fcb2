"""The fused LoRA and DoRA layer against PEFT's own layers and against float64."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from loram.adapter.linear import AdaptedLinear
from loram.models.quantizers import PackedLinear, get_quantizer, weight_blocks
from loram.models.vocabulary import QuantizedHead, QuantizedMatrix

SCALE = 2.0


class _Holder(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.proj = linear
        self.place = nn.Parameter(torch.zeros(1), requires_grad=False)  # PEFT asks the first one for its device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.proj(x)
        return out


def _plain(inputs: int, outputs: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype)


def _linear(kind: str, inputs: int, outputs: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    plain = _plain(inputs, outputs, kind != "head", dtype)
    if kind == "head":
        return QuantizedHead(plain, QuantizedMatrix(plain.weight, "nf4", True))
    if kind == "plain":
        return plain
    packed = PackedLinear(plain, get_quantizer(kind))
    packed.fill(plain.weight)
    return packed


def _pefts(kind: str, inputs: int, outputs: int) -> nn.Module:
    """The same linear as bitsandbytes has it."""
    plain = _plain(inputs, outputs)
    if kind == "plain":
        return plain
    packed = bitsandbytes.nn.Linear4bit(inputs, outputs, quant_type=kind, compress_statistics=True, device="cpu")
    packed.load_state_dict(plain.state_dict())
    packed.support_avx512bf16_for_cpu = False
    return packed.to("cpu")


def _adapted(linear: nn.Module, ours: bool, **options: Any) -> nn.Module:
    config = LoraConfig(r=4, lora_alpha=4 * SCALE, target_modules=["proj"], **options)
    if ours:
        config._register_custom_module({type(linear): AdaptedLinear})
    holder = _Holder(linear)
    holder.is_loaded_in_4bit = True  # as transformers marks what it has quantized
    return get_peft_model(holder, config)


def _randomize(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.1 * noise if "magnitude" in name else 0.1 * noise)


def _step(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    (y.float() * torch.linspace(-1, 1, y.shape[-1])).square().sum().backward()
    found = {"y": y.detach(), "x": x.grad}
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", ["plain", "nf4", "fp4"])
def test_outputs_and_gradients_are_pefts(kind: str, dora: bool) -> None:
    x = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(2))
    results = []
    for ours in (True, False):
        model = _adapted((_linear if ours else _pefts)(kind, 64, 48), ours, use_dora=dora)
        assert isinstance(model.base_model.model.proj, AdaptedLinear) is ours
        _randomize(model)
        results.append(_step(model, x))
    mine, theirs = results
    assert set(mine) == set(theirs)
    assert len(mine) == (5 if dora else 4)
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=2e-5, atol=1e-4, msg=name)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", ["plain", "nf4", "int8", "hqq3", "head"])
def test_outputs_and_gradients_against_float64(kind: str, dora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loram.memory.resident.CHUNK_BYTES", 3 * 64 * 4)  # several chunks of the head
    model = _adapted(_linear(kind, 48, 32), True, use_dora=dora)
    _randomize(model)
    x = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(2))
    found = _step(model, x)
    layer = model.base_model.model.proj
    w = torch.cat([rows for _, rows in weight_blocks(layer.base_layer, torch.float32)]).double()
    a, b = (layer.lora_A.default.weight.detach().double(), layer.lora_B.default.weight.detach().double())
    a.requires_grad_()
    b.requires_grad_()
    x64 = x.double().requires_grad_()
    whole = w + SCALE * b @ a
    factor = torch.ones(32, dtype=torch.float64)
    if dora:
        m = layer.lora_magnitude_vector.default.weight.detach().double().requires_grad_()
        factor = m / whole.norm(dim=1).detach()
    bias = 0.0 if layer.base_layer.bias is None else layer.base_layer.bias.detach().double()
    y = x64 @ (factor[:, None] * whole).T + bias
    (y * torch.linspace(-1, 1, 32).double()).square().sum().backward()
    torch.testing.assert_close(found["y"].double(), y.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["x"].double(), x64.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(layer.lora_A.default.weight.grad.double(), a.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(layer.lora_B.default.weight.grad.double(), b.grad, rtol=1e-5, atol=1e-4)
    if dora:
        torch.testing.assert_close(
            layer.lora_magnitude_vector.default.weight.grad.double(), m.grad, rtol=1e-5, atol=1e-4
        )
        torch.testing.assert_close(layer.ratio().double(), factor.detach(), rtol=1e-5, atol=1e-6)


def test_dora_starts_as_the_base_and_zero_rows_stay_finite() -> None:
    linear = _linear("plain", 64, 48)
    with torch.no_grad():
        linear.weight[5] = 0
    x = torch.randn(4, 64)
    expected = linear(x).detach()
    model = _adapted(linear, True, use_dora=True)
    found = _step(model, x)
    torch.testing.assert_close(found["y"], expected, rtol=1e-5, atol=1e-6)
    assert all(bool(torch.isfinite(value).all()) for value in found.values())


def test_dropout_acts_on_the_adapter_alone() -> None:
    model = _adapted(_linear("plain", 64, 48), True, lora_dropout=0.5).train()
    layer = model.base_model.model.proj
    x = torch.randn(4, 64)
    torch.testing.assert_close(model(x), layer.base_layer(x))  # B is zero
    _randomize(model)
    assert not torch.equal(model(x), model(x))
    torch.manual_seed(3)
    found = _step(model, x)
    torch.manual_seed(3)
    dropped = x * torch.empty_like(x, dtype=torch.bool).bernoulli_(0.5) / 0.5
    want = layer.base_layer(x) + SCALE * dropped @ layer.lora_A.default.weight.T @ layer.lora_B.default.weight.T
    torch.testing.assert_close(found["y"], want, rtol=1e-5, atol=1e-5)
    model.eval()
    assert torch.equal(model(x), model(x))


def test_bfloat16_autocast_keeps_float32_parameters_and_gradients() -> None:
    model = _adapted(_linear("nf4", 64, 48, torch.bfloat16), True, use_dora=True)
    _randomize(model)
    x = torch.randn(2, 3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert [gradient.dtype for gradient in grads] == [torch.float32] * 3
