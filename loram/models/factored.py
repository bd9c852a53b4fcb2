"""A linear kept as two thin ones, W ≈ U·V: how a small model is made without cutting.

Input and output keep the base's widths, so a LoRA around the pair has the base's shapes. The two factors are
ordinary linears: they load, quantize and train as any other.

Shape suffixes: T tokens, I in features, O out features, R rank, C rows at work.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from loram.models.quantizers import through_weight, times_weight, weight_blocks
from loram.models.shape import PRODUCT_ROWS


class FactoredLinear(nn.Linear):
    """y = U·(V·x) + b, with `v` [R, I] and `u` [O, R] as linears of their own."""

    def __init__(
        self, in_features: int, out_features: int, rank: int, bias: bool, device: torch.device, dtype: torch.dtype
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.v = nn.Linear(in_features, rank, False, device, dtype)
        self.u = nn.Linear(rank, out_features, False, device, dtype)
        self.register_parameter(
            "bias", nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        )

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """One of the factors, for those who ask a linear where and of which dtype it is."""
        return self.u.weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Both factors one after the other."""
        out: torch.Tensor = self.u(self.v(input))
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def blocks(self, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
        """U·V a few rows at a time, in the dtype: what the pair stands for."""
        ((_, v_RI),) = weight_blocks(self.v, dtype)
        for rows, u_CR in weight_blocks(self.u, dtype):
            for start in range(0, len(u_CR), PRODUCT_ROWS):
                piece = u_CR[start : start + PRODUCT_ROWS]
                yield slice(rows.start + start, rows.start + start + len(piece)), piece @ v_RI

    def times(self, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        """Writes U·(V·x) to `y_TO`."""
        low_TR = x_TI.new_empty((len(x_TI), self.v.out_features))
        times_weight(x_TI, self.v, low_TR)
        times_weight(low_TR, self.u, y_TO)

    def through(self, grad_TO: torch.Tensor) -> torch.Tensor:
        """Gradient [T, I] of the input."""
        return through_weight(through_weight(grad_TO, self.u), self.v)
