"""The sizes of a model as numbers alone, whole or pruned: what memory and disk plans are computed from.

Imports neither torch nor transformers, so a plan is there at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loram.models.architecture import UNITS, Architecture, Projection, Unit


@dataclass(frozen=True)
class Widths:
    """Units left in each layer of a pruned model."""

    architecture: Architecture
    kv_groups: tuple[int, ...]
    neurons: tuple[int, ...]

    def units(self, layer: int) -> dict[Unit, int]:
        return {"kv_group": self.kv_groups[layer], "neuron": self.neurons[layer]}

    def removed_parameters(self) -> int:
        """Parameters that the cut takes away from the whole model."""
        full = self.architecture.layer_parameters(whole_units(self.architecture))
        layers = range(self.architecture.layers)
        return sum(full - self.architecture.layer_parameters(self.units(layer)) for layer in layers)

    @classmethod
    def whole(cls, architecture: Architecture) -> Widths:
        """Nothing cut."""
        layers = architecture.layers
        return cls(architecture, (architecture.kv_groups,) * layers, (architecture.neurons,) * layers)

    def to_config(self) -> dict[str, Any]:
        """What stands under `loram` in a pruned model's config.json."""
        return {
            "architecture": self.architecture.to_dict(),
            "kv_groups": list(self.kv_groups),
            "neurons": list(self.neurons),
        }

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> Widths:
        """The inverse of `to_config`."""
        return cls(Architecture.from_dict(raw["architecture"]), tuple(raw["kv_groups"]), tuple(raw["neurons"]))


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
        """(projection, out features, in features) of a layer at its widths."""
        units = widths.units(layer)
        return [(p, *p.shape(units[p.unit])) for p in self.architecture.projections]

    @property
    def vocabulary_matrices(self) -> int:
        """1 where embedding and head are tied, else 2."""
        return 1 if self.tied else 2

    def parameters(self, widths: Widths | None = None) -> int:
        """All parameters, a tied matrix once; of the whole model, or at the widths of a pruned one."""
        widths = widths or Widths.whole(self.architecture)
        layers = sum(self.architecture.layer_parameters(widths.units(i)) for i in range(self.architecture.layers))
        norms = self.layer_norms * self.architecture.layers + self.final_norm
        return layers + norms + self.vocabulary_matrices * self.vocabulary * self.hidden


def whole_units(architecture: Architecture) -> dict[Unit, int]:
    """Units of each kind in one whole layer."""
    return {unit: architecture.units(unit) for unit in UNITS}
