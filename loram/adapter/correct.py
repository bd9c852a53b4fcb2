"""What the small model computed otherwise, put into B: EMLoC's correction of an adapter (arXiv 2506.12015).

An adapter learns around the weights E that the small model computes with: cut, aligned, of low rank, unpacked from few
bits. Used on the base's W, restricted to the rows or columns that E has, B becomes B' such that for x in the row space
of A

    W·x + s·B'·A·x = E·x + s·B·A·x,   so   B' = B - (W - E)·A⁺ / s.

With A = P·Σ·Vᵀ this is (s·B·P·Σ - (W - E)·V) in the coordinates V. Of a direction that the adapter hardly uses there
would be nothing left but the correction, so each is held to `limit` times what the adapter does in that direction, both
as means of absolute values over the outputs. A stays as it is, so recovery scatters the same rows and columns: nothing
is known of a removed unit, and its rows of B stay zero. Inputs outside the row space, biases and norms are not
corrected. Sums are float64.

Shape suffixes: O out features, I in features (both of the small model), R rank, K directions that A has.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Self

import torch

from loram.adapter.folder import Adapter
from loram.checkpoint import CheckpointReader
from loram.checkpoint.overlap import in_order
from loram.errors import WrongBaseError
from loram.models.loading import Precision, empty_model, slots
from loram.models.pruned import load_config
from loram.models.quantizers import weight_blocks
from loram.pruning.plan import PLAN_NAME, PruningPlan

# Singular values of A below this share of the largest, times the rank, are the rounding of float32.
_ROUNDING = 2.0**-23


def corrected(
    a_RI: torch.Tensor,
    b_OR: torch.Tensor,
    scale: float,
    lost: Callable[[torch.Tensor], torch.Tensor],
    limit: float | None,
) -> tuple[torch.Tensor, int]:
    """B' [O, R] float64, and in how many directions the limit was at work.

    Args:
        a_RI: A.
        b_OR: B.
        scale: s.
        lost: V [I, K] → (W - E)·V [O, K], float64.
        limit: of the correction against the adapter, direction by direction; None: whatever it is.
    """
    left_RK, values_K, right_KI = torch.linalg.svd(a_RI.double(), full_matrices=False)
    there_K = values_K > values_K[0] * _ROUNDING * len(a_RI)
    left_RK, values_K, right_KI = left_RK[:, there_K], values_K[there_K], right_KI[there_K]
    lost_OK = lost(right_KI.T)
    limited = 0
    if limit is not None:
        most_K = limit * (scale * b_OR.double() @ left_RK * values_K).abs().mean(0)
        size_K = lost_OK.abs().mean(0)
        limited = int((size_K > most_K).sum())
        lost_OK = lost_OK * torch.where(size_K > most_K, most_K / size_K, 1.0)
    return b_OR.double() - (lost_OK / values_K) @ left_RK.T / scale, limited


class Correction:
    """The corrected B of each projection of an adapter, one linear of the small model in memory at a time.

    Args:
        model: folder of the small model that the adapter was trained on.
        precision: how it was held then.
        base: the full model.
        plan: what was kept of it.
        limit: as of `corrected`.

    Raises:
        WrongBaseError: the small model is of another plan.
        CheckpointError: it does not fit its config.
    """

    def __init__(
        self, model: Path, precision: Precision, base: CheckpointReader, plan: PruningPlan, limit: float | None
    ) -> None:
        if PruningPlan.load(model) != plan:
            raise WrongBaseError(
                f"{model} is not the small model that the adapter was trained on: their {PLAN_NAME} differ.",
                fix="Recover with the recipe that the adapter was trained with, or set recover.correction=none.",
            )
        self._modules = self._directions = self._limited = 0
        self._precision, self._base, self._plan, self._limit = precision, base, plan, limit
        self._last: tuple[str, torch.Tensor] | None = None
        self._reader = CheckpointReader(model)
        self._model = empty_model(load_config(model), precision)
        self._slots = slots(self._model, self._reader)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def b(self, adapter: Adapter, module: str) -> torch.Tensor:
        """B' [O, R] of a projection, in the stored dtype."""
        if self._last is None or self._last[0] != module:  # a DoRA asks twice
            a_RI, b_OR = adapter.factors(module)
            found, limited = corrected(
                a_RI, b_OR, adapter.scale(module), lambda v_IK: self._lost(module, v_IK), self._limit
            )
            self._modules += 1
            self._directions += len(a_RI)
            self._limited += limited
            self._last = module, found.to(b_OR.dtype)
        return self._last[1]

    def _lost(self, module: str, v_IK: torch.Tensor) -> torch.Tensor:
        """(W - E)·V, a block of W at a time."""
        located = self._plan.architecture.locate(module)
        assert located is not None
        layer, projection = located
        emulated_OI = self._weight(module)
        lost_OK = torch.empty(len(emulated_OI), v_IK.shape[1], dtype=torch.float64)
        start = 0
        parts = self._base.parts(f"{module}.weight", self._plan.index(layer, projection), projection.axis)
        with closing(in_order(parts)) as blocks:
            for block in blocks:
                rows = slice(start, start + len(block.data))
                lost_OK[rows] = (block.data.double() - emulated_OI[rows].double()) @ v_IK
                start = rows.stop
        return lost_OK

    def _weight(self, module: str) -> torch.Tensor:
        """E [O, I] as the small model computes with it, in its dtype."""
        linear = self._model.get_submodule(module)
        for slot in self._slots:
            if slot.full_name.startswith(f"{module}."):
                slot.fill(self._reader.read(slot.source).to(self._precision.dtype))
        weight_OI = torch.cat([block for _, block in weight_blocks(linear, self._precision.dtype)])
        linear.to("meta")
        return weight_OI

    def metrics(self) -> dict[str, int]:
        """What was corrected, and in how many of A's directions the limit was at work."""
        return {
            "corrected_modules": self._modules,
            "directions": self._directions,
            "limited_directions": self._limited,
        }

    def describe(self) -> str:
        """The same in a line."""
        text = f"{self._modules:,} projections corrected for what the small model computes otherwise"
        if self._limit is not None:
            text += f"; {self._limited:,} of {self._directions:,} directions held to {self._limit:g} × the adapter's"
        return text
