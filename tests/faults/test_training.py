"""Faults that others met while training: each must stay fixed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from peft import PeftModel
from tokenizers import processors

from loram.adapter.attach import attach, target_modules
from loram.data.encode import IGNORED, encode_messages, encode_text, resolve_template
from loram.data.packing import PackedRows
from loram.errors import DivergenceError, Interrupted, MissingPackageError, RecipeError
from loram.models.discover import discover
from loram.models.loading import load_model
from loram.models.pruned import load_config
from loram.models.source import byte_tokenizer
from loram.recipe import TrainSection
from loram.training import loop
from tests.conftest import Result, make_model
from tests.numerics.test_pruned_forward import prune

TURNS = (("user", "What is 2 + 2?"), ("assistant", "It is 4."))


def section(**settings: Any) -> TrainSection:
    return TrainSection.model_validate(
        {
            "max_steps": 4,
            "per_device_train_batch_size": 1,
            "learning_rate": 0.01,
            "max_length": 64,
            "warmup_steps": 1,
            **settings,
        }
    )


def rows(count: int = 12, length: int = 64) -> PackedRows:
    tokenizer = byte_tokenizer()
    examples = [encode_text(f"Row {i} says {'a' * (i % 7)} and ends.", tokenizer) for i in range(count)]
    return PackedRows(examples, length, 0)


def adapted(folder: Path, settings: TrainSection, quantizer: str = "nf4") -> Any:
    torch.manual_seed(0)
    model = load_model(folder, torch.float32, quantizer)
    if settings.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return attach(model, discover(load_config(folder)), settings)


def run(folder: Path, scratch: Path, settings: TrainSection, **options: Any) -> tuple[Any, loop.TrainingRun]:
    scratch.mkdir(exist_ok=True)
    model = adapted(folder, settings)
    return model, loop.train(model.train(), rows(), settings, scratch, torch.float32, **options)


def losses(scratch: Path) -> list[float]:
    return [
        entry["loss"] for entry in loop._History(scratch / loop.HISTORY_NAME, after=10**9).entries if "loss" in entry
    ]


# -- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [None, "eos", "own"])
def test_the_last_label_of_a_completion_is_eos_whatever_pad_is(pad: str | None) -> None:
    tokenizer = byte_tokenizer()
    if pad != "own":
        tokenizer.pad_token = tokenizer.eos_token if pad == "eos" else None
    encoded = encode_messages(TURNS, tokenizer, resolve_template("alpaca", tokenizer))
    row = PackedRows([encoded], len(encoded) + 9, pad_token_id=tokenizer.eos_token_id)[0]
    learnt = row["labels"][row["labels"] != IGNORED]
    assert int(learnt[-1]) == tokenizer.eos_token_id
    assert len(learnt) == encoded.loss_tokens == len("It is 4.") + 1


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("in_template", [False, True])
def test_there_is_exactly_one_bos(adds: bool, in_template: bool) -> None:
    tokenizer = byte_tokenizer()
    bos, name = tokenizer.bos_token_id, tokenizer.bos_token
    if adds:
        tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{name} $A", special_tokens=[(name, bos)]
        )
        assert tokenizer("x")["input_ids"][0] == bos
    template = ("{{ bos_token }}" if in_template else "") + str(resolve_template("alpaca", tokenizer))
    encoded = encode_messages(TURNS, tokenizer, template)
    assert encoded.input_ids.count(bos) == int(adds or in_template)
    assert encode_text("text", tokenizer).input_ids.count(bos) == int(adds)


@pytest.mark.parametrize("template", ["alpaca", "chatml", None])
def test_prompt_is_a_prefix_and_the_mask_counts_the_completion(template: str | None) -> None:
    tokenizer = byte_tokenizer()
    text = None if template is None else resolve_template(template, tokenizer)
    encoded = encode_messages(TURNS, tokenizer, text)
    first = next(i for i, label in enumerate(encoded.labels) if label != IGNORED)
    assert all(label == IGNORED for label in encoded.labels[:first])
    assert encoded.labels[first:] == encoded.input_ids[first:]
    assert tokenizer.decode(encoded.input_ids[first:]) == "It is 4." + tokenizer.eos_token
    assert encoded.loss_tokens == len(encoded.input_ids) - first


# -- loop ------------------------------------------------------------------------------------------------------------


def test_nan_stops_with_the_step(tmp_path: Path, tiny: Path) -> None:
    settings = section(learning_rate=1e30, max_grad_norm=1e30, warmup_steps=0)
    with pytest.raises(DivergenceError, match="step"):
        run(tiny, tmp_path / "scratch", settings)


def test_nan_leaves_no_artifact_and_a_failing_exit_code(
    loram: Callable[..., Result], recipe: Path, tmp_path: Path
) -> None:
    root = tmp_path / "artifacts"
    command = (recipe, "--artifacts", root, "align.max_steps=0")
    assert loram("prune", *command).code == 0
    before = sorted(p.name for p in (root / "test").iterdir())
    result = loram("train", *command, "train.learning_rate=1e30", "train.max_grad_norm=1e30")
    assert result.code == 1
    assert "gradient norm" in result.err
    assert "Traceback" not in result.err
    assert sorted(p.name for p in (root / "test").iterdir() if not p.name.startswith(".")) == before


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_b_moves_with_activation_checkpointing(tmp_path: Path, tiny: Path, checkpointing: bool) -> None:
    settings = section(activation_checkpointing=checkpointing, max_steps=2)
    model, _ = run(tiny, tmp_path / "scratch", settings)
    b = {name: p for name, p in model.named_parameters() if "lora_B" in name}
    assert len(b) == 14
    assert all(bool(parameter.any()) for parameter in b.values())


def test_activation_checkpointing_changes_no_loss(tmp_path: Path, tiny: Path) -> None:
    for name, flag in (("on", True), ("off", False)):
        run(tiny, tmp_path / name, section(activation_checkpointing=flag))
    assert losses(tmp_path / "on") == pytest.approx(losses(tmp_path / "off"), rel=1e-6)


def test_gradient_accumulation_averages_tokens_not_micro_batches(tmp_path: Path, tiny: Path) -> None:
    uneven = PackedRows([encode_text("x" * n, byte_tokenizer()) for n in (3, 60, 10, 40)], 64, 0, seed=None)
    results = []
    for name, batch, accumulate in (("wide", 4, 1), ("deep", 1, 4)):
        # SGD moves by the gradient itself; Adam would blow rounding up to whole steps where gradients are tiny.
        settings = section(
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulate,
            max_steps=3,
            optim="sgd",
            learning_rate=1,
        )
        (tmp_path / name).mkdir()
        model = adapted(tiny, settings)
        loop.train(model.train(), uneven, settings, tmp_path / name, torch.float32)
        results.append({n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad})
    assert losses(tmp_path / "wide") == pytest.approx(losses(tmp_path / "deep"), rel=1e-4)
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-3, atol=1e-6)


def test_only_what_was_meant_is_adapted(tiny: Path) -> None:
    architecture = discover(load_config(tiny))
    assert target_modules(architecture, section()) == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    assert target_modules(architecture, section(target_modules=["v_proj", "q_proj"], lora_lm_head=True)) == [
        "lm_head", "q_proj", "v_proj",
    ]  # fmt: skip
    with pytest.raises(RecipeError, match="did you mean 'q_proj'"):
        target_modules(architecture, section(target_modules=["q_prj"]))


def test_resolved_targets_are_shown_and_recorded(loram: Callable[..., Result], recipe: Path, tmp_path: Path) -> None:
    command = (recipe, "--artifacts", tmp_path / "a", "align.max_steps=0", "train.max_steps=1")
    loram("prune", *command)
    result = loram("train", *command)
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in result.out
    assert loram("train", *command, "--json").json["metrics"]["target_modules"][0] == "down_proj"


def test_widths_that_are_no_multiple_of_the_4_bit_block_round_trip(tmp_path: Path) -> None:
    """Pruned widths are odd; the last, partial block must be as good as the others."""
    torch.manual_seed(0)
    for shape in ((43, 37), (1, 65), (7, 127), (5, 1)):
        weight = torch.randn(shape)
        packed, state = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        back = bitsandbytes.functional.dequantize_4bit(packed, state)
        assert back.shape == weight.shape
        # Half the widest NF4 gap is 0.152 of a block's largest value; double quantization adds a little.
        assert float((back - weight).abs().max()) <= 0.17 * float(weight.abs().max())
    base = make_model(tmp_path / "base", intermediate_size=37)
    prune(base, tmp_path / "pruned", seed=5)
    exact, quantized = (
        load_model(tmp_path / "pruned", torch.float32),
        load_model(tmp_path / "pruned", torch.float32, "nf4"),
    )
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        one, other = exact(tokens).logits, quantized(tokens).logits
    assert 0 < float((one - other).norm() / one.norm()) < 0.5


def test_an_evaluation_in_between_does_not_change_training(tmp_path: Path, tiny: Path) -> None:
    """bitsandbytes may repack 4-bit weights on a CPU eval; gradients after it must stay right."""
    from loram.evaluate.perplexity import perplexity

    examples = [encode_text("held out", byte_tokenizer())]
    run(tiny, tmp_path / "plain", section())
    run(tiny, tmp_path / "watched", section(eval_steps=1), evaluate=lambda model: perplexity(model, examples, 64, 0))
    assert losses(tmp_path / "plain") == losses(tmp_path / "watched")


# -- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_at", [3, 7])
def test_an_interrupted_run_equals_an_uninterrupted_one(tmp_path: Path, tiny: Path, stop_at: int) -> None:
    """Also in the second epoch: 12 rows of which two fit a packed row make an epoch of six steps."""
    import os
    import signal

    settings = section(max_steps=9, lora_dropout=0.1)
    whole, _ = run(tiny, tmp_path / "whole", settings)

    original = loop._History.add

    def interrupt(self: Any, entry: dict[str, Any]) -> None:
        original(self, entry)
        if entry["step"] == stop_at - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop._History, "add", interrupt)
        with pytest.raises(Interrupted, match=f"step {stop_at} of 9"):
            run(tiny, tmp_path / "halves", settings)
    (tmp_path / "halves" / "checkpoint-8").mkdir()  # one that was being written when the power went
    resumed, result = run(tiny, tmp_path / "halves", settings)
    assert result.resumed_from_step == stop_at
    assert result.steps == 9
    assert losses(tmp_path / "halves") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)
    for (name, one), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7, msg=name)


def test_a_full_parameter_run_resumes_too(tmp_path: Path, tiny: Path) -> None:
    """The same for align: all weights, saved as a model and not as an adapter."""
    prune(tiny, tmp_path / "pruned", 1)
    settings = section(max_steps=5, save_steps=2, learning_rate=1e-3)

    def go(scratch: Path) -> dict[str, torch.Tensor]:
        scratch.mkdir(exist_ok=True)
        model = load_model(tmp_path / "pruned", torch.float32)
        loop.train(model.train(), rows(), settings, scratch, torch.float32)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    whole = go(tmp_path / "whole")
    go(tmp_path / "again")
    history = (tmp_path / "again" / loop.HISTORY_NAME).read_text().splitlines()
    # Killed while the checkpoint of step 4 was being written, and a line of the history with it.
    (tmp_path / "again" / "checkpoint-4" / "complete").unlink()
    (tmp_path / "again" / loop.HISTORY_NAME).write_text("\n".join(history[:3]) + '\n{"step": 4, "lo')
    resumed = go(tmp_path / "again")
    assert losses(tmp_path / "again") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-5, atol=1e-7, msg=name)


def test_an_untrained_checkpoint_is_noticed_when_it_is_saved(tmp_path: Path, tiny: Path) -> None:
    from loram_stages.train import _check

    from loram.errors import InputError

    settings = section(max_steps=2, save_steps=1, learning_rate=1e-30)
    model = adapted(tiny, settings)
    model.save_pretrained(tmp_path / "fresh")
    with pytest.raises(InputError, match="not trained"):
        _check(tmp_path / "fresh")


# -- missing pieces --------------------------------------------------------------------------------------------------


def test_without_bitsandbytes_training_says_what_is_missing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingPackageError, match="pip install bitsandbytes"):
        load_model(tiny, torch.float32, "nf4")
    load_model(tiny, torch.float32)


def test_perplexity_is_total_nll_over_tokens_at_any_batch_size(tiny: Path) -> None:
    from loram.evaluate.perplexity import perplexity

    model = load_model(tiny, torch.float64)
    examples = [encode_text("x" * n + " end", byte_tokenizer()) for n in (1, 5, 30, 50, 2, 17)]
    results = [perplexity(model, examples, length, 0, size) for length, size in ((64, 1), (64, 3), (200, 2))]
    nll = tokens = 0.0
    for example in examples:
        with torch.no_grad():
            logits = model(torch.tensor([example.input_ids])).logits[0, :-1]
        targets = torch.tensor(example.input_ids[1:])
        nll += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        tokens += len(targets)
    for result in results:
        assert result.tokens == tokens
        assert result.value == pytest.approx(math.exp(nll / tokens), rel=1e-5)


def test_loading_an_adapter_leaves_no_key_out(tmp_path: Path, tiny: Path) -> None:
    settings = section(max_steps=2)
    model, _ = run(tiny, tmp_path / "scratch", settings)
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load_model(tiny, torch.float32), tmp_path / "adapter")
    trained = {n: p for n, p in model.named_parameters() if "lora_" in n}
    loaded = {n: p for n, p in again.named_parameters() if "lora_" in n}
    assert trained.keys() == loaded.keys()
    assert all(torch.equal(trained[name], loaded[name]) for name in trained)
