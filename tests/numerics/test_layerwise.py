"""One layer in memory at a time against the whole model, forwards and backwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loram.errors import NoRoomError
from loram.models import layerwise
from loram.models.discover import discover
from loram.models.layerwise import LayerwiseModel
from loram.models.loading import Precision, load_model
from loram.models.pruned import load_config
from loram.pruning.scores import activation_scores
from loram.training.loss import summed_nll
from tests.conftest import make_model
from tests.numerics.test_pruned_forward import prune
from tests.numerics.test_recover_merge import trained_adapter

FAMILIES: dict[str, dict[str, Any]] = {
    "llama tied": {"tie_word_embeddings": True, "num_hidden_layers": 3},
    "mistral sliding": {"model_type": "mistral", "sliding_window": 5},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "gemma2": {"model_type": "gemma2", "tie_word_embeddings": True, "sliding_window": 4},
    "gemma3": {"model_type": "gemma3_text", "tie_word_embeddings": True, "sliding_window": 4, "num_hidden_layers": 3},
    "phi3": {"model_type": "phi3"},
    "granite": {"model_type": "granite", "logits_scaling": 3.0, "residual_multiplier": 0.5},
    "smollm3": {"model_type": "smollm3"},
}


def packed_batches() -> list[dict[str, torch.Tensor]]:
    """Three batches, each row two examples: positions restart, prompts are not in the loss."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for rows, split in ((2, 4), (1, 7), (2, 9)):
        ids = torch.randint(3, 270, (rows, 12), generator=generator)
        labels = ids.clone()
        labels[:, [0, 1, split, split + 1]] = -100
        positions = torch.cat([torch.arange(split), torch.arange(12 - split)]).expand(rows, 12)
        batches.append({"input_ids": ids, "position_ids": positions.contiguous(), "labels": labels})
    return batches


def whole(model: nn.Module, batches: list[dict[str, torch.Tensor]], scale: float) -> list[float]:
    """Negative log-likelihoods and gradients by the ordinary way."""
    results = []
    for batch in batches:
        total, _ = summed_nll(model, batch)
        if total.requires_grad:
            (total * scale).backward()
        results.append(float(total))
    return results


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("memory", ["plenty", "scarce"])
def test_likelihood_and_gradients_equal_the_whole_model(tmp_path: Path, family: str, memory: str) -> None:
    base = make_model(tmp_path / "base", **FAMILIES[family])
    batches = packed_batches()
    reference = load_model(base, torch.float32)
    expected = whole(reference, batches, 0.25)
    gradients: dict[str, torch.Tensor] = {}
    state = {name: p for name, p in reference.named_parameters() if "proj" in name}

    @contextlib.contextmanager
    def collect(number: int, module: nn.Module) -> Iterator[None]:
        yield
        if 0 <= number < reference.config.num_hidden_layers:
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    gradients[f"model.layers.{number}.{name}"] = parameter.grad.clone()

    budget = 10**9 if memory == "plenty" else 160_000
    with LayerwiseModel(
        base, Precision(torch.float32), budget, tmp_path / "spill", trains=lambda name: "proj" in name
    ) as engine:
        got = [total for total, _ in engine.nll(batches)]
        assert got == pytest.approx(expected, rel=1e-5)
        again = [total for total, _ in engine.backward(batches, 0.25, collect)]
        assert (engine.spilled > 0) == (memory == "scarce")
        assert all(parameter.device.type == "meta" for parameter in engine.model.parameters())
    assert again == pytest.approx(expected, rel=1e-5)
    assert not (tmp_path / "spill").exists()
    assert gradients.keys() == state.keys()
    for name, parameter in state.items():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_an_adapter_on_the_layers_equals_peft(tmp_path: Path, options: dict[str, Any]) -> None:
    from peft import PeftModel

    base = make_model(tmp_path / "base")
    folder = trained_adapter(
        base, tmp_path / "adapter", r=4, lora_alpha=9, target_modules=["q_proj", "o_proj", "down_proj"], **options
    )
    batches = packed_batches()
    reference = PeftModel.from_pretrained(load_model(base, torch.float32), str(folder), is_trainable=True)
    expected = whole(reference, batches, 1.0)
    with LayerwiseModel(
        base, Precision(torch.float32), 10**9, tmp_path, adapter=folder, trains=lambda name: ".default" in name
    ) as engine:
        assert [total for total, _ in engine.nll(batches)] == pytest.approx(expected, rel=1e-5)
        engine.backward(batches, 1.0)
        ours = {n: p for n, p in engine.model.named_parameters() if p.requires_grad}
        theirs = {n.removeprefix("base_model.model."): p for n, p in reference.named_parameters() if p.requires_grad}
        assert ours.keys() == theirs.keys()
        for name, parameter in theirs.items():
            assert parameter.grad is not None
            torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("quantize_embeddings", [False, True])
