"""Faults that others met while training: each must stay fixed."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import processors
from transformers import TrainingArguments

from loram.adapter.attach import attach, target_modules
from loram.data.encode import IGNORED, encode_messages, encode_text, resolve_template
from loram.data.packing import PackedRows
from loram.errors import DivergenceError, Interrupted, MissingPackageError, NoRoomError, RecipeError
from loram.evaluate.perplexity import Perplexity, perplexity
from loram.models.discover import discover
from loram.models.loading import Precision, load_model
from loram.models.pruned import load_config
from loram.models.source import byte_tokenizer
from loram.recipe import TrainSection
from loram.training import loop, trainer
from loram.training.activations import offloaded, prepare_activations
from loram.training.history import HISTORY_NAME, History
from loram.training.steps import StepSampler
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
    model = load_model(folder, Precision(torch.float32, quantizer))
    prepare_activations(model, settings, adapter=True)
    return attach(model, discover(load_config(folder)), settings)


def run(folder: Path, scratch: Path, settings: TrainSection, **options: Any) -> tuple[Any, loop.TrainingRun]:
    scratch.mkdir(exist_ok=True)
    model = adapted(folder, settings, settings.quantizer)
    return model, loop.train(model.train(), rows(), settings, scratch, torch.float32, **options)


def losses(scratch: Path) -> list[float]:
    return [entry["loss"] for entry in history(scratch) if "loss" in entry]


def history(scratch: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (scratch / HISTORY_NAME).read_text().splitlines()]


def trainable(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


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
        load_model(tmp_path / "pruned", Precision(torch.float32, "nf4")),
    )
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        one, other = exact(tokens).logits, quantized(tokens).logits
    assert 0 < float((one - other).norm() / one.norm()) < 0.5


def test_an_evaluation_in_between_does_not_change_training(tmp_path: Path, tiny: Path) -> None:
    """bitsandbytes may repack 4-bit weights on a CPU eval; gradients after it must stay right."""
    examples = [encode_text("held out", byte_tokenizer())]
    run(tiny, tmp_path / "plain", section())
    run(
        tiny,
        tmp_path / "watched",
        section(eval_steps=1),
        evaluations={"held": lambda model: perplexity(model, examples, 64, 0)},
    )
    assert losses(tmp_path / "plain") == losses(tmp_path / "watched")


# -- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_at", [3, 7])
def test_an_interrupted_run_equals_an_uninterrupted_one(tmp_path: Path, tiny: Path, stop_at: int) -> None:
    """Also in the second epoch: 12 rows of which two fit a packed row make an epoch of six steps."""
    settings = section(max_steps=9, lora_dropout=0.1)
    whole, _ = run(tiny, tmp_path / "whole", settings)

    original = History.add

    def interrupt(self: Any, entry: dict[str, Any]) -> None:
        original(self, entry)
        if entry["step"] == stop_at - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(History, "add", interrupt)
        with pytest.raises(Interrupted, match=f"step {stop_at} of 9"):
            run(tiny, tmp_path / "halves", settings)
    (tmp_path / "halves" / "checkpoint-8").mkdir()  # one that was being written when the power went
    resumed, result = run(tiny, tmp_path / "halves", settings)
    assert result.resumed_from_step == stop_at
    assert result.steps == 9
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")
    assert same(trainable(whole), trainable(resumed))


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
    lines = (tmp_path / "again" / HISTORY_NAME).read_text().splitlines()
    # Killed while the checkpoint of step 4 was being written, and a line of the history with it.
    (tmp_path / "again" / "checkpoint-4" / "complete").unlink()
    (tmp_path / "again" / HISTORY_NAME).write_text("\n".join(lines[:3]) + '\n{"step": 4, "lo')
    resumed = go(tmp_path / "again")
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    assert same(whole, resumed)


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
        load_model(tiny, Precision(torch.float32, "nf4"))
    load_model(tiny, torch.float32)


def test_perplexity_is_total_nll_over_tokens_at_any_batch_size(tiny: Path) -> None:
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


# -- steps -----------------------------------------------------------------------------------------------------------


def uneven(lengths: tuple[int, ...] = (40, 60, 35, 50, 45, 38)) -> PackedRows:
    """A row of 64 for each example: no two fit one."""
    packed = PackedRows([encode_text("x" * n, byte_tokenizer()) for n in lengths], 64, 0, seed=None)
    assert len(packed) == len(lengths)
    return packed


def test_a_step_by_tokens_has_the_gradient_of_its_tokens(tmp_path: Path, tiny: Path) -> None:
    """Whatever goes through the model at once: each token of the step weighs the same."""
    results = []
    for micro in (1, 2, 8):
        settings = section(
            per_device_train_batch_size=micro, tokens_per_step=100, max_steps=6, optim="sgd", learning_rate=0.1,
            quantizer="none",
        )  # fmt: skip
        scratch = tmp_path / str(micro)
        scratch.mkdir()
        model = adapted(tiny, settings, "none")
        loop.train(model.train(), uneven(), settings, scratch, torch.float32)
        results.append(trainable(model))
        entries = history(scratch)
        # Longest first, rows have 60, 50, 45, 40, 38 and 35 loss tokens.
        for epoch in (entries[:3], entries[3:]):
            assert sorted((entry["loss_tokens"], entry["rows"]) for entry in epoch) == [(35, 1), (110, 2), (123, 3)]
        assert all(entry["tokens"] == entry["loss_tokens"] + entry["rows"] for entry in entries)
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "8"), rel=1e-4)
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(value, results[2][name], rtol=1e-3, atol=1e-6)


def test_padding_is_counted_apart(tmp_path: Path, tiny: Path) -> None:
    settings = section(per_device_train_batch_size=2, gradient_accumulation_steps=3, max_steps=1, quantizer="none")
    model = adapted(tiny, settings, "none")
    loop.train(model.train(), uneven(), settings, tmp_path, torch.float32)
    (entry,) = history(tmp_path)
    lengths = [int(uneven()[row]["tokens"]) for row in StepSampler(6, settings.seed, 6).rows_of(1)]
    assert entry["tokens"] == sum(lengths) == entry["loss_tokens"] + 6
    computed = sum(2 * max(lengths[start : start + 2]) for start in (0, 2, 4))
    assert entry["padding_tokens"] == computed - sum(lengths) > 0
    assert entry["rows"] == 6
    assert entry["tokens_per_second"] == pytest.approx(entry["tokens"] / entry["seconds"], rel=0.01)
    assert entry["host_peak_bytes"] > 0
    assert "mfu" not in entry  # no card here


@contextmanager
def memory_for(rows_at_once: int, first: int = 1) -> Iterator[list[int]]:
    """A card that runs out of memory in the backward pass of more rows than that, from some call on."""
    tried: list[int] = []
    original = trainer.summed_nll

    def limited(model: Any, batch: Any) -> Any:
        tried.append(len(batch["labels"]))
        nll, count = original(model, batch)
        if len(batch["labels"]) > rows_at_once and len(tried) >= first:
            nll.register_hook(raise_out_of_memory)
        return nll, count

    def raise_out_of_memory(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "summed_nll", limited)
        yield tried


@pytest.mark.parametrize("first", [1, 4])
def test_out_of_memory_lowers_rows_at_once_and_nothing_else(
    tmp_path: Path, tiny: Path, first: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The same rows a step, the same draws of dropout as with that number from the beginning; also on resume."""
    common: dict[str, Any] = {"gradient_accumulation_steps": 1, "max_steps": 5, "quantizer": "none"}
    found = section(per_device_train_batch_size=4, auto_find_batch_size=True, lora_dropout=0.1, **common)
    with memory_for(1, first) as tried, caplog.at_level("WARNING", logger="loram"):
        model, result = run(tiny, tmp_path / "found", found)
    assert tried[:6] == ([4, 2, 1, 1, 1, 1] if first == 1 else [4, 2, 4, 2, 1, 1])
    assert result.micro_batch == result.metrics()["per_device_train_batch_size"] == 1
    assert "going on with 1, and the same rows a step" in caplog.text
    assert [entry["rows"] for entry in history(tmp_path / "found")] == [4, 2, 4, 2, 4]
    if first == 1:
        known = section(per_device_train_batch_size=1, lora_dropout=0.1, **common | {"gradient_accumulation_steps": 4})
        other, _ = run(tiny, tmp_path / "known", known)
        assert losses(tmp_path / "found") == losses(tmp_path / "known")
        assert same(trainable(model), trainable(other))


