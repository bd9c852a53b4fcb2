"""W0 + s·B·A onto the base model, a few rows at a time: the sum in float32, cast once to the base's dtype.

Always the original base underneath, never pruned, aligned or 4-bit weights. Shard names, tokenizer, chat template and
generation config stay the base's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from loram.adapter.folder import Adapter
from loram.checkpoint import Block, CheckpointReader, CheckpointWriter, TensorSpec, copy_side_files
from loram.checkpoint.overlap import ahead, grouped
from loram.errors import InputError, WrongBaseError
from loram.models.architecture import Architecture
from loram.models.pruned import load_config, widths_of
from loram.models.tying import head_tying
from loram.progress import track


def merged_rows(weight_OI: torch.Tensor, a_RI: torch.Tensor, b_OR: torch.Tensor, scale: float) -> torch.Tensor:
    """W + s·(B·A) in float32, cast once to W's dtype."""
    delta_OI = b_OR.float() @ a_RI.float()
    delta_OI.mul_(scale).add_(weight_OI)
    return delta_OI.to(weight_OI.dtype)


def merge(
    reader: CheckpointReader, architecture: Architecture, adapter: Adapter, folder: Path
) -> tuple[dict[str, str], list[str], int]:
    """Writes the merged model as a normal folder.

    Returns:
        sha256 of each shard; notes for the user; the number of tensors that the adapter changed.

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
    sources = [(spec.name, origin[spec.name]) for specs in layout.values() for spec in specs]
    with (
        CheckpointWriter(folder, layout, base=reader) as writer,
        closing(ahead(_base_blocks(reader, adapter, sources))) as stream,
    ):
        for spec, (_, blocks) in zip(track(writer.specs, "merge", "tensors"), grouped(stream), strict=True):
            merged = _merged(adapter, spec.dtype, spec.name, blocks)
            writer.write(spec.name, _noting(changed, spec.name, merged))
    if not changed:
        raise InputError(
            "The merged model equals its base: every change is lost in rounding.",
            fix=f"Train longer or with a larger learning rate; the base's dtype is {raw_config.get('dtype')}.",
        )
    if len(changed) < len(touched):
        notes.append(f"{len(touched) - len(changed)} adapted tensors are unchanged: their delta is below rounding")
    copy_side_files(reader.folder, folder)
    (folder / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n", encoding="utf-8")
    return writer.digests, notes, len(changed)


def _base_blocks(
    reader: CheckpointReader, adapter: Adapter, sources: Iterable[tuple[str, str]]
) -> Iterator[tuple[str, Block]]:
    """Blocks of every tensor to be written: the base's, or the adapter's where it saved the whole tensor."""
    for name, source in sources:
        saved = adapter.saved.get(name)
        blocks = reader.blocks(source) if saved is None else adapter.reader.blocks(saved)
        for block in blocks:
            yield name, block


def _merged(adapter: Adapter, dtype: torch.dtype, name: str, blocks: Iterable[Block]) -> Iterator[Block]:
    """The blocks with the adapter's change added; `unchanged` where not a bit of the block differs."""
    module = name.removesuffix(".weight")
    if name in adapter.saved:
        for block in blocks:
            yield Block(block.data.to(dtype))
    elif module not in adapter.modules:
        for block in blocks:
            yield replace(block, unchanged=True)
    else:
        a_RI, b_OR = (factor.float() for factor in adapter.factors(module))
        row = 0
        for block in blocks:
            rows = slice(row, row + len(block.data))
            row = rows.stop
            merged = merged_rows(block.data, a_RI, b_OR[rows], adapter.scale(module))
            same = torch.equal(merged, block.data)
            yield replace(block, unchanged=True) if same else Block(merged)


def _noting(changed: set[str], name: str, blocks: Iterable[Block]) -> Iterator[Block]:
    for block in blocks:
        if not block.unchanged:
            changed.add(name)
        yield block


def _require_fit(reader: CheckpointReader, adapter: Adapter, origin: dict[str, str]) -> None:
    """Every adapted tensor must be in the base with the shape the adapter has (WrongBaseError)."""
    expected: dict[str, tuple[int, ...]] = {
        f"{module}.weight": (
            adapter.reader.info(adapter.key(module, "B")).shape[0],
            adapter.reader.info(adapter.key(module, "A")).shape[1],
        )
        for module in adapter.modules
    }
    expected |= {name: adapter.reader.info(key).shape for name, key in adapter.saved.items()}
    for name, shape in expected.items():
        actual = reader.info(origin[name]).shape if name in origin else None
        if actual != shape:
            found = "it has no such tensor" if actual is None else f"it is {list(actual)} there"
            raise WrongBaseError(
                f"The adapter changes '{name}' of shape {list(shape)}, but in {reader.folder} {found}.",
                fix="Merge the recovered adapter (loram recover) onto the model it was recovered for.",
            )
