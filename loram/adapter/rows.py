"""What an adapter makes of a weight, row by row: sums in float32, cast once to the weight's dtype.

Shape suffixes: O out features, I in features, R rank, C rows at work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from loram.adapter.folder import Adapter

# Weights that are summed at a time: 1 MiB of float32, so that they stay in the cache.
_ELEMENTS = 256 << 10
# Of float32, in which magnitudes are stored.
_ROUNDING = 2.0**-23


@dataclass(frozen=True)
class Change:
    """W → W + s·B·A, and for a DoRA each row then scaled to its magnitude (arXiv 2502.13533; 2402.09353, eq. 5)."""

    a_RI: torch.Tensor
    b_OR: torch.Tensor
    scale: float
    magnitude_O: torch.Tensor | None = None

    @classmethod
    def of(cls, adapter: Adapter, module: str) -> Change:
        """What a trained adapter does to a module."""
        a_RI, b_OR = adapter.factors(module)
        return cls(a_RI.float(), b_OR.float(), adapter.scale(module), adapter.magnitude(module))

    def rows(self, start: int, count: int) -> Change:
        """The same for some rows of the weight."""
        here = slice(start, start + count)
        return replace(
            self, b_OR=self.b_OR[here], magnitude_O=None if self.magnitude_O is None else self.magnitude_O[here]
        )

    def merged(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """The changed weight in its own dtype.

        A row whose magnitude is its norm but for float32's rounding, or whose norm is 0, is not scaled.
        """
        out = torch.empty_like(weight_OI)
        for rows, sum_CI in self._sums(weight_OI):
            if self.magnitude_O is not None:
                norm_C = _norms(sum_CI)
                ratio_C = torch.where(norm_C > 0, self.magnitude_O[rows] / norm_C, 1.0)
                ratio_C[(ratio_C - 1).abs() <= _ROUNDING] = 1.0
                sum_CI.mul_(ratio_C[:, None])
            out[rows] = sum_CI
        return out

    def norms(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """‖W + s·B·A‖ of every row, float64 [O]."""
        out = torch.empty(len(weight_OI), dtype=torch.float64)
        for rows, sum_CI in self._sums(weight_OI):
            out[rows] = _norms(sum_CI)
        return out

    def _sums(self, weight_OI: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """(rows, W + s·(B·A) in float32); good until the next is asked for."""
        step = max(1, _ELEMENTS // weight_OI.shape[1])
        work = torch.empty((min(step, len(weight_OI)), weight_OI.shape[1]))
        for start in range(0, len(weight_OI), step):
            rows = slice(start, start + step)
            delta_CI = torch.mm(self.b_OR[rows], self.a_RI, out=work[: len(self.b_OR[rows])])
            yield rows, delta_CI.mul_(self.scale).add_(weight_OI[rows])


def _norms(sum_CI: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(sum_CI, dim=1, dtype=torch.float64)