def test_a_resumed_run_remembers_the_rows_that_fit(tmp_path: Path, tiny: Path) -> None:
    settings = section(
        per_device_train_batch_size=4, auto_find_batch_size=True, max_steps=4, save_steps=2, quantizer="none"
    )
    with memory_for(2):
        whole, _ = run(tiny, tmp_path / "run", settings)
    with memory_for(2) as tried:
        again, result = run(tiny, tmp_path / "run", settings)
    assert result.resumed_from_step == 2
    assert set(tried) == {2}
    assert same(trainable(whole), trainable(again))


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"per_device_train_batch_size": 2}, "auto_find_batch_size=true"),
        ({"per_device_train_batch_size": 2, "auto_find_batch_size": True}, "max_length"),
    ],
)
def test_out_of_memory_says_what_to_do(tmp_path: Path, tiny: Path, settings: dict[str, Any], fix: str) -> None:
    with memory_for(0), pytest.raises(NoRoomError, match=r"step 1 with [12] rows at once: CUDA out of memory") as error:
        run(tiny, tmp_path / "scratch", section(**settings))
    assert fix in error.value.fix


def test_another_runtime_error_is_not_taken_for_out_of_memory(tmp_path: Path, tiny: Path) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("shape mismatch")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "summed_nll", fail)
        with pytest.raises(RuntimeError, match="shape mismatch"):
            run(tiny, tmp_path / "scratch", section(auto_find_batch_size=True, per_device_train_batch_size=4))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_offloaded_activations_come_back(tmp_path: Path, tiny: Path, checkpointing: bool) -> None:
    """What a step saves goes through the host and changes no loss; here the move itself, without a card."""
    moved = 0

    class Counted(torch.autograd.graph.save_on_cpu):
        def __init__(self) -> None:
            super().__init__()
            pack = self.pack_hook

            def counted(tensor: torch.Tensor) -> Any:
                nonlocal moved
                moved += 1
                return pack(tensor)

            self.pack_hook = counted

    settings = section(activation_checkpointing=checkpointing, activation_offloading=True, max_steps=3)
    run(tiny, tmp_path / "plain", settings)
    assert moved == 0  # everything is in host memory already
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "offloaded", lambda section: Counted())
        run(tiny, tmp_path / "moved", settings)
    assert moved > 0
    assert losses(tmp_path / "moved") == losses(tmp_path / "plain")


