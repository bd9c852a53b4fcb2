"""Frozen linears in fewer bits: one interface for every format, so that quantizers can be exchanged.

ModuLoRA's idea (arXiv 2309.16119): training an adapter needs nothing of a quantizer but the weight, unpacked for a
moment, forwards and again backwards.

Shape suffixes: O out features, I in features, T tokens (all leading axes), C rows of a block of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from loram.errors import MissingPackageError
from loram.memory.formats import BLOCK, FORMATS, GROUP, GROUPS, NESTED_BLOCK

Tensors = Mapping[str, torch.Tensor]


class Quantizer(Protocol):
    """Packs a weight into tensors, `weight` among them, and unpacks it again."""

    def pack(self, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        """The packed form on the weight's device."""

    def unpack(self, tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """The weight as it computes, [O, I]."""


@dataclass(frozen=True)
class Blockwise4:
    """bitsandbytes' NF4 or FP4, over the weights in the order of their rows."""

    kind: str
    double_quant: bool

    def pack(self, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        from bitsandbytes import functional as bnb

        # Whole blocks: for an odd number of columns bitsandbytes has no kernel on a CPU.
        blocks = _in_rows(weight_OI, BLOCK, 1)
        packed, state = bnb.quantize_4bit(
            blocks, blocksize=BLOCK, compress_statistics=self.double_quant, quant_type=self.kind
        )
        constants = {"weight": packed, "absmax": state.absmax, "code": state.code}
        if self.double_quant:
            constants |= {"offset": state.offset, "absmax2": state.state2.absmax, "code2": state.state2.code}
        return constants

    def unpack(self, tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        from bitsandbytes import functional as bnb

        absmax = tensors["absmax"]
        if self.double_quant:
            nested = bnb.QuantState(
                absmax=tensors["absmax2"], code=tensors["code2"], blocksize=NESTED_BLOCK, dtype=torch.float32
            )
            absmax = bnb.dequantize_blockwise(absmax, nested).add_(tensors["offset"])
        return _out_of_rows(self.values(tensors["weight"], absmax, tensors["code"], dtype), shape)

    def values(
        self, packed: torch.Tensor, absmax: torch.Tensor, code: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """What packed bytes [bytes, 1] stand for, [blocks, 64], by the float32 constant of each block."""
        from bitsandbytes import functional as bnb

        state = bnb.QuantState(
            absmax=absmax, shape=torch.Size((absmax.numel(), BLOCK)), code=code, blocksize=BLOCK,
            quant_type=self.kind, dtype=dtype,
        )  # fmt: skip
        found: torch.Tensor = bnb.dequantize_4bit(packed, state)
        return found


@dataclass(frozen=True)
class Rowwise8:
    """bitsandbytes' int8 with a scale for every row; only the weight is in 8 bits, not what it is multiplied with."""

    def pack(self, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        from bitsandbytes import functional as bnb

        packed, scale_O, _ = bnb.int8_vectorwise_quant(weight_OI.half())
        return {"weight": packed, "scale": scale_O}

    def unpack(self, tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return tensors["weight"].to(dtype).mul_((tensors["scale"] / 127).to(dtype)[:, None])


@dataclass(frozen=True)
class Grouped:
    """HQQ's integers of 2, 3 or 4 bits, over the weights in the order of their rows."""

    bits: int

    def pack(self, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        from hqq.core.quantize import Quantizer as Hqq

        groups = _in_rows(weight_OI, GROUP, GROUPS)
        packed, meta = Hqq.quantize(
            groups, nbits=self.bits, group_size=GROUP, axis=1, device=str(groups.device), view_as_float=False
        )
        return {"weight": packed, "scale": meta["scale"].half(), "zero": meta["zero"].half()}

    def unpack(self, tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        from hqq.core.quantize import Quantizer as Hqq

        groups = len(tensors["scale"])
        values = Hqq.unpack[Hqq.bit_to_packing[self.bits]](tensors["weight"], dtype=dtype)[:groups]
        return _out_of_rows(values.sub_(tensors["zero"]).mul_(tensors["scale"]), shape)


def _in_rows(weight_OI: torch.Tensor, width: int, multiple: int) -> torch.Tensor:
    """The weights one after another as [n, width], n a multiple, zeros at the end."""
    missing = -weight_OI.numel() % (width * multiple)
    return functional.pad(weight_OI.detach().reshape(-1), (0, missing)).view(-1, width)


def _out_of_rows(values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    return values.view(-1)[: shape[0] * shape[1]].view(shape)


def get_quantizer(name: str, double_quant: bool = True) -> Quantizer:
    """The quantizer of a recipe's name.

    Raises:
        MissingPackageError: its library cannot be imported.
    """
    package = FORMATS[name].package
    try:
        import_module(package)
    except ImportError as error:
        raise MissingPackageError(
            f"Quantizing to {name} needs {package}, which cannot be imported ({error}).",
            fix=f"pip install {package}, or choose another train.quantizer (none keeps the weights as they are).",
        ) from error
    if name == "int8":
        return Rowwise8()
    return Grouped(FORMATS[name].bits) if package == "hqq" else Blockwise4(name, double_quant)


class PackedLinear(nn.Linear):
    """A frozen linear that holds its weight packed. Made empty from an ordinary one, then filled."""

    def __init__(self, own: nn.Linear, quantizer: Quantizer) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = own.in_features, own.out_features
        self.quantizer = quantizer
        self.weight = nn.Parameter(own.weight.detach(), requires_grad=False)
        self.register_parameter("bias", own.bias)

    def fill(self, weight_OI: torch.Tensor) -> None:
        """Packs a weight and keeps that."""
        tensors = self.quantizer.pack(weight_OI)
        self.weight = nn.Parameter(tensors.pop("weight"), requires_grad=False)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    def blocks(self, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
        """The whole weight, unpacked."""
        tensors = {"weight": self.weight, **self._buffers}
        shape = (self.out_features, self.in_features)
        yield slice(0, self.out_features), self.quantizer.unpack(tensors, shape, dtype)  # type: ignore[arg-type]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """W·x + b, the weight unpacked forwards and again backwards."""
        return frozen_linear(input, self)


def weight_blocks(linear: nn.Module, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """(rows, their weights [C, I]) of a linear in any form, unpacked, in the order of the rows.

    One block, but for what says otherwise by a method `blocks` (a quantized head, larger than all else).
    """
    if (blocks := getattr(linear, "blocks", None)) is not None:
        yield from blocks(dtype)
    else:
        weight: torch.Tensor = linear.get_parameter("weight")
        yield slice(0, len(weight)), weight.to(dtype)


def times_weight(x_TI: torch.Tensor, linear: nn.Module, y_TO: torch.Tensor) -> None:
    """Writes W·x to `y_TO`, without the bias."""
    if (times := getattr(linear, "times", None)) is not None:
        times(x_TI, y_TO)
        return
    for rows, weight_CI in weight_blocks(linear, x_TI.dtype):
        torch.mm(x_TI, weight_CI.T, out=y_TO[:, rows])


def through_weight(grad_TO: torch.Tensor, linear: nn.Module) -> torch.Tensor:
    """Gradient [T, I] of a linear's input from that of its output."""
    if (through := getattr(linear, "through", None)) is not None:
        found: torch.Tensor = through(grad_TO)
        return found
    total: torch.Tensor | None = None
    for rows, weight_CI in weight_blocks(linear, grad_TO.dtype):
        if total is None:
            total = grad_TO[:, rows] @ weight_CI
        else:
            total.addmm_(grad_TO[:, rows], weight_CI)
    assert total is not None
    return total


def as_autocast(x: torch.Tensor) -> torch.Tensor:
    """An input in the dtype that autocast would compute a linear in."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def frozen_linear(x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    """W·x + b for a weight that does not train; nothing but the packed weight is kept for backward."""
    x = as_autocast(x)
    with torch.autocast(x.device.type, enabled=False):
        out: torch.Tensor = _FrozenLinear.apply(x, linear)
        return out if linear.bias is None else out + linear.bias.to(out.dtype)


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        context.linear = linear
        x_TI = x.flatten(0, -2)
        y_TO = x.new_empty((len(x_TI), linear.out_features))
        times_weight(x_TI, linear, y_TO)
        return y_TO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        grad_x = through_weight(gradient.flatten(0, -2), context.linear)
        return grad_x.view(*gradient.shape[:-1], -1), None
