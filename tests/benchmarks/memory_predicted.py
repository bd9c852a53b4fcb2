"""The memory of a training step: what `loram.memory.training` computes against what a real step takes.

    .venv/bin/python -m tests.benchmarks.memory_predicted

Small models of several geometries, every layer pruned to another width, are trained for two steps through the
project's own loading, adapter and loss; of the second step every tensor is counted. Exits with 1 if weights, adapter,
gradients or optimizer state differ by a byte, or activations or the peak by more than a tenth.
"""

from __future__ import annotations

import gc
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loram.adapter.attach import attach
from loram.memory.tracker import AllocatedBytes, LiveBytes, saved_bytes, tensor_bytes
from loram.memory.training import TrainingMemory, TrainingSetup, training_memory
from loram.models.architecture import UNITS
from loram.models.discover import traced_shape
from loram.models.loading import Precision, load_model
from loram.models.pruned import CONFIG_KEY, load_config, model_class
from loram.models.shape import ModelShape, Widths, whole_units
from loram.pruning.geometry import plan_geometry
from loram.recipe import TrainSection
from loram.training.activations import prepare_activations
from loram.training.loss import summed_nll
from tests.conftest import make_model

TOLERANCE = 0.10
_SEGMENT = 48  # tokens of an example in a packed row
_DTYPES = {2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True)
class Case:
    """A geometry and how it is trained; `factored`: linears of the first layers are two of low rank each."""

    name: str
    config: dict[str, Any]
    setup: TrainingSetup
    factored: bool = False
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _DTYPES[self.setup.compute_bytes])


@dataclass(frozen=True)
class Measured:
    """Bytes of a real step; `saved` is None where checkpointing hides what is saved."""

    weights: int
    adapter: int
    gradients: int
    optimizer: int
    after_forward: int
    saved: int | None
    peak: int
    live_peak: int