def test_offloading_needs_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    for card, wish in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda card=card: card)
        found = offloaded(section(activation_offloading=wish))
        assert isinstance(found, torch.autograd.graph.save_on_cpu) is (card and wish)


# -- watching --------------------------------------------------------------------------------------------------------


def test_nan_names_rows_and_the_last_checkpoint(tmp_path: Path, tiny: Path) -> None:
    settings = section(save_steps=2, max_steps=6, quantizer="none", learning_rate=1e-3)
    original = trainer.summed_nll
    calls = 0

    def poisoned(model: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        nll, count = original(model, batch)
        return nll * (float("nan") if calls == 4 else 1), count

    row = StepSampler(6, settings.seed, 1).rows_of(4)[0]
    place = rf"step 4, on packed rows {row}; the last checkpoint before it is .*checkpoint-2\."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "summed_nll", poisoned)
        with pytest.raises(DivergenceError, match=place):
            run(tiny, tmp_path / "scratch", settings)
    assert [entry["step"] for entry in history(tmp_path / "scratch")] == [1, 2, 3]
    assert not (tmp_path / "scratch" / "checkpoint-4").exists()


def test_a_lasting_loss_spike_stops_with_its_rows(tmp_path: Path, tiny: Path) -> None:
    original = trainer.summed_nll
    calls = 0

    def spiking(model: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        nll, count = original(model, batch)
        return nll * (10 if calls == 9 or calls > 12 else 1), count

    common: dict[str, Any] = {"max_steps": 20, "learning_rate": 1e-5, "save_steps": 5, "quantizer": "none"}
    settings = section(max_loss_spike=3.0, loss_spike_patience=2, **common)
    row = StepSampler(6, settings.seed, 1).rows_of(14)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "summed_nll", spiking)
        with pytest.raises(DivergenceError, match=rf"step 14, on packed rows {row}; .*checkpoint-10") as error:
            run(tiny, tmp_path / "watched", settings)
        assert "max_loss_spike" in error.value.fix
        calls = 0
        run(tiny, tmp_path / "unwatched", section(**common))
    assert len(losses(tmp_path / "unwatched")) == 20


