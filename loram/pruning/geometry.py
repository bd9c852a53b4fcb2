"""How much goes: the paper's rule, which reproduces its published parameter counts to the parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from loram.errors import RecipeError
from loram.models.architecture import UNITS, Architecture, Unit
from loram.models.shape import Widths
from loram.recipe import Method, PruneSection

FACTORED: dict[Method, frozenset[Unit]] = {
    "cut": frozenset(),
    "low_rank": frozenset(UNITS),
    "low_rank_attention": frozenset({"kv_group"}),
    "low_rank_ffn": frozenset({"neuron"}),
}
"""Units whose linears become two, by method."""
_LABELS: dict[Unit, str] = {"kv_group": "KV groups", "neuron": "neurons"}


@dataclass(frozen=True)
class Geometry:
    """Units kept in the cut layers, and which layers those are.

    Of units in `factored` all stay, and their projections become two factors each with as many weights as the cut would
    have left; ranks are multiples of `multiple_of` where they are that large.
    """

    kept: Mapping[Unit, int]
    cut_layers: range
    factored: frozenset[Unit] = frozenset()
    multiple_of: int = 1
    across_layers: bool = False

    def units(self, architecture: Architecture) -> dict[Unit, int]:
        """Units left in a cut layer."""
        return {unit: architecture.units(unit) if unit in self.factored else self.kept[unit] for unit in UNITS}

    def ranks(self, architecture: Architecture) -> dict[str, int]:
        """Ranks in a cut layer by projection: n·O·I/(O+I) for a share n of its weights [O, I]; none where all stay."""
        found = {}
        for projection in architecture.projections:
            whole = architecture.units(projection.unit)
            kept = self.kept[projection.unit]
            if projection.unit not in self.factored or kept == whole:
                continue
            rows, columns = projection.shape(whole)
            rank = max(1, rows * columns * kept // (whole * (rows + columns)))
            found[projection.name] = rank - rank % self.multiple_of if rank >= self.multiple_of else rank
        return found

    def widths(self, architecture: Architecture) -> Widths:
        """What is left in each layer."""
        cut, ranks = self.units(architecture), self.ranks(architecture)

        def left(unit: Unit) -> tuple[int, ...]:
            whole = architecture.units(unit)
            return tuple(cut[unit] if layer in self.cut_layers else whole for layer in range(architecture.layers))

        of_layers = tuple(ranks if layer in self.cut_layers else {} for layer in range(architecture.layers))
        return Widths(architecture, left("kv_group"), left("neuron"), of_layers if ranks and self.cut_layers else ())

    def describe(self, architecture: Architecture, ratio: float) -> str:
        """One line that says what a ratio became, and where rounding changed it."""
        if not self.cut_layers:
            return "identity plan: every layer stays whole"
        parts = []
        for unit in UNITS:
            total = architecture.units(unit)
            kept = self.kept[unit]
            met = abs(1 - kept / total - ratio) < 0.005
            parts.append(f"{kept} of {total} {_LABELS[unit]}" + ("" if met else f" ({1 - kept / total:.0%} removed)"))
        first, last = self.cut_layers[0], self.cut_layers[-1]
        text = f"ratio {ratio:g} keeps {' and '.join(parts)} in layers {first} to {last}"
        if self.across_layers:
            text += " on average, more where scores are higher"
        if ranks := self.ranks(architecture):
            named = ", ".join(f"{name.rpartition('.')[2]} {rank}" for name, rank in ranks.items())
            text += f"; as many parameters in two factors each, of rank: {named}"
        if architecture.kv_groups == 1:
            text += "; attention is not cut (there is only one KV head)"
        return text


def plan_geometry(
    architecture: Architecture, ratio: float, keep_first_layers: int, keep_last_layers: int, multiple_of: int = 1
) -> Geometry:
    """Units kept per cut layer: removes ceil(ratio·neurons) and floor(ratio·KV groups), leaving at least one.

    `multiple_of` rounds the neurons kept to the nearest multiple (at least one, at most all).

    Raises:
        RecipeError: ratio > 0, but the layers kept whole leave none to cut.
    """
    if ratio == 0:
        return Geometry({unit: architecture.units(unit) for unit in UNITS}, range(0))
    layers = range(keep_first_layers, architecture.layers - keep_last_layers)
    if not layers:
        raise RecipeError(
            f"prune: the model has {architecture.layers} layers, and keep_first_layers={keep_first_layers} with "
            f"keep_last_layers={keep_last_layers} leaves none to cut.",
            fix="Lower them, or set prune.ratio to 0.",
        )
    # 1e-9 keeps a ratio like 0.35 (just below 7/20 in binary) from falling on the wrong side of a whole number.
    neurons = architecture.neurons - math.ceil(ratio * architecture.neurons - 1e-9)
    groups = architecture.kv_groups - math.floor(ratio * architecture.kv_groups + 1e-9)
    if multiple_of > 1:
        neurons = max(1, round(neurons / multiple_of)) * multiple_of
    kept: dict[Unit, int] = {
        "kv_group": max(1, groups),
        "neuron": min(architecture.neurons, max(1, neurons)),
    }
    return Geometry(kept, layers)


def recipe_geometry(architecture: Architecture, prune: PruneSection, ratio: float | None = None) -> Geometry:
    """`plan_geometry` by the recipe, at its ratio or another; raises what that raises."""
    chosen = prune.ratio if ratio is None else ratio
    found = plan_geometry(architecture, chosen, prune.keep_first_layers, prune.keep_last_layers, prune.multiple_of)
    return replace(
        found,
        factored=FACTORED[prune.method],
        multiple_of=prune.multiple_of,
        across_layers=prune.budget == "model",
    )
