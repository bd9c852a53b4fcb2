"""W0 + s·B·A onto the base model, tensor by tensor: the sum in float32, cast once to the base's dtype.

Always the original base underneath, never pruned, aligned or 4-bit weights. Shard names, tokenizer, chat template and
generation config stay the base's own.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from loram.adapter.folder import Adapter
from loram.checkpoint import CheckpointReader, CheckpointWriter, copy_side_files
from loram.checkpoint.writer import TensorSpec
from loram.errors import InputError, WrongBaseError
from loram.models.architecture import Architecture
from loram.models.pruned import load_config, widths_of
from loram.models.tying import head_tying
from loram.progress import track

# Elements of a weight that are summed at a time; bounds the float32 work space to a few times 64 MiB.
_BLOCK = 16 << 20


def merged_tensor(weight_OI: torch.Tensor, a_RI: torch.Tensor, b_OR: torch.Tensor, scale: float) -> torch.Tensor:
    """W + s·(B·A) in float32, cast once to W's dtype; a block of rows at a time."""
    out = torch.empty_like(weight_OI)
    a_RI = a_RI.float()
    rows = max(1, _BLOCK // weight_OI.shape[1])
    for start in range(0, weight_OI.shape[0], rows):
        block = slice(start, start + rows)
        delta = (b_OR[block].float() @ a_RI) * scale
        out[block] = (weight_OI[block].float() + delta).to(out.dtype)
    return out


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
    for specs in layout.values():
        specs.sort(key=lambda spec: reader.info(origin[spec.name]).begin)
    changed = 0
    modules = {f"{module}.weight": module for module in adapter.modules}
    with CheckpointWriter(folder, dict(sorted(layout.items()))) as writer:
        for spec in track(writer.specs, "merge", "tensors"):
            if spec.name in adapter.saved:
                tensor = adapter.reader.read(adapter.saved[spec.name]).to(spec.dtype)
            else:
                tensor = reader.read(origin[spec.name])
            if spec.name in modules:
                module = modules[spec.name]
                base = tensor
                tensor = merged_tensor(base, *adapter.factors(module), adapter.scale(module))
                changed += not torch.equal(base, tensor)
            elif spec.name in adapter.saved:
                changed += 1
            writer.write(spec.name, tensor)
    if changed == 0:
        raise InputError(
            "The merged model equals its base: every change is lost in rounding.",
            fix=f"Train longer or with a larger learning rate; the base's dtype is {raw_config.get('dtype')}.",
        )
    if changed < len(touched):
        notes.append(f"{len(touched) - changed} adapted tensors are unchanged: their delta is below rounding")
    copy_side_files(reader.folder, folder)
    (folder / "config.json").write_text(json.dumps(raw_config, indent=2) + "\n", encoding="utf-8")
    return writer.digests, notes, changed


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
