"""A linear with its LoRA or DoRA as one operation: what is trained costs little time and less memory.

PEFT's own layers copy the base's output, cast the input anew for every projection, scale and add in passes of their
own; its DoRA multiplies an identity of in_features² through the adapter and holds the dense B·A beside the
dequantized weight. Here the frozen weight is unpacked once forwards and once backwards, everything is added where
it already lies, and DoRA's row norms come from the factors. Parameters, names and files stay PEFT's.

Shape suffixes: T tokens (all leading axes), I in features, O out features, R rank, C rows of a block of the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.config import LoraConfig
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import Linear
from peft.tuners.lora.variants import DoraLinearVariant
from torch import nn
from torch.autograd.function import once_differentiable

from loram.models.quantizers import as_autocast, through_weight, times_weight, weight_blocks

Tensor = torch.Tensor


class AdaptedLinear(Linear):
    """PEFT's LoRA layer with another forward; the base is any linear that `weight_blocks` can unpack."""

    def resolve_lora_variant(self, *, config: LoraConfig, **kwargs: Any) -> Any:
        """DoRA starts from row norms found block by block; other variants cannot be computed here."""
        return _DoraStart() if config.use_dora else None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """y = W·x + b + s·B·A·x, or with DoRA y = m/‖W + s·B·A‖ ⊙ (W·x + s·B·A·x) + b (arXiv 2402.09353, eq. 5).

        The norm is a constant in backward, as in the paper (§4.3). Dropout acts on the adapter's input alone.
        """
        (name,) = self.active_adapters
        if self.disable_adapters or name not in self.lora_A:
            out: Tensor = self.base_layer(x, *args, **kwargs)
            return out
        x = as_autocast(x)
        dropout = self.lora_dropout[name]
        rate = dropout.p if self.training and isinstance(dropout, nn.Dropout) else 0.0
        magnitude = self.lora_magnitude_vector[name].weight if name in self.lora_magnitude_vector else None
        with torch.autocast(x.device.type, enabled=False):
            out = _LoraLinear.apply(
                x,
                rate,
                self.lora_A[name].weight,
                self.lora_B[name].weight,
                magnitude,
                self.base_layer,
                self.scaling[name],
            )
        return out

    def ratio(self) -> Tensor:
        """DoRA's m / ‖W + s·B·A‖ of every row, float32 [O]; 1 where the norm is 0."""
        (name,) = self.active_adapters
        a_RI, b_OR = self.lora_A[name].weight, self.lora_B[name].weight
        norm_O = row_norms(self.base_layer, a_RI, b_OR, self.scaling[name])
        return _ratio(self.lora_magnitude_vector[name].weight, norm_O).detach()


def fused(config: LoraConfig) -> LoraConfig:
    """A config whose linears become `AdaptedLinear`."""
    config._register_custom_module({nn.Linear: AdaptedLinear})
    return config


class _DoraStart(DoraLinearVariant):
    """Makes the magnitudes: the norms of W + s·B·A, which leave the model as it is."""

    @staticmethod
    def init(module: AdaptedLinear, adapter_name: str, **kwargs: Any) -> None:
        if not module.lora_magnitude_vector:
            module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
        a_RI, b_OR = module.lora_A[adapter_name].weight, module.lora_B[adapter_name].weight
        layer = DoraLinearLayer(fan_in_fan_out=False)
        if module.base_layer.weight.is_meta:  # its weights, and the trained magnitudes, come later
            norm_O = torch.empty(len(b_OR))
        else:
            norm_O = row_norms(module.base_layer, a_RI, b_OR, module.scaling[adapter_name])
        layer.weight = nn.Parameter(norm_O)
        module.lora_magnitude_vector[adapter_name] = layer


