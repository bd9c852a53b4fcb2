"""What is kept of each layer, in base coordinates: data one can print, save and test before touching weights."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loram.errors import InputError, WrongBaseError
from loram.models.architecture import UNITS, Architecture, Projection, Unit
from loram.models.shape import Widths

PLAN_NAME = "plan.json"
# Format of plan.json; readers refuse another.
_FORMAT = 1


@dataclass(frozen=True)
class LayerPlan:
    """Sorted indices of the KV groups and FFN neurons that stay, in base coordinates, and ranks.

    Query heads follow from their KV group, so the two cannot disagree. `ranks`: of the projections that become two
    factors (`loram.models.factored`), by name.
    """

    kept_kv_groups: tuple[int, ...]
    kept_neurons: tuple[int, ...]
    ranks: Mapping[str, int] = field(default_factory=dict)

    def kept(self, unit: Unit) -> tuple[int, ...]:
        """Kept indices of a unit kind."""
        return self.kept_kv_groups if unit == "kv_group" else self.kept_neurons


@dataclass(frozen=True)
class PruningPlan:
    """A whole model's plan.

    `base` holds the base model's identity (`CheckpointReader.identity`), so that an adapter cannot be recovered
    or merged onto another model by mistake; `base_model` is the name people know it by.

    Raises:
        InputError: indices unsorted, repeated, out of range or none, ranks that no factors have, or a wrong number of
            layers.
    """

    architecture: Architecture
    layers: tuple[LayerPlan, ...]
    base_model: str
    base: Mapping[str, str]

    def __post_init__(self) -> None:
        if len(self.layers) != self.architecture.layers:
            raise InputError(f"The plan has {len(self.layers)} layers, its model {self.architecture.layers}.")
        for number, layer in enumerate(self.layers):
            for unit in UNITS:
                kept, total = layer.kept(unit), self.architecture.units(unit)
                sorted_once = all(a < b for a, b in itertools.pairwise(kept))
                if not kept or not sorted_once or kept[0] < 0 or kept[-1] >= total:
                    raise InputError(
                        f"The plan's layer {number} must keep sorted, distinct {unit} indices below {total}.",
                        fix="Use the plan.json that `loram prune` wrote, unchanged.",
                    )

            for name, rank in layer.ranks.items():
                projection = next((p for p in self.architecture.projections if p.name == name), None)
                if projection is None or not 0 < rank <= min(projection.shape(len(layer.kept(projection.unit)))):
                    raise InputError(
                        f"The plan's layer {number} gives '{name}' rank {rank}, which it cannot have.",
                        fix="Use the plan.json that `loram prune` wrote, unchanged.",
                    )

    @classmethod
    def identity(cls, architecture: Architecture, base_model: str, base: Mapping[str, str]) -> PruningPlan:
        """The plan that keeps everything."""
        layer = LayerPlan(tuple(range(architecture.kv_groups)), tuple(range(architecture.neurons)))
        return cls(architecture, (layer,) * architecture.layers, base_model, dict(base))

    @property
    def is_identity(self) -> bool:
        """True when the small model is the base."""
        return all(not self.is_cut(layer) and not of.ranks for layer, of in enumerate(self.layers))

    def is_cut(self, layer: int) -> bool:
        """True when some unit of the layer goes."""
        return any(len(self.layers[layer].kept(unit)) < self.architecture.units(unit) for unit in UNITS)

    def factored(self, layer: int) -> list[Projection]:
        """The projections of a layer that become two factors, in order."""
        return [p for p in self.architecture.projections if p.name in self.layers[layer].ranks]

    def widths(self) -> Widths:
        """What each layer has left."""
        return Widths(
            self.architecture,
            tuple(len(layer.kept_kv_groups) for layer in self.layers),
            tuple(len(layer.kept_neurons) for layer in self.layers),
            tuple(layer.ranks for layer in self.layers) if any(layer.ranks for layer in self.layers) else (),
        )

    def index(self, layer: int, projection: Projection) -> list[int]:
        """Base rows or columns of a projection that stay."""
        return projection.index(self.layers[layer].kept(projection.unit))

    def require_base(self, identity: Mapping[str, str], where: str) -> None:
        """Refuses a base model that is not the one the plan was made for (WrongBaseError)."""
        if identity != dict(self.base):
            same = identity.get("structure") == self.base.get("structure")
            difference = "the same shapes but other weights" if same else "other tensors or shapes"
            raise WrongBaseError(
                f"{where} is not the base model of this plan ({self.base_model}): it has {difference}.",
                fix="Set model.path to the model that was pruned.",
            )

    def save(self, folder: Path) -> None:
        """Writes plan.json."""
        raw = {
            "format": _FORMAT,
            "base_model": self.base_model,
            "base": dict(self.base),
            "architecture": self.architecture.to_dict(),
            "layers": [
                {"kept_kv_groups": layer.kept_kv_groups, "kept_neurons": layer.kept_neurons}
                | ({"ranks": dict(layer.ranks)} if layer.ranks else {})
                for layer in self.layers
            ],
        }
        (folder / PLAN_NAME).write_text(json.dumps(raw) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> PruningPlan:
        """Reads plan.json; InputError if it is missing or damaged."""
        path = folder / PLAN_NAME
        if not path.is_file():
            raise InputError(
                f"{folder} has no {PLAN_NAME}, so it is not a pruned model or its adapter.",
                fix="Give a folder written by loram prune, align or train.",
            )
        try:
            raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if raw["format"] != _FORMAT:
                raise InputError(f"{path} has format {raw['format']}; this version reads {_FORMAT}.")
            layers = tuple(
                LayerPlan(tuple(layer["kept_kv_groups"]), tuple(layer["kept_neurons"]), layer.get("ranks", {}))
                for layer in raw["layers"]
            )
            return cls(Architecture.from_dict(raw["architecture"]), layers, raw["base_model"], raw["base"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is not a plan: {error!r}", fix="Prune again, or copy the file again.") from error
