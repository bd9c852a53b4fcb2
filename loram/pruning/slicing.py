"""The cut itself: a base folder in, a smaller folder out, a few blocks of rows in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from loram.checkpoint import Block, CheckpointReader, CheckpointWriter, TensorInfo, TensorSpec, copy_side_files
from loram.checkpoint.overlap import grouped, in_order
from loram.checkpoint.reader import kept_shape
from loram.errors import CheckpointError
from loram.models.architecture import Architecture
from loram.models.pruned import CONFIG_KEY, load_config
from loram.models.tying import head_tying
from loram.pruning.plan import PruningPlan

# (rows or columns that stay, axis) of a tensor; all of them where that is None.
Cut = tuple[list[int] | None, int]
_WHOLE: Cut = (None, 0)
Progress = Callable[[Iterable[TensorInfo]], Iterable[TensorInfo]]


def write_pruned(
    reader: CheckpointReader,
    plan: PruningPlan,
    folder: Path,
    progress: Progress,
    factors: CheckpointReader | None = None,
) -> dict[str, str]:
    """Writes the small model as a normal folder: shards of the base's names and order, config, tokenizer, plan.

    Args:
        reader: the base.
        plan: what stays, and what becomes two factors.
        folder: where to write.
        progress: shows it.
        factors: holds those (`loram.pruning.factors`).

    Returns:
        sha256 of each shard.

    Raises:
        CheckpointError: a tensor the plan needs is missing or has another shape.
    """
    require_projections(reader, plan.architecture)
    tying = head_tying(reader, plan.architecture, load_config(reader.folder))
    dropped = f"{plan.architecture.head}.weight" if tying == "copy" else None
    sources = {
        shard: [source for info in infos if info.name != dropped for source in _sources(reader, plan, info, factors)]
        for shard, infos in reader.shards.items()
    }
    layout = {shard: [source.spec for source in of_shard] for shard, of_shard in sources.items()}
    listed = [source for of_shard in sources.values() for source in of_shard]
    with CheckpointWriter(folder, layout) as writer, closing(in_order(_parts(listed))) as stream:
        for info, (_, blocks) in zip(progress([source.info for source in listed]), grouped(stream), strict=True):
            writer.write(info.name, blocks)
    copy_side_files(reader.folder, folder)
    config = json.loads((reader.folder / "config.json").read_text(encoding="utf-8"))
    if tying == "differs":
        config["tie_word_embeddings"] = False
    if not plan.is_identity:
        config[CONFIG_KEY] = plan.widths().to_config()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    plan.save(folder)
    return writer.digests


@dataclass(frozen=True)
class _Source:
    """Where a tensor of the small model comes from."""

    reader: CheckpointReader
    info: TensorInfo
    cut: Cut = _WHOLE

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.info.name, self.info.dtype, kept_shape(self.info.shape, *self.cut))


def _sources(
    reader: CheckpointReader, plan: PruningPlan, info: TensorInfo, factors: CheckpointReader | None
) -> list[_Source]:
    """What stands in for a tensor of the base."""
    module, _, kind = info.name.rpartition(".")
    found = plan.architecture.locate(module)
    if found is None or kind != "weight" or found[1].name not in plan.layers[found[0]].ranks:
        return [_Source(reader, info, _cut(plan, info))]
    if factors is None:
        raise ValueError(f"'{info.name}' becomes two factors, and none were given")
    return [_Source(factors, factors.info(f"{module}.{name}.weight")) for name in ("v", "u")]


def _parts(sources: list[_Source]) -> Iterator[Callable[[], tuple[str, Block]]]:
    for source in sources:
        for part in source.reader.parts(source.info.name, *source.cut):
            yield lambda name=source.info.name, part=part: (name, part())  # type: ignore[misc]


def require_projections(reader: CheckpointReader, architecture: Architecture) -> None:
    """Checks that every projection is stored with the shape the config promises (CheckpointError)."""
    for layer in range(architecture.layers):
        for projection in architecture.projections:
            name = f"{architecture.module(layer, projection)}.weight"
            expected = (projection.out_features, projection.in_features)
            if reader.info(name).shape != expected:
                raise CheckpointError(
                    f"{reader.folder}: '{name}' is {list(reader.info(name).shape)}, config.json says {list(expected)}.",
                    fix="Give the original, unpruned and unquantized model.",
                )


def _cut(plan: PruningPlan, info: TensorInfo) -> Cut:
    """What to read of a tensor."""
    module, _, kind = info.name.rpartition(".")
    found = plan.architecture.locate(module)
    if found is None or not plan.is_cut(found[0]):
        return _WHOLE
    layer, projection = found
    if kind == "bias" and projection.axis == 1:
        return _WHOLE
    return plan.index(layer, projection), projection.axis if kind == "weight" else 0