def scripted(losses_by_evaluation: list[float]) -> Callable[[Any], Perplexity]:
    """An evaluation with known results, one after the other."""
    remaining = iter(losses_by_evaluation)
    return lambda model: Perplexity(next(remaining), 1)


CHOOSING: dict[str, Any] = {"eval_steps": 2, "eval_datasets": {"a": "x"}, "quantizer": "none", "max_steps": 10}


def test_the_best_state_is_the_result_bit_for_bit(tmp_path: Path, tiny: Path) -> None:
    """Also when later checkpoints would have pushed it out, and in a run of all parameters."""
    states: dict[int, dict[str, torch.Tensor]] = {}

    def evaluate(results: dict[int, float]) -> Callable[[Any], Perplexity]:
        def of_step(model: Any) -> Perplexity:
            step = 2 * len(states) + 2
            states[step] = trainable(model)
            return Perplexity(results[step], 1)

        return of_step

    for name, results, best in (
        ("first", {2: 1.0, 4: 3.0, 6: 2.0, 8: 2.0, 10: 4.0}, 2),
        ("middle", {2: 5.0, 4: 3.0, 6: 2.0, 8: 2.0, 10: 4.0}, 6),
        ("last", {2: 5.0, 4: 4.0, 6: 3.0, 8: 2.0, 10: 1.0}, 10),
    ):
        states.clear()
        settings = section(load_best_model_at_end=True, save_steps=3, **CHOOSING)
        model, result = run(tiny, tmp_path / name, settings, evaluations={"a": evaluate(results)})
        assert result.kept_step == best
        assert same(trainable(model), states[best])
        assert result.evaluation == {"eval_a_loss": results[best], "eval_a_perplexity": math.exp(results[best])}
        if best < 10:
            saved = load_file(tmp_path / name / f"checkpoint-{best}" / "adapter_model.safetensors")
            assert saved.keys() == {key.replace(".default", "") for key in states[best]}
            assert all(torch.equal(saved[key.replace(".default", "")], value) for key, value in states[best].items())
            assert not same(states[best], states[10])


def test_the_best_state_of_a_full_parameter_run(tmp_path: Path, tiny: Path) -> None:
    prune(tiny, tmp_path / "pruned", 1)
    settings = section(load_best_model_at_end=True, learning_rate=1e-3, **CHOOSING | {"max_steps": 6})
    model = load_model(tmp_path / "pruned", torch.float32)
    states = []

    def evaluate(current: Any) -> Perplexity:
        states.append({name: tensor.clone() for name, tensor in current.state_dict().items()})
        return Perplexity(3.0 if len(states) != 2 else 1.0, 1)

    (tmp_path / "s").mkdir()
    result = loop.train(model.train(), rows(), settings, tmp_path / "s", torch.float32, evaluations={"a": evaluate})
    assert result.kept_step == 4
    assert same(model.state_dict(), states[1])
    assert not same(states[1], states[2])


