"""The sizes of a model as numbers alone, whole or pruned: what memory and disk plans are computed from.

Imports neither torch nor transformers, so a plan is there at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loram.models.architecture import UNITS, Architecture, Projection, Unit

PRODUCT_ROWS = 1024
"""Rows of U·V that exist at a time where the product itself is asked for."""


@dataclass(frozen=True)
class Matrix:
    """A stored matrix of a projection, [rows, columns]; `bias`: [rows] beside it."""

    rows: int
    columns: int
    bias: bool

    @property
    def parameters(self) -> int:
        return self.rows * self.columns + self.rows * self.bias


@dataclass(frozen=True)
class Widths:
    """What each layer of a small model has left.

    `kv_groups` and `neurons`: units. `ranks`: of the projections that are two factors, by name; empty where none is.
    """

    architecture: Architecture
    kv_groups: tuple[int, ...]
    neurons: tuple[int, ...]
    ranks: tuple[Mapping[str, int], ...] = ()

    def units(self, layer: int) -> dict[Unit, int]:
        return {"kv_group": self.kv_groups[layer], "neuron": self.neurons[layer]}

    def rank(self, layer: int, projection: Projection) -> int | None:
        """Of the two factors that a projection is; None where it is one matrix."""
        return self.ranks[layer].get(projection.name) if self.ranks else None

    def matrices(self, layer: int, projection: Projection) -> list[Matrix]:
        """What a projection is stored as: one matrix, or V and U."""
        rows, columns = projection.shape(self.units(layer)[projection.unit])
        rank = self.rank(layer, projection)
        if rank is None:
            return [Matrix(rows, columns, projection.bias)]
        return [Matrix(rank, columns, False), Matrix(rows, rank, projection.bias)]

    def parameters(self) -> int:
        """Of all projections of all layers."""
        return sum(
            matrix.parameters
            for layer in range(self.architecture.layers)
            for projection in self.architecture.projections
            for matrix in self.matrices(layer, projection)
        )

    def removed_parameters(self) -> int:
        """Parameters that the whole model has more."""
        return Widths.whole(self.architecture).parameters() - self.parameters()

    @classmethod
    def whole(cls, architecture: Architecture) -> Widths:
        """Nothing cut."""
        layers = architecture.layers
        return cls(architecture, (architecture.kv_groups,) * layers, (architecture.neurons,) * layers)

    def to_config(self) -> dict[str, Any]:
        """What stands under `loram` in a pruned model's config.json."""
        config = {
            "architecture": self.architecture.to_dict(),
            "kv_groups": list(self.kv_groups),
            "neurons": list(self.neurons),
        }
        return config | {"ranks": [dict(of) for of in self.ranks]} if self.ranks else config

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> Widths:
        """The inverse of `to_config`."""
        architecture = Architecture.from_dict(raw["architecture"])
        return cls(architecture, tuple(raw["kv_groups"]), tuple(raw["neurons"]), tuple(raw.get("ranks", ())))


@dataclass(frozen=True)
class ModelShape:
    """A whole model in numbers.

    `layer_norms` and `final_norm` count the parameters of one decoder layer outside its projections, and of what
    follows the last layer. `tied`: embedding and head are one matrix of [vocabulary, hidden]. `windows`: how many
    tokens back each layer sees, 0 for all of them; empty where all layers see all.
    """

    architecture: Architecture
    hidden: int
    vocabulary: int
    head_dim: int
    tied: bool
    layer_norms: int
    final_norm: int
    windows: tuple[int, ...] = ()

    def projections(self, widths: Widths, layer: int) -> list[tuple[Projection, int, int]]:
        """(projection, out features, in features) of a layer at its widths, in one matrix or two."""
        units = widths.units(layer)
        return [(p, *p.shape(units[p.unit])) for p in self.architecture.projections]

    @property
    def vocabulary_matrices(self) -> int:
        """1 where embedding and head are tied, else 2."""
        return 1 if self.tied else 2

    def parameters(self, widths: Widths | None = None) -> int:
        """All parameters, a tied matrix once; of the whole model, or at the widths of a pruned one."""
        widths = widths or Widths.whole(self.architecture)
        norms = self.layer_norms * self.architecture.layers + self.final_norm
        return widths.parameters() + norms + self.vocabulary_matrices * self.vocabulary * self.hidden


def whole_units(architecture: Architecture) -> dict[Unit, int]:
    """Units of each kind in one whole layer."""
    return {unit: architecture.units(unit) for unit in UNITS}