def test_a_quantized_pruned_model_equals_itself_whole(tmp_path: Path, quantize_embeddings: bool) -> None:
    base = make_model(tmp_path / "base", tie_word_embeddings=True)
    prune(base, tmp_path / "pruned", seed=2)
    precision = Precision(torch.float32, "nf4", quantize_embeddings=quantize_embeddings)
    batches = packed_batches()
    with torch.no_grad():
        expected = whole(load_model(tmp_path / "pruned", precision), batches, 1.0)
    with LayerwiseModel(tmp_path / "pruned", precision, 10**9, tmp_path) as engine:
        assert [total for total, _ in engine.nll(batches)] == pytest.approx(expected, rel=1e-5)


def test_dropout_is_the_same_when_a_layer_is_computed_again(tmp_path: Path) -> None:
    """With dropout the gradient still is that of the loss: checked against a difference quotient."""
    base = make_model(tmp_path / "base", attention_dropout=0.3)
    batches = packed_batches()
    with LayerwiseModel(
        base, Precision(torch.float64), 10**9, tmp_path, trains=lambda name: name == "model.embed_tokens.weight"
    ) as engine:
        engine.model.train()
        gradient: list[torch.Tensor] = []

        @contextlib.contextmanager
        def collect(number: int, module: nn.Module) -> Iterator[None]:
            yield
            if number == -1:
                gradient.append(next(module.parameters()).grad.clone())  # type: ignore[union-attr]

        engine.backward(batches, 1.0, collect)
        direction = gradient[0] / gradient[0].norm()
        read = engine._reader.read
        values = []
        for step in (1e-2, -1e-2):
            engine._reader.read = lambda name, step=step: (  # type: ignore[method-assign, misc, assignment]
                read(name).double() + step * direction if "embed" in name else read(name)
            )
            values.append(sum(total for total, _ in engine.nll(batches)))
    assert (values[0] - values[1]) / 2e-2 == pytest.approx(float(gradient[0].norm()), rel=1e-2)


def test_a_layer_that_does_not_fit_is_said_before_the_work(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    with pytest.raises(NoRoomError, match="one layer at a time still needs"):
        LayerwiseModel(base, Precision(torch.float32), 10_000, tmp_path)


def test_activation_scores_equal_those_of_the_whole_model(tmp_path: Path) -> None:
    """Against sums over the hidden inputs of o_proj and down_proj in an ordinary forward, in float64."""
    base = make_model(tmp_path / "base", num_hidden_layers=3)
    batches = packed_batches()
    model = load_model(base, torch.float64)
    seen: dict[str, torch.Tensor] = {}

    def remember(name: str) -> Any:
        def hook(_: object, inputs: tuple[torch.Tensor]) -> None:
            seen[name] = seen.get(name, torch.tensor(0.0)) + inputs[0].flatten(0, 1).square().sum(0)

        return hook

    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            module.register_forward_pre_hook(remember(name))
    with torch.no_grad():
        whole(model, batches, 0.0)
    with LayerwiseModel(base, Precision(torch.float32), 200_000, tmp_path / "spill") as engine:
        scores = activation_scores(engine, discover(load_config(base)), batches)
    assert len(scores) == 3
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    for layer, of_layer in enumerate(scores):
        down = model.get_submodule(f"model.layers.{layer}.mlp.down_proj").weight
        power = down.square().sum(0) * seen[f"model.layers.{layer}.mlp.down_proj"] / tokens
        torch.testing.assert_close(of_layer["neuron"], power.sqrt(), rtol=1e-4, atol=1e-7)
        o = model.get_submodule(f"model.layers.{layer}.self_attn.o_proj").weight
        power = o.square().sum(0) * seen[f"model.layers.{layer}.self_attn.o_proj"] / tokens
        torch.testing.assert_close(of_layer["kv_group"], power.view(2, -1).sum(1).sqrt(), rtol=1e-4, atol=1e-7)


def test_hidden_states_that_fit_nowhere_are_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, batches = make_model(tmp_path / "base"), packed_batches()
    states = sum(batch["input_ids"].numel() for batch in batches) * 64 * 4
    for memory, free in ((200_000, states), (10**9, 0)):
        monkeypatch.setattr(layerwise, "free_disk", lambda folder, free=free: free)
        with LayerwiseModel(base, Precision(torch.float32), memory, tmp_path / "spill") as engine:
            engine.forward(batches)
    monkeypatch.setattr(layerwise, "free_disk", lambda folder: 0)
    with LayerwiseModel(
        base, Precision(torch.float32), 200_000, tmp_path / "spill", trains=lambda name: True
    ) as engine:
        assert 3 * states > engine._spill.budget
        monkeypatch.setattr(layerwise.LayerwiseModel, "_layer", lambda *of: pytest.fail("began"))
        with pytest.raises(NoRoomError, match=r"Hidden states of [0-9,]+ tokens take"):
            engine.backward(batches, 1.0)