def test_early_stopping_counts_and_is_remembered(tmp_path: Path, tiny: Path) -> None:
    """Two evaluations without a new lowest loss, one of them before an interruption."""
    settings = section(early_stopping_patience=2, save_steps=100, **CHOOSING)
    _, result = run(tiny, tmp_path / "whole", settings, evaluations={"a": scripted([3.0, 2.0, 2.5, 2.0, 9.0])})
    assert result.steps == result.kept_step == 8
    assert result.evaluation["eval_a_loss"] == 2.0

    original = History.add

    def interrupt(self: Any, entry: dict[str, Any]) -> None:
        original(self, entry)
        if entry["step"] == 6 and "loss" in entry:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(History, "add", interrupt)
        with pytest.raises(Interrupted, match="step 6 of 10"):
            run(tiny, tmp_path / "halves", settings, evaluations={"a": scripted([3.0, 2.0])})
    _, result = run(tiny, tmp_path / "halves", settings, evaluations={"a": scripted([2.5, 2.0, 9.0])})
    assert (result.resumed_from_step, result.steps) == (6, 8)
    assert [entry["step"] for entry in history(tmp_path / "halves")] == [1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8]


def test_an_evaluation_made_up_for_can_end_the_run(tmp_path: Path, tiny: Path) -> None:
    """It was interrupted in the evaluation that ends it; not one more step is taken."""
    settings = section(early_stopping_patience=1, load_best_model_at_end=True, **CHOOSING)

    def interrupted(model: Any) -> Perplexity:
        os.kill(os.getpid(), signal.SIGTERM)
        model(torch.tensor([[1, 2, 3]]))
        raise AssertionError("the evaluation went on")

    first = scripted([1.0])
    evaluate = lambda model: first(model) if len(history(tmp_path / "run")) == 2 else interrupted(model)  # noqa: E731
    with pytest.raises(Interrupted, match="step 4 of 10"):
        run(tiny, tmp_path / "run", settings, evaluations={"a": evaluate})
    _, result = run(tiny, tmp_path / "run", settings, evaluations={"a": scripted([2.0])})
    assert (result.steps, result.kept_step) == (4, 2)
    assert [entry["step"] for entry in history(tmp_path / "run")] == [1, 2, 2, 3, 4, 4]


