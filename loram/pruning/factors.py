"""The best factors of a linear for what it sees: W ≈ U·V of rank r, by one of three measures of what is lost.

- `magnitude`: ‖W - W'‖, without data.
- `activation`: Σ ‖(W - W')·x‖² over calibration rows, SVD-LLM's (arXiv 2403.07378, §3.2). With H = Σ x·xᵀ = L·Lᵀ
  that is ‖(W - W')·L‖².
- `adapter_gradient`: the same seen by the loss, ‖Rᵀ·(W - W')·L‖² with G = Σ g·gᵀ = R·Rᵀ of the gradients g of the
  outputs: K-FAC's picture of the loss (arXiv 1503.05671). It keeps the directions through which an adapter learns.

By Eckart and Young W' = R⁻ᵀ·P·Pᵀ·Rᵀ·W with P the r leading left singular vectors of Rᵀ·W·L; the inverse of L is needed
nowhere. Sums and decompositions are float64; H and G are damped, so that what few rows do not show is kept too.

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
from loram.models.architecture import Projection
from loram.models.layerwise import LayerwiseModel
from loram.progress import track
from loram.pruning.plan import PruningPlan
from loram.recipe import Criterion

FACTORS_NAME = "factors.safetensors"
# Of the mean of H's diagonal, added to the diagonal: as in GPTQ (arXiv 2210.17323, §3.3).
_DAMPING = 0.01


def factorize(
    reader: CheckpointReader,
    plan: PruningPlan,
    folder: Path,
    criterion: Criterion,
    engine: LayerwiseModel | None = None,
    batches: Sequence[Mapping[str, torch.Tensor]] = (),
) -> None:
    """Writes the factors of every projection that the plan keeps as two, `MODULE.v.weight` and `MODULE.u.weight`.

    Args:
        reader: the base's checkpoint: factors get the dtype of what they stand for.
        plan: whose layers have ranks.
        folder: gets `factors.safetensors`.
        criterion: `magnitude`, `activation` or `adapter_gradient`.
        engine: the base model, one layer in memory at a time; not for `magnitude`.
        batches: calibration rows; every token counts in H, and what labels need in G.

    Raises:
        LoramError: activations or gradients are not finite on the calibration rows.
    """
    layers = range(len(plan.layers))
    order = reversed(layers) if criterion == "adapter_gradient" else layers
    places = [(layer, projection) for layer in order for projection in plan.factored(layer)]
    layout = []
    for layer, projection in places:
        name, rank = plan.architecture.module(layer, projection), plan.layers[layer].ranks[projection.name]
        dtype = reader.info(f"{name}.weight").dtype
        layout.append(TensorSpec(f"{name}.v.weight", dtype, (rank, projection.in_features)))
        layout.append(TensorSpec(f"{name}.u.weight", dtype, (projection.out_features, rank)))
    with CheckpointWriter(folder, {FACTORS_NAME: layout}) as writer:

        def write(layer: int, projection: Projection, weight_OI: torch.Tensor, **moments: torch.Tensor) -> None:
            name = plan.architecture.module(layer, projection)
            if not all(bool(torch.isfinite(moment).all()) for moment in moments.values()):
                raise LoramError(
                    f"Activations or gradients of '{name}' are not finite on the calibration rows.",
                    fix="Check that the base model's weights are sound.",
                )
            u_OR, v_RI = factors(weight_OI, plan.layers[layer].ranks[projection.name], **moments)
            dtype = reader.info(f"{name}.weight").dtype
            writer.write(f"{name}.v.weight", v_RI.to(dtype))
            writer.write(f"{name}.u.weight", u_OR.to(dtype))

        @contextmanager
        def watch(layer: int, module: nn.Module) -> Iterator[None]:
            projections = plan.factored(layer) if 0 <= layer < len(plan.layers) else []
            inputs, outputs = _Moments(), _Moments()
            hooks = []
            for projection in projections:
                linear = module.get_submodule(projection.name)
                hooks.append(linear.register_forward_pre_hook(partial(inputs.add_input, projection.name)))
                if criterion == "adapter_gradient":
                    hooks.append(linear.register_forward_hook(partial(outputs.add_gradient, projection.name)))
            yield
            for handle in hooks:
                handle.remove()
            for projection in projections:
                moments = {"inputs_II": inputs.of(projection.name)}
                if criterion == "adapter_gradient":
                    moments["gradients_OO"] = outputs.of(projection.name)
                write(layer, projection, module.get_parameter(f"{projection.name}.weight").detach(), **moments)

        if engine is None:
            for layer, projection in track(places, "factor", "linears"):
                write(layer, projection, reader.read(f"{plan.architecture.module(layer, projection)}.weight"))
        elif criterion == "adapter_gradient":
            engine.backward(batches, 1.0, watch, "factor")
        else:
            engine.forward(batches, watch, "factor")


@torch.no_grad()
def factors(
    weight_OI: torch.Tensor,
    rank: int,
    inputs_II: torch.Tensor | None = None,
    gradients_OO: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """U [O, R] and V [R, I], float64, by the smaller side of W; without moments the best for W itself.

    Directions that Rᵀ·W·L does not have (a rank above that of W) are zero in U.
    """
    w_OI = weight_OI.double()
    left_OO = None if gradients_OO is None else _square_root(gradients_OO)
    seen_OI = w_OI if left_OO is None else left_OO.T @ w_OI
    ours_OI = seen_OI
    if inputs_II is not None:
        seen_OI = seen_OI @ _square_root(inputs_II)
    if len(w_OI) <= w_OI.shape[1]:
        chosen_OR = torch.linalg.eigh(seen_OI @ seen_OI.T).eigenvectors.flip(1)[:, :rank]
    else:
        squares, right_II = torch.linalg.eigh(seen_OI.T @ seen_OI)
        squares, right_IR = squares.flip(0)[:rank], right_II.flip(1)[:, :rank]
        there_R = squares > squares[0] * torch.finfo(torch.float64).eps * w_OI.shape[1]
        chosen_OR = seen_OI @ right_IR * torch.where(there_R, squares.clamp(min=0).rsqrt(), 0.0)
    v_RI = chosen_OR.T @ ours_OI
    if left_OO is None:
        return chosen_OR, v_RI
    return torch.linalg.solve_triangular(left_OO.T, chosen_OR, upper=True), v_RI


def _square_root(moment: torch.Tensor) -> torch.Tensor:
    """The lower triangle L of a damped moment L·Lᵀ, float64."""
    damped = moment.double().clone()
    damped.diagonal().add_(_DAMPING * float(damped.diagonal().mean()) or 1.0)
    return torch.linalg.cholesky(damped)


class _Moments:
    """Σ x·xᵀ for several linears, in float64; those that get the very same input share one sum."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._owner: dict[str, str] = {}
        self._last: tuple[torch.Tensor, str] | None = None

    def add_input(self, name: str, _: object, inputs: tuple[torch.Tensor]) -> None:
        x = inputs[0]
        if self._last is not None and self._last[0] is x:
            self._owner[name] = self._last[1]
            return
        self._last = (x, name)
        self._add(name, x)

    def add_gradient(self, name: str, _: object, __: object, output: torch.Tensor) -> None:
        output.register_hook(partial(self._add, name))

    def _add(self, name: str, x: torch.Tensor) -> None:
        self._owner[name] = name
        x_TI = x.detach().flatten(0, -2).double()
        moment_II = x_TI.T @ x_TI
        self._sums[name] = self._sums[name].add_(moment_II) if name in self._sums else moment_II

    def of(self, name: str) -> torch.Tensor:
        return self._sums[self._owner[name]]
