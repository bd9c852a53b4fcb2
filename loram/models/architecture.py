"""The one table of a decoder layer's projections: which axis of each is cut, in which units.

Everything that slices, scatters, counts or reports reads this table; nothing else spells out a projection's name
(but `loram.models.tables`, which writes this table for common model types without tracing).

Shape suffixes: O out features, I in features.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Unit = Literal["kv_group", "neuron"]
UNITS: tuple[Unit, ...] = ("kv_group", "neuron")


@dataclass(frozen=True)
class Cut:
    """A slab of a projection's cut axis that is made of units laid end to end.

    `offset` is where the slab begins on the axis, `extent` how many rows or columns one unit takes. A plain
    q_proj has one slab; a fused qkv_proj has three, all of unit `kv_group`.
    """

    unit: Unit
    offset: int
    extent: int


@dataclass(frozen=True)
class Projection:
    """A linear of a decoder layer, weight `w_OI`.

    `name` is relative to the layer (`self_attn.q_proj`); `axis` is 0 when rows are cut (with their biases), 1
    when columns are (the bias stays whole).
    """

    name: str
    out_features: int
    in_features: int
    bias: bool
    axis: Literal[0, 1]
    cuts: tuple[Cut, ...]

    @property
    def unit(self) -> Unit:
        return self.cuts[0].unit

    def index(self, kept_units: tuple[int, ...]) -> list[int]:
        """Rows or columns of the kept units, in order."""
        return [
            row
            for cut in self.cuts
            for unit in kept_units
            for row in range(cut.offset + unit * cut.extent, cut.offset + (unit + 1) * cut.extent)
        ]

    def shape(self, units: int) -> tuple[int, int]:
        """(out, in) features with that many units left."""
        width = units * sum(cut.extent for cut in self.cuts)
        return (width, self.in_features) if self.axis == 0 else (self.out_features, width)

    def parameters(self, units: int) -> int:
        """Weights and biases with that many units left."""
        out_features, in_features = self.shape(units)
        return out_features * in_features + (out_features if self.bias else 0)


@dataclass(frozen=True)
class Architecture:
    """What can be cut in a model, as data; discovered and proven in `loram.models.discover`.

    `kv_groups` and `neurons` are the units in one whole layer. `layers_prefix` is where the decoder layers live
    in the state dict (`model.layers`).
    """

    model_type: str
    layers: int
    layers_prefix: str
    kv_groups: int
    neurons: int
    query_heads_per_group: int
    embedding: str
    head: str
    projections: tuple[Projection, ...]

    def units(self, unit: Unit) -> int:
        """Units of a kind in one whole layer."""
        return self.kv_groups if unit == "kv_group" else self.neurons

    def module(self, layer: int, projection: Projection) -> str:
        """Full module name, `model.layers.3.self_attn.q_proj`."""
        return f"{self.layers_prefix}.{layer}.{projection.name}"

    def locate(self, module: str) -> tuple[int, Projection] | None:
        """The layer and projection a module name means, or None for anything that is not cut."""
        match = re.fullmatch(re.escape(self.layers_prefix) + r"\.(\d+)\.(.+)", module)
        if match is None or int(match[1]) >= self.layers:
            return None
        projection = next((p for p in self.projections if p.name == match[2]), None)
        return None if projection is None else (int(match[1]), projection)

    def layer_parameters(self, units: Mapping[Unit, int]) -> int:
        """Parameters of a layer's projections with those units left."""
        return sum(projection.parameters(units[projection.unit]) for projection in self.projections)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Architecture:
        """The inverse of `to_dict`."""
        projections = tuple(
            Projection(**{**item, "cuts": tuple(Cut(**cut) for cut in item["cuts"])}) for item in raw["projections"]
        )
        return cls(**{**raw, "projections": projections})
