"""The best factors of a linear for what it sees: W ≈ U·V of rank r that least changes W·x over calibration rows.

With H = Σ x·xᵀ and H = L·Lᵀ, the error Σ ‖(W - W')·x‖² is ‖(W - W')·L‖², so by Eckart and Young W' = U·Uᵀ·W, with U
the r leading left singular vectors of W·L (SVD-LLM, arXiv 2403.07378, §3.2; here without the inverse of L, which has
to be found nowhere). Sums and decompositions are float64; H is damped, so that what few rows do not show is kept too.

Shape suffixes: O out features, I in features, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn

from loram.checkpoint import CheckpointReader, CheckpointWriter, TensorSpec
from loram.errors import LoramError
from loram.models.layerwise import LayerwiseModel
from loram.pruning.plan import PruningPlan

FACTORS_NAME = "factors.safetensors"
# Of the mean of H's diagonal, added to the diagonal: as in GPTQ (arXiv 2210.17323, §3.3).
_DAMPING = 0.01


def factorize(
    engine: LayerwiseModel,
    reader: CheckpointReader,
    plan: PruningPlan,
    batches: Sequence[Mapping[str, torch.Tensor]],
    folder: Path,
) -> None:
    """Writes the factors of every projection that the plan keeps as two, `MODULE.v.weight` and `MODULE.u.weight`.

    Args:
        engine: the base model, one layer in memory at a time.
        reader: its checkpoint: factors get the dtype of what they stand for.
        plan: whose layers have ranks.
        batches: calibration rows; every token counts.
        folder: gets `factors.safetensors`.

    Raises:
        LoramError: the model's activations are not finite on the calibration rows.
    """
    layout = []
    for layer, of in enumerate(plan.layers):
        for projection in plan.factored(layer):
            name, rank = plan.architecture.module(layer, projection), of.ranks[projection.name]
            dtype = reader.info(f"{name}.weight").dtype
            layout.append(TensorSpec(f"{name}.v.weight", dtype, (rank, projection.in_features)))
            layout.append(TensorSpec(f"{name}.u.weight", dtype, (projection.out_features, rank)))
    with CheckpointWriter(folder, {FACTORS_NAME: layout}) as writer:

        @contextmanager
        def watch(layer: int, module: nn.Module) -> Iterator[None]:
            projections = plan.factored(layer)
            moments = _Moments()
            hooks = [
                module.get_submodule(p.name).register_forward_pre_hook(partial(moments.add, p.name))
                for p in projections
            ]
            yield
            for handle in hooks:
                handle.remove()
            for projection in projections:
                name = plan.architecture.module(layer, projection)
                moment_II = moments.of(projection.name)
                if not bool(torch.isfinite(moment_II).all()):
                    raise LoramError(
                        f"Activations of '{name}' are not finite on the calibration rows.",
                        fix="Check that the base model's weights are sound.",
                    )
                weight_OI = module.get_parameter(f"{projection.name}.weight").detach()
                u_OR, v_RI = factors(weight_OI, moment_II, plan.layers[layer].ranks[projection.name])
                dtype = reader.info(f"{name}.weight").dtype
                writer.write(f"{name}.v.weight", v_RI.to(dtype))
                writer.write(f"{name}.u.weight", u_OR.to(dtype))

        engine.forward(batches, watch, "factor")


@torch.no_grad()
def factors(weight_OI: torch.Tensor, moment_II: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """U [O, R] with orthonormal columns and V = Uᵀ·W [R, I], float64, by the smaller side of W.

    Directions that W·L does not have (a rank above that of W) are zero in U.
    """
    w_OI = weight_OI.double()
    damped_II = moment_II.double().clone()
    damped_II.diagonal().add_(_DAMPING * float(damped_II.diagonal().mean()) or 1.0)
    seen_OI = w_OI @ torch.linalg.cholesky(damped_II)
    if len(w_OI) <= w_OI.shape[1]:
        left_OR = torch.linalg.eigh(seen_OI @ seen_OI.T).eigenvectors.flip(1)[:, :rank]
    else:
        squares, right_II = torch.linalg.eigh(seen_OI.T @ seen_OI)
        squares, right_IR = squares.flip(0)[:rank], right_II.flip(1)[:, :rank]
        there_R = squares > squares[0] * torch.finfo(torch.float64).eps * len(damped_II)
        left_OR = seen_OI @ right_IR * torch.where(there_R, squares.clamp(min=0).rsqrt(), 0.0)
    return left_OR, left_OR.T @ w_OI


class _Moments:
    """Σ x·xᵀ of the inputs of several linears, in float64; those that get the very same input share one sum."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._owner: dict[str, str] = {}
        self._last: tuple[torch.Tensor, str] | None = None

    def add(self, name: str, _: object, inputs: tuple[torch.Tensor]) -> None:
        x = inputs[0]
        if self._last is not None and self._last[0] is x:
            self._owner[name] = self._last[1]
            return
        self._owner[name] = name
        self._last = (x, name)
        x_TI = x.detach().flatten(0, -2).double()
        moment_II = x_TI.T @ x_TI
        self._sums[name] = self._sums[name].add_(moment_II) if name in self._sums else moment_II

    def of(self, name: str) -> torch.Tensor:
        return self._sums[self._owner[name]]