def test_a_best_state_that_is_damaged_is_replaced_by_the_next(
    tmp_path: Path, tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = section(load_best_model_at_end=True, **CHOOSING | {"max_steps": 6})

    def evaluate(model: Any) -> Perplexity:
        evaluated = len(history(tmp_path / "run")) // 3 + 1
        if evaluated == 3:
            (tmp_path / "run" / "checkpoint-4" / "adapter_model.safetensors").write_bytes(b"")
        return Perplexity({1: 2.0, 2: 1.0, 3: 3.0}[evaluated], 1)

    with caplog.at_level("WARNING", logger="loram"):
        _, result = run(tiny, tmp_path / "run", settings, evaluations={"a": evaluate})
    assert "after step 4 cannot be taken" in caplog.text
    assert result.kept_step == 2


def test_every_evaluation_set_has_its_name(tmp_path: Path, tiny: Path) -> None:
    """At `eval_steps` and at the end, even where that is no multiple."""
    sets = {"docs": scripted([1.0, 2.0, 3.0]), "text": scripted([4.0, 5.0, 6.0])}
    settings = section(eval_steps=2, max_steps=5, quantizer="none")
    _, result = run(tiny, tmp_path / "run", settings, evaluations=sets)
    found = [entry for entry in history(tmp_path / "run") if "loss" not in entry]
    assert [(entry["step"], entry["eval_docs_loss"], entry["eval_text_loss"]) for entry in found] == [
        (2, 1.0, 4.0), (4, 2.0, 5.0), (5, 3.0, 6.0),
    ]  # fmt: skip
    assert result.metrics()["eval_text_perplexity"] == pytest.approx(math.exp(6.0))


def test_metrics_arrive_in_tensorboard(tmp_path: Path, tiny: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = section(report_to=["tensorboard"], eval_steps=2, max_steps=5, logging_steps=2, quantizer="none")
    run(tiny, tmp_path / "run", settings, evaluations={"docs": scripted([1.5, 2.5, 3.5])})
    events = EventAccumulator(str(tmp_path / "run" / "runs")).Reload()
    entries = {entry["step"]: entry for entry in history(tmp_path / "run") if "loss" in entry}
    for name in ("loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second"):
        shown = {event.step: event.value for event in events.Scalars(f"train/{name}")}
        assert shown.keys() == {2, 4}
        assert shown == pytest.approx({step: entries[step][name] for step in shown}, rel=1e-5)
    assert [(event.step, event.value) for event in events.Scalars("eval/docs_loss")] == [(2, 1.5), (4, 2.5), (5, 3.5)]


def test_tensorboards_files_go_into_the_artifact(loram: Callable[..., Result], recipe: Path, tmp_path: Path) -> None:
    command = (recipe, "--artifacts", tmp_path / "a", "align.max_steps=0", "train.report_to=[tensorboard]", "--json")
    loram("prune", *command)
    folder = Path(loram("train", *command).json["folder"])
    assert list((folder / "runs").glob("events.out.tfevents.*"))


def test_a_reporter_that_is_missing_is_said_before_any_work(
    loram: Callable[..., Result], recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loram.training.reporters.find_spec", lambda name: None)
    command = (recipe, "--artifacts", tmp_path / "a", "train.report_to=[wandb]")
    for stage in ("run", "train"):
        result = loram(stage, *command, "align.max_steps=0")
        assert result.code == 1
        if stage == "run":
            assert "pip install wandb" in result.err
            assert not (tmp_path / "a").exists()
            loram("prune", *command)
    assert "pip install wandb" in result.err
    assert loram("train", recipe, "train.report_to=[wandby]").code == 2


# -- methods ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit", "paged_adamw_32bit", "adafactor"])
def test_loraplus_gives_every_b_its_rate(tmp_path: Path, tiny: Path, optim: str) -> None:
    settings = section(
        loraplus_lr_ratio=16.0, optim=optim, max_steps=2, warmup_steps=0, lr_scheduler_type="constant", weight_decay=0.1
    )
    seen = {}
    original = trainer.StepTrainer.create_optimizer

    def create(self: Any, *arguments: Any) -> Any:
        optimizer = original(self, *arguments)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        seen.update({names[id(p)]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]})
        return optimizer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.StepTrainer, "create_optimizer", create)
        model, _ = run(tiny, tmp_path / "run", settings)
    assert seen.keys() == trainable(model).keys()
    for name, (rate, decay) in seen.items():
        assert rate == pytest.approx(0.16 if "lora_B" in name else 0.01)
        assert decay == 0.1
    assert [entry["learning_rate"] for entry in history(tmp_path / "run")] == [0.01, 0.01]


def test_loraplus_moves_b_by_its_rate(tmp_path: Path, tiny: Path) -> None:
    """Plain gradient descent: the first step of B is the ratio times as long, and A's is the same."""
    moved = []
    for ratio in (None, 4.0):
        settings = section(
            loraplus_lr_ratio=ratio, optim="sgd", max_steps=1, warmup_steps=0, max_grad_norm=1e9, quantizer="none"
        )
        before = trainable(adapted(tiny, settings, "none"))
        model, _ = run(tiny, tmp_path / str(ratio), settings)
        moved.append({name: value - before[name] for name, value in trainable(model).items()})
    for name, plain in moved[0].items():
        torch.testing.assert_close(moved[1][name], plain * (4.0 if "lora_B" in name else 1.0), rtol=1e-4, atol=1e-7)


def test_loraplus_refuses_an_optimizer_with_groups_of_its_own(tmp_path: Path, tiny: Path) -> None:
    own: Any = staticmethod(lambda args, model: (torch.optim.SGD, {"lr": 0.1, "params": []}))  # as GaLore does
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.StepTrainer, "get_optimizer_cls_and_kwargs", own)
        with pytest.raises(RecipeError, match="loraplus_lr_ratio: optimizer 'galore_adamw' makes its own groups"):
            run(tiny, tmp_path / "run", section(loraplus_lr_ratio=2.0, optim="galore_adamw"))