@torch.no_grad()
def row_norms(base: nn.Module, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """‖W + s·B·A‖ of every row, float32 [O], without the sum: ‖w‖² + 2s·b·(A·w) + s²·b·(A·Aᵀ)·b."""
    norm_O = torch.empty(len(b_OR), device=b_OR.device)
    for rows, weight_CI in weight_blocks(base, a_RI.dtype):
        norm_O[rows] = _block_norms(weight_CI, a_RI, b_OR[rows], scale)
    return norm_O


def _block_norms(weight_CI: Tensor, a_RI: Tensor, b_CR: Tensor, scale: float) -> Tensor:
    a_RI = a_RI.to(weight_CI.dtype)
    b_CR = b_CR.float()
    own_C = torch.linalg.vector_norm(weight_CI, dim=1, dtype=torch.float32).square_()
    across_C = ((weight_CI @ a_RI.T).float() * b_CR).sum(1)
    gram_RR = a_RI.float() @ a_RI.float().T
    adapter_C = ((b_CR @ gram_RR) * b_CR).sum(1)
    return (own_C + 2 * scale * across_C + scale**2 * adapter_C).clamp_(min=0).sqrt_()


def _ratio(magnitude_O: Tensor, norm_O: Tensor) -> Tensor:
    return torch.where(norm_O > 0, magnitude_O / norm_O, 1.0)


def _dropped(x_TI: Tensor, kept_TI: Tensor | None, dropout: float) -> Tensor:
    return x_TI if kept_TI is None else (x_TI * kept_TI).div_(1 - dropout)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        dropout: float,
        a_RI: Tensor,
        b_OR: Tensor,
        magnitude_O: Tensor | None,
        base: nn.Module,
        scale: float,
    ) -> Tensor:
        x_TI = x.flatten(0, -2)
        a, b = a_RI.to(x.dtype), b_OR.to(x.dtype)
        # A byte a value, where torch's own dropout would keep its output too.
        kept_TI = x_TI.new_empty(x_TI.shape, dtype=torch.bool).bernoulli_(1 - dropout) if dropout else None
        low_TR = _dropped(x_TI, kept_TI, dropout) @ a.T
        y_TO = x.new_empty((len(x_TI), len(b)))
        norm_O = None if magnitude_O is None else torch.empty_like(magnitude_O)
        if norm_O is None:
            times_weight(x_TI, base, y_TO)
        else:
            for rows, weight_CI in weight_blocks(base, x.dtype):
                torch.mm(x_TI, weight_CI.T, out=y_TO[:, rows])
                norm_O[rows] = _block_norms(weight_CI, a_RI, b_OR[rows], scale)
                del weight_CI
        y_TO.addmm_(low_TR, b.T, alpha=scale)
        z_TO = None
        if magnitude_O is not None and norm_O is not None:
            z_TO = y_TO
            y_TO = y_TO * _ratio(magnitude_O, norm_O).to(y_TO.dtype)
        if base.bias is not None:
            y_TO += base.get_parameter("bias").to(y_TO.dtype)
        context.base, context.scale, context.dropout = base, scale, dropout
        context.save_for_backward(x, kept_TI, low_TR, a_RI, b_OR, magnitude_O, norm_O, z_TO)
        return y_TO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, kept_TI, low_TR, a_RI, b_OR, magnitude_O, norm_O, z_TO = context.saved_tensors
        scale, grad_TO = context.scale, gradients[0].flatten(0, -2)
        a, b = a_RI.to(grad_TO.dtype), b_OR.to(grad_TO.dtype)
        grad_magnitude = None
        if norm_O is not None:
            grad_magnitude = torch.where(norm_O > 0, (grad_TO * z_TO).sum(0, dtype=torch.float32) / norm_O, 0.0)
            grad_TO = grad_TO * _ratio(magnitude_O, norm_O).to(grad_TO.dtype)
        grad_b = (grad_TO.T @ low_TR).to(b_OR.dtype).mul_(scale)
        grad_low_TR = (grad_TO @ b).mul_(scale)
        grad_a = (grad_low_TR.T @ _dropped(x.flatten(0, -2), kept_TI, context.dropout)).to(a_RI.dtype)
        grad_x = None
        if context.needs_input_grad[0]:
            grad_x = through_weight(grad_TO, context.base)
            if kept_TI is None:
                grad_x.addmm_(grad_low_TR, a)
            else:
                grad_x += _dropped(grad_low_TR @ a, kept_TI, context.dropout)
            grad_x = grad_x.view(x.shape)
        return grad_x, None, grad_a, grad_b, grad_magnitude, None, None
