"""What a training step takes on a CUDA card, against what `loram.memory.training` predicts, and the headline.

    python -m tests.gpu.memory            # from the repository root; needs torch, transformers, peft, bitsandbytes

First several middle-sized geometries, then the LLaMA-2-70B of `recipes/llama-2-70b.yaml` cut at .85: random weights,
quantized layer by layer where they are made, so that nothing is read from disk; rank 8, one row of 512 tokens, a few
steps. Prints a table and one line of JSON. Exits with 1 if weights are not exact, a peak is off by more than a tenth,
or the headline's peak reaches 20 GB. Under ten minutes.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from loram.adapter.attach import attach
from loram.memory.tracker import tensor_bytes
from loram.memory.training import TrainingSetup, training_memory
from loram.models.loading import Precision, Slot, empty_model
from loram.models.pruned import CONFIG_KEY
from loram.models.shape import ModelShape, Widths
from loram.models.tables import known_shape
from loram.models.vocabulary import quantize_vocabulary
from loram.pruning.geometry import plan_geometry
from loram.recipe import TrainSection, load_recipe
from loram.training.loss import summed_nll

HEADLINE = Path(__file__).resolve().parents[2] / "recipes" / "llama-2-70b.yaml"
HEADLINE_LIMIT = 20e9
STEPS = 4


@dataclass(frozen=True)
class Result:
    """Bytes predicted and measured, and how long a step took."""

    name: str
    parameters: int
    predicted_weights: int
    measured_weights: int
    predicted_peak: int
    measured_peak: int
    losses: list[float]
    tokens_per_second: float

    @property
    def error(self) -> float:
        return self.predicted_peak / self.measured_peak - 1


def cut(shape: ModelShape, ratio: float) -> Widths:
    """The widths that a ratio leaves, with the paper's layers whole."""
    return plan_geometry(shape.architecture, ratio, 4, 2).widths(shape.architecture)


def build(config: dict[str, Any], widths: Widths, precision: Precision, device: torch.device) -> PreTrainedModel:
    """A pruned model with random weights, made and quantized on the device one matrix at a time."""
    settings = AutoConfig.for_model(**config)
    setattr(settings, CONFIG_KEY, widths.to_config())
    model = empty_model(settings, precision)
    generator = torch.Generator(device=device).manual_seed(0)
    shared: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.device.type != "meta":
                continue
            if id(parameter) in shared:
                module._parameters[name] = shared[id(parameter)]
            else:
                weight = torch.ones(parameter.shape, dtype=precision.dtype, device=device)
                if parameter.dim() == 2:
                    weight.normal_(0, 0.02, generator=generator)
                Slot(module, name, name, name).fill(weight)
                filled = module._parameters[name]
                assert filled is not None
                shared[id(parameter)] = filled
    model.to(device)
    if precision.quantize_embeddings:
        quantize_vocabulary(model, precision.quantizer, precision.double_quant)
    return model


def steps(model: Any, widths: Widths, setup: TrainingSetup, device: torch.device) -> tuple[list[float], int, float]:
    """Losses of a few steps, the peak bytes of the last ones, and seconds for a step."""
    if setup.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    section = TrainSection(lora_r=setup.lora_r, lora_lm_head=setup.lora_head)
    adapted = attach(model, widths.architecture, section).train()
    AcceleratorState._reset_state(reset_partial_state=True)  # of training in another dtype, earlier in this process
    adapted = Accelerator(mixed_precision="bf16", cpu=device.type == "cpu").prepare_model(adapted)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.randint(0, vocabulary, (setup.batch, setup.length), device=device)
    positions = (torch.arange(setup.length, device=device) % (setup.length // 2)).expand_as(ids).contiguous()
    batch = {"input_ids": ids, "position_ids": positions, "labels": ids}
    losses, began, peak = [], 0.0, 0
    for step in range(STEPS):
        if step == 2:  # the optimizer state exists, kernels are chosen
            _reset(device)
            began = time.perf_counter()
        nll, count = summed_nll(adapted, batch)
        (nll / count).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(nll.detach() / count))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
    return losses, peak, (time.perf_counter() - began) / (STEPS - 2)


def _reset(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def measure(name: str, config: dict[str, Any], ratio: float, setup: TrainingSetup, device: torch.device) -> Result:
    """Builds, trains a few steps and compares; what was allocated before is subtracted."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    shape = known_shape(config)
    assert shape is not None
    widths = cut(shape, ratio)
    precision = Precision(torch.bfloat16, setup.quantizer, setup.double_quant, setup.quantize_embeddings)
    model = build(config, widths, precision, device)
    weights = tensor_bytes([*model.parameters(), *model.buffers()])
    losses, peak, seconds = steps(model, widths, setup, device)
    predicted = training_memory(shape, widths, setup)
    return Result(
        name, shape.parameters(widths), predicted.weights, weights, predicted.peak, peak - before, losses,
        setup.tokens / seconds,
    )  # fmt: skip


def cases() -> list[tuple[str, dict[str, Any], float, TrainingSetup]]:
    """(name, config, ratio, setup); the headline last."""
    recipe = load_recipe(HEADLINE)
    whole = recipe.model.config
    middle = whole | {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
    base = TrainingSetup(batch=1, length=512, device="cuda")
    deep = middle | {"num_hidden_layers": 12, "num_key_value_heads": 32}
    grouped = middle | {"num_hidden_layers": 10, "num_key_value_heads": 4, "vocab_size": 128256}
    qwen = grouped | {"model_type": "qwen3", "head_dim": 128}
    return [
        ("mha", deep, 0.5, replace(base, batch=4)),
        ("mha, nothing recomputed", deep, 0.5, replace(base, activation_checkpointing=False)),
        ("gqa, 128k words", grouped, 0.75, replace(base, lora_head=True)),
        ("gqa, vocabulary in 4 bits", grouped, 0.75, replace(base, lora_head=True, quantize_embeddings=True)),
        ("qwen3, 2048 tokens", qwen, 0.5, replace(base, length=2048)),
        ("LLaMA-2-70B at .85", whole, recipe.prune.ratio, replace(base, lora_head=True, quantize_embeddings=True)),
    ]


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("No CUDA card here. The logic is tested on the CPU by tests/unit/test_gpu_scripts.py.")
    device = torch.device("cuda")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    results, good = [], True
    for name, config, ratio, setup in cases():
        result = measure(name, config, ratio, setup, device)
        results.append(result)
        exact = result.predicted_weights == result.measured_weights
        good &= exact and abs(result.error) <= 0.1 and all(map(math.isfinite, result.losses))
        print(
            f"{name:28} {result.parameters / 1e9:6.2f} B  weights {result.measured_weights / 1e9:6.2f} GB "
            f"({'exact' if exact else f'predicted {result.predicted_weights / 1e9:.2f}'})  "
            f"peak {result.measured_peak / 1e9:6.2f} GB, predicted {result.predicted_peak / 1e9:6.2f} "
            f"({result.error:+.1%})  {result.tokens_per_second:,.0f} tokens/s  loss {result.losses[-1]:.3f}",
            flush=True,
        )
    good &= results[-1].measured_peak < HEADLINE_LIMIT
    print(json.dumps([result.__dict__ for result in results]))
    sys.exit(not good)


if __name__ == "__main__":
    main()
