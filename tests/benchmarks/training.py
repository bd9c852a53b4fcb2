"""Tokens a second of training, against a plain script with PEFT and the Trainer, in the same run.

    .venv/bin/python -m tests.benchmarks.training qlora     # this project's step against PEFT's own layers
    .venv/bin/python -m tests.benchmarks.training dora      # the same with DoRA
    .venv/bin/python -m tests.benchmarks.training pruned    # the model cut by half against the whole one, both QLoRA

The model has SmolLM2-135M's widths and random weights; rows hold several examples of which the last part is learnt, as
chat data has it. Both sides get the same rows and the same first weights, and take turns, so that what else the machine
does falls on both; medians count. Peak memory is that of live tensors during a step. `--layers`, `--length`, `--batch`
and `--learnt` change the shapes, `--keep` keeps activations instead of computing them again.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig, Trainer, TrainingArguments

from loram.adapter.attach import attach, target_modules
from loram.memory.flops import token_flops
from loram.memory.plan import train_setup
from loram.memory.tracker import LiveBytes
from loram.models.discover import traced_shape
from loram.models.loading import Precision, load_model
from loram.models.pruned import CONFIG_KEY, load_config, model_class
from loram.models.shape import Widths
from loram.pruning.geometry import plan_geometry
from loram.recipe import TrainSection
from loram.training.activations import prepare_activations
from loram.training.steps import StepSampler
from loram.training.trainer import StepTrainer
from tests.conftest import make_model

SMOL = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
_SEGMENT = 128  # tokens of an example


class Side:
    """One way to train: a trainer, and a step that can be timed."""

    def __init__(self, trainer: Any, batch: dict[str, torch.Tensor]) -> None:
        self._trainer = trainer
        trainer.create_optimizer()
        self._model = trainer.accelerator.prepare_model(trainer.model)
        self._batch = batch
        self._labelled = torch.tensor(int((batch["labels"][:, 1:] != -100).sum()))
        self._trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self) -> None:
        """Forward, backward, clipping and the optimizer."""
        began = time.perf_counter()
        batch = {name: tensor.clone() for name, tensor in self._batch.items()}
        loss = self._trainer.training_step(self._model, batch, num_items_in_batch=self._labelled)
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._trainer.optimizer.step()
        self._trainer.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - began)
        self.losses.append(float(loss))

    def peak(self) -> int:
        """Bytes of tensors that a step adds to those that are there."""
        with LiveBytes() as live:
            self.step()
        self.seconds.pop()
        return live.peak


def model_folder(folder: Path, layers: int, ratio: float) -> tuple[Path, Any, Widths]:
    """A model of random weights at the widths that a ratio leaves; with its sizes and widths."""
    base = make_model(folder / "base", num_hidden_layers=layers, **SMOL)
    config = load_config(base)
    shape = traced_shape(config)
    widths = plan_geometry(shape.architecture, ratio, 0, 0).widths(shape.architecture)
    if ratio:
        setattr(config, CONFIG_KEY, widths.to_config())
        torch.manual_seed(0)
        model_class(config)(config).save_pretrained(folder / "pruned")
        base = folder / "pruned"
    return base, shape, widths


def rows(batch: int, length: int, learnt: float) -> dict[str, torch.Tensor]:
    """Packed rows whose examples end with what is learnt."""
    place = torch.arange(length) % _SEGMENT
    ids = torch.randint(3, SMOL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(0))
    labels = torch.where(place >= _SEGMENT * (1 - learnt), ids, -100)
    return {"input_ids": ids, "position_ids": place.expand(batch, length).contiguous(), "labels": labels}


def _arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        learning_rate=1e-3,
    )


def ours(folder: Path, section: TrainSection, batch: dict[str, torch.Tensor], scratch: Path) -> Side:
    """The model as the train stage makes it."""
    model = load_model(folder, Precision(torch.float32, "nf4"))
    prepare_activations(model, section, adapter=True)
    adapted = attach(model, traced_shape(load_config(folder)).architecture, section).train()
    count = len(batch["input_ids"])
    trainer = StepTrainer(
        steps=StepSampler(count, 0, count),
        micro_batch=count,
        section=section,
        after_step=lambda logs: None,
        model=adapted,
        args=_arguments(scratch),
        train_dataset=[],
    )
    tokens = torch.full((count,), batch["input_ids"].shape[1])
    return Side(trainer, batch | {"tokens": tokens})


def plain(folder: Path, section: TrainSection, batch: dict[str, torch.Tensor], scratch: Path) -> Side:
    """As a script would: transformers quantizes while it loads, PEFT brings the layers, the Trainer the loss."""
    config = load_config(folder)
    model = model_class(config).from_pretrained(
        str(folder),
        config=config,
        dtype=torch.float32,
        device_map={"": "cuda" if torch.cuda.is_available() else "cpu"},
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        ),
    )
    for module in model.modules():  # repacking for CPUs with AVX512 makes gradients wrong
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    model.config.use_cache = False
    if section.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    torch.manual_seed(section.seed)
    adapted = get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=section.lora_r,
            lora_alpha=section.lora_alpha,
            use_dora=section.use_dora,
            target_modules=target_modules(traced_shape(config).architecture, section),
        ),
    ).train()
    return Side(Trainer(model=adapted, args=_arguments(scratch), train_dataset=[]), batch)


def compare(sides: dict[str, Callable[[], Side]], tokens: int, steps: int, warmup: int = 2) -> dict[str, float]:
    """Median tokens a second of each side, taking turns on steps of `tokens`; prints them with the peak memory."""
    made = {name: make() for name, make in sides.items()}
    for side in made.values():
        for _ in range(warmup):
            side.step()
    for _ in range(steps):
        for side in made.values():
            side.step()
    speeds = {}
    for name, side in made.items():
        speeds[name] = tokens / statistics.median(side.seconds[warmup:])
        print(
            f"{name:8} {speeds[name]:8.1f} tokens/s   step peak {side.peak() / 1e6:8.1f} MB   "
            f"losses {side.losses[0]:.4f} … {side.losses[warmup + steps - 1]:.4f}",
            flush=True,
        )
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["qlora", "dora", "pruned"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--learnt", type=float, default=0.3, help="share of tokens in the loss")
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="keep activations")
    chosen = parser.parse_args()
    section = TrainSection(
        lora_r=8,
        use_dora=chosen.what == "dora",
        activation_checkpointing=not chosen.keep,
        per_device_train_batch_size=chosen.batch,
        max_length=chosen.length,
    )
    batch = rows(chosen.batch, chosen.length, chosen.learnt)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small, shape, widths = model_folder(folder / "small", chosen.layers, chosen.ratio)
        if chosen.what != "pruned":
            sides = {
                name: partial(make, small, section, batch, folder) for name, make in (("plain", plain), ("here", ours))
            }
            speeds = compare(sides, batch["input_ids"].numel(), chosen.steps)
            print(f"{speeds['here'] / speeds['plain']:.2f} × the plain script")
            return
        whole, _, all_widths = model_folder(folder / "whole", chosen.layers, 0.0)
        sides = {
            name: partial(ours, each, section, batch, folder) for name, each in (("whole", whole), ("pruned", small))
        }
        speeds = compare(sides, batch["input_ids"].numel(), chosen.steps)
        setup = train_setup(section, shape.architecture, 4, "cpu")
        flops = [token_flops(shape, each, setup).step for each in (all_widths, widths)]
        print(f"{speeds['pruned'] / speeds['whole']:.2f} × as fast, at {flops[0] / flops[1]:.2f} × fewer operations")


if __name__ == "__main__":
    main()
