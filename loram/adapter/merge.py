"""An adapter onto its base model, a few rows at a time (`loram.adapter.rows`).

Always the original base underneath, never pruned, aligned or 4-bit weights. Shard names, tokenizer, chat template and
generation config stay the base's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from loram.adapter.folder import Adapter
from loram.adapter.rows import Change
from loram.checkpoint import Block, CheckpointReader, CheckpointWriter, TensorSpec, copy_side_files
from loram.checkpoint.overlap import grouped, in_order
from loram.errors import InputError, WrongBaseError
from loram.models.architecture import Architecture
from loram.models.pruned import load_config, widths_of
from loram.models.tying import head_tying
from loram.progress import track


@dataclass(frozen=True)
class Merged:
    """What a merge did.

    `digests`: sha256 of each shard. `notes`: for the user. `changed`: tensors that the adapter changed.
    `bytes_written`: what really went to the disk; less than the model where shards were cloned.
    """

    digests: dict[str, str]
    notes: list[str]
    changed: int
    bytes_written: int


def merge(reader: CheckpointReader, architecture: Architecture, adapter: Adapter, folder: Path) -> Merged:
    """Writes the merged model as a normal folder.

    Raises:
        WrongBaseError: the adapter names modules or shapes that the base has not.
        InputError: the base is itself quantized or pruned, or the adapter changes nothing.
    """
    config = load_config(reader.folder)
    if getattr(config, "quantization_config", None) is not None or widths_of(config) is not None:
        raise InputError(
            f"{reader.folder} is quantized or pruned; a merge needs the original base model.",
            fix="Set model.path to the full model in 16 or 32 bits.",
        )
    adapter.require_trained()
    notes: list[str] = []
    raw_config = json.loads((reader.folder / "config.json").read_text(encoding="utf-8"))
    embedding, head = f"{architecture.embedding}.weight", f"{architecture.head}.weight"
    tying = head_tying(reader, architecture, config)
    # Where a merged tensor's base values are read from: the head of a tied model is stored as the embedding.
    origin = {name: name for name in reader.tensors}
    touched = {f"{module}.weight" for module in adapter.modules} | set(adapter.saved)
    if tying != "untied" and touched & {head, embedding}:
        origin[head] = head if head in reader else embedding
        raw_config["tie_word_embeddings"] = False
        notes.append("the adapter changes a tied embedding or head: they are untied, and the head is stored on its own")
    elif tying == "copy":
        del origin[head]
    elif tying == "differs":
        raw_config["tie_word_embeddings"] = False
        notes.append("the base stores a head of its own although its config ties it: the flag is corrected")
    _require_fit(reader, adapter, origin)
    layout: dict[str, list[TensorSpec]] = {}
    for name, source in origin.items():
        info = reader.info(source)
        layout.setdefault(info.shard, []).append(TensorSpec(name, info.dtype, info.shape))
    layout = dict(sorted(layout.items()))
    for specs in layout.values():
        specs.sort(key=lambda spec: reader.info(origin[spec.name]).begin)
    changed: set[str] = set()
    targets = [(spec, origin[spec.name]) for specs in layout.values() for spec in specs]
    with (
        CheckpointWriter(folder, layout, base=reader) as writer,
        closing(in_order(_parts(reader, adapter, targets))) as stream,
    ):
        for spec, (_, blocks) in zip(track(writer.specs, "merge", "tensors"), grouped(stream), strict=True):
            writer.write(spec.name, _noting(changed, spec.name, blocks))
    if not changed:
        raise InputError(
            "The merged model equals its base: every change is lost in rounding.",
            fix=f"Train longer or with a larger learning rate; the base's dtype is {raw_config.get('dtype')}.",
        )
    if len(changed) < len(touched):
        notes.append(f"{len(touched) - len(changed)} adapted tensors are unchanged: their delta is below rounding")
    copy_side_files(reader.folder, folder)
    (folder / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n", encoding="utf-8")
    return Merged(writer.digests, notes, len(changed), writer.written)


def _parts(
    reader: CheckpointReader, adapter: Adapter, targets: Iterable[tuple[TensorSpec, str]]
) -> Iterator[Callable[[], tuple[str, Block]]]:
    """For every block to be written a function that reads it and adds the adapter's change.

    A block of which no bit differs from the base is `unchanged`.
    """
    for spec, source in targets:
        module = spec.name.removesuffix(".weight")
        if spec.name in adapter.saved:
            for part in adapter.reader.parts(adapter.saved[spec.name]):
                yield partial(_saved, spec, part)
        elif module in adapter.modules:
            change, count = Change.of(adapter, module), reader.block_rows(source)
            for number, part in enumerate(reader.parts(source)):
                yield partial(_changed, spec, part, change.rows(number * count, count))
        else:
            for part in reader.parts(source):
                yield partial(_copied, spec, part)


def _saved(spec: TensorSpec, part: Callable[[], Block]) -> tuple[str, Block]:
    return spec.name, Block(part().data.to(spec.dtype))


def _copied(spec: TensorSpec, part: Callable[[], Block]) -> tuple[str, Block]:
    return spec.name, replace(part(), unchanged=True)


def _changed(spec: TensorSpec, part: Callable[[], Block], change: Change) -> tuple[str, Block]:
    block = part()
    merged = change.merged(block.data)
    return spec.name, replace(block, unchanged=True) if torch.equal(merged, block.data) else Block(merged)


def _noting(changed: set[str], name: str, blocks: Iterable[Block]) -> Iterator[Block]:
    for block in blocks:
        if not block.unchanged:
            changed.add(name)
        yield block


def _require_fit(reader: CheckpointReader, adapter: Adapter, origin: dict[str, str]) -> None:
    """Every adapted tensor must be in the base with the shape the adapter has (WrongBaseError)."""
    expected: dict[str, tuple[int, ...]] = {f"{module}.weight": adapter.shape(module) for module in adapter.modules}
    expected |= {name: adapter.reader.info(key).shape for name, key in adapter.saved.items()}
    for name, shape in expected.items():
        actual = reader.info(origin[name]).shape if name in origin else None
        if actual != shape:
            found = "it has no such tensor" if actual is None else f"it is {list(actual)} there"
            raise WrongBaseError(
                f"The adapter changes '{name}' of shape {list(shape)}, but in {reader.folder} {found}.",
                fix="Merge the recovered adapter (loram recover) onto the model it was recovered for.",
            )