def build(folder: Path, case: Case, seed: int = 0) -> tuple[ModelShape, Widths]:
    """A model folder with random weights, every layer pruned to random units, and its sizes."""
    base = make_model(folder / "base", dtype=case.dtype, **case.config)
    config = load_config(base)
    shape = traced_shape(config)
    architecture = shape.architecture
    dice = random.Random(seed)
    groups, neurons = architecture.kv_groups, architecture.neurons
    widths = Widths(
        architecture,
        tuple(dice.randint(1, groups) for _ in range(architecture.layers)),
        tuple(dice.randint(neurons // 4, neurons) for _ in range(architecture.layers)),
    )
    if case.factored:
        ranks = replace(plan_geometry(architecture, 0.5, 0, 0), factored=frozenset(UNITS)).ranks(architecture)
        whole, last = whole_units(architecture), architecture.layers - 1
        widths = Widths(
            architecture,
            (whole["kv_group"],) * last + widths.kv_groups[last:],
            (whole["neuron"],) * last + widths.neurons[last:],
            (ranks,) * last + ({},),
        )
    setattr(config, CONFIG_KEY, widths.to_config())
    torch.manual_seed(seed)
    model = model_class(config)(config)
    model.to(case.dtype).save_pretrained(folder / "pruned")
    return shape, widths


def prepare(folder: Path, case: Case, widths: Widths) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model as the stages load it, with its adapter and optimizer."""
    setup = case.setup
    model: Any = load_model(
        folder / "pruned", Precision(case.dtype, setup.quantizer, setup.double_quant, setup.quantize_embeddings)
    )
    if setup.method == "align":
        for name in (widths.architecture.embedding, widths.architecture.head):
            model.get_submodule(name).weight.requires_grad_(False)
    recomputing = TrainSection(
        activation_checkpointing=setup.activation_checkpointing, checkpoint_every=setup.checkpoint_every
    )
    prepare_activations(model, recomputing, adapter=setup.method == "adapter")
    if setup.method == "adapter":
        targets = "all" if setup.targets == "all" else list(setup.targets)
        section = TrainSection(
            lora_r=setup.lora_r,
            target_modules=targets,
            lora_lm_head=setup.lora_head,
            use_dora=setup.dora,
            lora_embedding=setup.lora_embedding,
            rank_pattern=dict(setup.rank_pattern),
            modules_to_save=[
                name for name, saved in (("embedding", setup.saved_embedding), ("lm_head", setup.saved_head)) if saved
            ],
            lora_dropout=0.1 if setup.lora_dropout else 0.0,
        )
        model = attach(model, widths.architecture, section)
    model.train()
    if setup.autocast:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)  # of training in another dtype, earlier in this process
        model = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)
    return model, _optimizer(model, setup)


def _optimizer(model: nn.Module, setup: TrainingSetup) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if setup.optimizer == "adamw_torch":
        return torch.optim.AdamW(parameters)
    import bitsandbytes

    bits = 8 if setup.optimizer.endswith("8bit") else 32
    for module in model.modules():  # as the Trainer does
        if isinstance(module, nn.Embedding):
            manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
            manager.register_module_override(module, "weight", {"optim_bits": 32})
    paged = setup.optimizer.startswith("paged")
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW(parameters, optim_bits=bits, is_paged=paged)
    return optimizer


def batch_of(case: Case, vocabulary: int) -> dict[str, torch.Tensor]:
    """Packed rows with labels on the last positions."""
    setup = case.setup
    shape = (setup.batch, setup.length)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, shape, generator=generator)
    positions = torch.arange(setup.length)
    labels = ids.clone()
    labels[:, : setup.length - setup.labelled // setup.batch] = -100
    return {
        "input_ids": ids,
        "position_ids": (positions % _SEGMENT if setup.packed else positions).expand(shape).contiguous(),
        "labels": labels,
    }


def measure(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor], accumulating: bool = False
) -> Measured:
    """Two steps as they come, then one more for each way of counting: all are alike from the second on."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = 0

    def step(forward_done: Callable[[], None] = lambda: None) -> None:
        nonlocal gradients
        if accumulating:
            first, _ = summed_nll(model, batch)
            first.backward()
            del first
        nll, count = summed_nll(model, batch)
        loss = nll / count
        del nll
        forward_done()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        gradients = tensor_bytes(parameter.grad for parameter in trained if parameter.grad is not None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    step()
    saved_total = None
    if not any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        with saved_bytes(model, *batch.values()) as saved:
            summed_nll(model, batch)
        saved_total = saved.total
    gc.collect()
    gc.disable()  # what a step frees is freed by reference count, at the moment it would be
    try:
        with AllocatedBytes() as allocated:
            step()
        after_forward = 0
        with LiveBytes() as live:

            def note() -> None:
                nonlocal after_forward
                after_forward = live.current - (gradients if accumulating else 0)

            step(note)
    finally:
        gc.enable()
    trainable = {name for name, _ in model.named_parameters() if "lora_" in name or ".modules_to_save." in name}
    lora = [parameter for name, parameter in model.named_parameters() if name in trainable]
    own = [p for name, p in model.named_parameters() if name not in trainable] + list(model.buffers())
    weights, adapter, state = tensor_bytes(own), tensor_bytes(lora), tensor_bytes(_state(optimizer))
    resident = weights + adapter + state + tensor_bytes(batch.values())
    return Measured(
        weights, adapter, gradients, state, after_forward, saved_total, resident + allocated.peak, resident + live.peak
    )


def _state(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


@dataclass(frozen=True)
class Line:
    """One quantity, computed and measured; `limit` is the relative error allowed."""

    name: str
    predicted: int
    measured: int
    limit: float

    @property
    def error(self) -> float:
        return (self.predicted - self.measured) / self.measured if self.measured else float(self.predicted != 0)

    @property
    def good(self) -> bool:
        return abs(self.error) <= self.limit


def compare(predicted: TrainingMemory, measured: Measured) -> list[Line]:
    """Every component. `step peak` is the peak without what is resident, which would hide errors."""
    resident = measured.weights + measured.adapter + measured.optimizer
    lines = [
        Line("weights", predicted.weights, measured.weights, 0),
        Line("adapter", predicted.adapter, measured.adapter, 0),
        Line("gradients", predicted.gradients, measured.gradients, 0),
        Line("optimizer", predicted.optimizer, measured.optimizer, 0),
        Line("after forward", predicted.after_forward, measured.after_forward, TOLERANCE),
        Line("step peak", predicted.peak - predicted.resident, measured.peak - resident, TOLERANCE),
        Line("peak", predicted.peak, measured.peak, TOLERANCE),
    ]
    if measured.saved is not None:
        lines.insert(4, Line("saved", predicted.after_forward, measured.saved, TOLERANCE))
    return lines


def run(case: Case) -> tuple[TrainingMemory, Measured, list[Line]]:
    """Builds, trains and compares one case."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape, widths = build(folder, case)
        model, optimizer = prepare(folder, case, widths)
        measured = measure(model, optimizer, batch_of(case, shape.vocabulary), case.setup.accumulating)
        predicted = training_memory(shape, widths, case.setup)
    return predicted, measured, compare(predicted, measured)


def _llama(**config: Any) -> dict[str, Any]:
    return {"num_hidden_layers": 4, **config}


MHA = _llama(
    hidden_size=256, num_attention_heads=8, num_key_value_heads=8, head_dim=32, intermediate_size=688, vocab_size=1024
)
GQA = _llama(
    hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=32, intermediate_size=512, vocab_size=512
)
WIDE = _llama(
    hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=2048, vocab_size=512
)
VOCABULARY = _llama(
    hidden_size=128, num_attention_heads=4, num_key_value_heads=4, head_dim=32, intermediate_size=256, vocab_size=16384
)
QWEN2 = {**GQA, "model_type": "qwen2", "tie_word_embeddings": True}
QWEN3 = {**GQA, "model_type": "qwen3", "num_key_value_heads": 4, "intermediate_size": 700}
BASE = TrainingSetup(batch=2, length=192, compute_bytes=4, device="cpu")
SMALL = replace(BASE, length=64, compute_bytes=2)
TINY = {"num_hidden_layers": 2, "hidden_size": 64, "num_key_value_heads": 2, "num_attention_heads": 4, "head_dim": 16}


def cases() -> list[Case]:
    plain = replace(BASE, activation_checkpointing=False)
    geometries = {"mha": MHA, "gqa": GQA, "wide": WIDE, "vocabulary": VOCABULARY, "qwen2": QWEN2, "qwen3": QWEN3}
    made = [Case(name, config, BASE) for name, config in geometries.items()]
    made += [Case(f"{name} plain", config, plain) for name, config in geometries.items()]
    made += [
        Case("every second", MHA, replace(BASE, checkpoint_every=2)),
        Case("long", {**GQA, "num_hidden_layers": 2}, replace(BASE, batch=1, length=512, labelled_positions=64)),
        Case("accumulating", MHA, replace(BASE, method="all", quantizer="none", accumulating=True)),
        Case("few labels", MHA, replace(plain, labelled_positions=10)),
        Case("8 bit", MHA, replace(BASE, optimizer="adamw_bnb_8bit", lora_r=64)),
        Case("paged 8 bit", WIDE, replace(BASE, optimizer="paged_adamw_8bit", lora_r=16)),
        Case("paged 32 bit", WIDE, replace(plain, optimizer="paged_adamw_32bit", quantizer="fp4", double_quant=False)),
        Case("head adapted", VOCABULARY, replace(BASE, lora_head=True, lora_dropout=True, labelled_positions=64)),
        Case("vocabulary 4 bit", VOCABULARY, replace(BASE, quantize_embeddings=True)),
        Case("4 bit adapted", VOCABULARY, replace(BASE, quantize_embeddings=True, lora_head=True)),
        Case("4 bit tied", QWEN2, replace(plain, quantize_embeddings=True, double_quant=False)),
        *(
            Case(name, WIDE, replace(BASE, quantizer=name, double_quant=False))
            for name in ("int8", "hqq4", "hqq3", "hqq2")
        ),
        Case("dora", MHA, replace(BASE, dora=True)),
        Case("dora plain", GQA, replace(plain, dora=True)),
        Case("dora head", VOCABULARY, replace(BASE, dora=True, lora_head=True, quantizer="none", lora_dropout=True)),
        Case("4 bit padded", {**GQA, "hidden_size": 72}, replace(BASE, quantize_embeddings=True, lora_head=True)),
        Case("patterns", GQA, replace(BASE, rank_pattern=(("layers.1.self_attn.q_proj", 40), ("down_proj", 2)))),
        Case("embedding", VOCABULARY, replace(BASE, lora_embedding=True, lora_head=True)),
        Case("saved", VOCABULARY, replace(BASE, saved_embedding=True, saved_head=True)),
        Case("saved 8 bit", VOCABULARY, replace(plain, saved_embedding=True, optimizer="adamw_bnb_8bit")),
        Case("q and v", GQA, replace(plain, targets=("q_proj", "v_proj"), quantizer="none")),
        Case("unpacked", GQA, replace(plain, packed=False)),
        Case("fused", {**GQA, "num_hidden_layers": 2, "model_type": "phi3"}, plain),
        Case("low rank", GQA, BASE, factored=True),
        Case("low rank plain", QWEN2, replace(plain, quantizer="none"), factored=True),
        Case("low rank dora", MHA, replace(plain, dora=True), factored=True),
        Case("align", GQA, replace(BASE, method="align", quantizer="none")),
        Case("all", QWEN3, replace(plain, method="all", quantizer="none", optimizer="adamw_torch")),
        Case("bf16", {**GQA, **TINY}, SMALL),
        Case("bf16 plain", {**QWEN3, **TINY}, replace(SMALL, activation_checkpointing=False)),
        Case(
            "bf16 whole",
            {**GQA, **TINY},
            replace(SMALL, quantizer="none", activation_checkpointing=False, lora_head=True, lora_dropout=True),
        ),
        Case("bf16 dora", {**GQA, **TINY}, replace(SMALL, dora=True)),
        Case("bf16 saved", {**GQA, **TINY}, replace(SMALL, saved_head=True, lora_embedding=True)),
        Case("bf16 align", {**MHA, **TINY}, replace(SMALL, method="align", quantizer="none")),
    ]
    return made


def main() -> None:
    torch.set_num_threads(1)
    failed = 0
    print(f"{'case':14} {'component':14} {'predicted':>13} {'measured':>13} {'error':>8}")
    chosen = sys.argv[1:]
    for case in cases():
        if chosen and case.name not in chosen:
            continue
        _, measured, lines = run(case)
        for line in lines:
            failed += not line.good
            mark = "" if line.good else "  WRONG"
            print(f"{case.name:14} {line.name:14} {line.predicted:13,} {line.measured:13,} {line.error:8.2%}{mark}")
        print(f"{case.name:14} {'seen by ops':14} {'':13} {measured.live_peak:13,}", flush=True)
    print(f"{failed} wrong" if failed else "all within their limits")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