@pytest.mark.parametrize("optim", ["lomo", "adalomo", "galore_adamw_layerwise", "schedule_free_adamw"])
def test_an_optimizer_without_whole_steps_is_refused(optim: str) -> None:
    with pytest.raises(RecipeError, match=f"'{optim}'"):
        loop.check(section(optim=optim))


@pytest.mark.parametrize("quantize_embeddings", [False, True])
def test_neftune_is_there_in_training_and_not_in_evaluation(
    tmp_path: Path, tiny: Path, quantize_embeddings: bool
) -> None:
    """Within α/√(tokens × width) of the embedding; none when evaluating, and none left when training is over."""
    alpha = 5.0
    settings = section(neftune_noise_alpha=alpha, max_steps=2, eval_steps=1, quantize_embeddings=quantize_embeddings)
    torch.manual_seed(0)
    model = load_model(tiny, Precision(torch.float32, "nf4", True, quantize_embeddings))
    adapter = attach(model, discover(load_config(tiny)), settings)
    embedding = adapter.get_input_embeddings()
    noise: dict[bool, list[tuple[torch.Tensor, int]]] = {True: [], False: []}

    def compare(module: Any, inputs: Any, output: torch.Tensor) -> None:
        ids = inputs[0]
        clean = type(module).forward(module, ids)
        noise[module.training].append(((output - clean).detach(), ids.shape[1] * output.shape[-1]))

    examples = [encode_text("held out", byte_tokenizer())]
    original = trainer.StepTrainer._run_epoch

    def hooked(self: Any, **options: Any) -> None:
        handle = embedding.register_forward_hook(compare)  # after NEFTune's own, so it sees the noise
        original(self, **options)
        handle.remove()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.StepTrainer, "_run_epoch", hooked)
        loop.train(
            adapter.train(), rows(), settings, tmp_path, torch.float32,
            evaluations={"a": lambda current: perplexity(current, examples, 64, 0)},
        )  # fmt: skip
    assert len(noise[True]) == 2
    assert len(noise[False]) == 2
    for difference, elements in noise[True]:
        bound = alpha / math.sqrt(elements)
        assert 0.9 * bound < float(difference.abs().max()) <= bound * 1.0001
        assert float(difference.mean().abs()) < 0.1 * bound
    assert all(not bool(difference.any()) for difference, _ in noise[False])
    ids = torch.arange(8)[None]
    assert torch.equal(embedding.train()(ids), type(embedding).forward(embedding, ids))


def test_a_lone_process_takes_one_of_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them, and the Trainer cuts a step's tensors up with DataParallel, targets and anchors not among them."""

    def two_gpus(self: Any) -> torch.device:
        self._n_gpu = 2
        return torch.device("cpu")

    devices = cached_property(two_gpus)
    devices.__set_name__(TrainingArguments, "_setup_devices")
    monkeypatch.setattr(TrainingArguments, "_setup_devices", devices)
    arguments = loop._arguments(section(), tmp_path, torch.float32, "a run")
    assert arguments.device == torch.device("cpu")
    assert arguments.n_gpu == 1
