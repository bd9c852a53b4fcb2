"""Anchored training against the full model's own numbers and against hooks written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loram_stages.graph import STAGES

from loram.adapter.attach import attach
from loram.artifact import file_digest
from loram.data import sources
from loram.data.packing import PackedRows
from loram.errors import InputError
from loram.memory.spill import Spill
from loram.models.discover import discover, layers_prefix
from loram.models.layerwise import LayerwiseModel
from loram.models.loading import Precision, load_model
from loram.models.pruned import load_config
from loram.recipe import load_recipe
from loram.training import anchors as anchoring
from loram.training import loop
from loram.training.activations import prepare_activations
from loram.training.anchors import Anchors, anchored_layers, write_anchors
from loram.training.loss import summed_nll
from loram.training.steps import StepSampler
from tests.conftest import Result, make_model
from tests.faults.test_resume import send_after
from tests.faults.test_training import history, losses, rows, same, section, trainable
from tests.numerics.test_layerwise import FAMILIES
from tests.numerics.test_pruned_forward import prune

Cli = Callable[..., Result]
NF4 = Precision(torch.float32, "nf4")
PLAIN = Precision(torch.float32)


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences in float32, so that what follows from them can be held against it; the last test has them stored."""
    monkeypatch.setattr(anchoring, "_DTYPE", torch.float32)


def made(
    base: Path, small: Path, folder: Path, data: PackedRows, numbers: list[int], count: int,
    precision: Precision = NF4, memory: int = 10**9,
) -> Path:  # fmt: skip
    engine = partial(LayerwiseModel, memory=memory, scratch=folder / "hidden")
    layers = anchored_layers(discover(load_config(base)).layers, count)
    spill = Spill(memory // 4 if memory > 10**6 else 0, folder / "between")
    write_anchors(partial(engine, base, PLAIN), partial(engine, small, precision), data, numbers, layers, spill, folder)
    assert not list(folder.glob("between/*"))
    return folder


def pruned(base: Path, folder: Path, seed: int) -> Path:
    prune(base, folder, seed)
    return folder


def decoder(model: Any) -> list[torch.nn.Module]:
    return list(model.get_submodule(layers_prefix(model)).children())


def batch_of(data: PackedRows, numbers: list[int]) -> dict[str, torch.Tensor]:
    batch: dict[str, torch.Tensor] = torch.utils.data.default_collate([data[number] for number in numbers])
    return batch


@given(st.integers(1, 200), st.integers(1, 250))
def test_anchors_are_evenly_spread_and_end_at_the_last_layer(layers: int, count: int) -> None:
    found = anchored_layers(layers, count)
    assert len(found) == min(count, layers)
    assert found[-1] == layers - 1
    gaps = [after - before for before, after in zip([-1, *found], found, strict=False)]
    assert all(gap > 0 for gap in gaps)
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("memory", [10**9, 3 * 10**5])
def test_without_an_adapter_the_anchored_loss_is_the_full_models(
    tmp_path: Path, family: str, count: int, memory: int
) -> None:
    base = make_model(tmp_path / "base", **FAMILIES[family])
    small = pruned(base, tmp_path / "small", 1)
    data, numbers = rows(), [0, 1, 2]
    folder = made(base, small, tmp_path / "anchors", data, numbers, count, memory=memory)
    full, model = load_model(base, torch.float32), load_model(small, NF4)
    with torch.no_grad(), Anchors(folder, decoder(model)) as anchors:
        for chosen in ([0, 1], [2], [1]):
            batch = batch_of(data, chosen)
            expected, _ = summed_nll(full, batch)
            plain, _ = summed_nll(model, batch)
            with anchors.at(chosen, batch["input_ids"].shape[1]):
                found, _ = summed_nll(model, batch)
            assert found.item() == pytest.approx(expected.item(), rel=1e-5)
            assert plain.item() != pytest.approx(expected.item(), rel=1e-5)
            again, _ = summed_nll(model, batch)
            assert again.item() == plain.item(), "without `at` there are none"
    after, _ = summed_nll(model, batch)
    assert after.item() == plain.item()


def test_loss_and_gradients_equal_hooks_written_out(tmp_path: Path) -> None:
    """An adapter that has moved: the small model with constants added, worked out with ordinary whole models."""
    base = make_model(tmp_path / "base", num_hidden_layers=4)
    small = pruned(base, tmp_path / "small", 2)
    data, chosen = rows(), [3, 1]
    folder = made(base, small, tmp_path / "anchors", data, [1, 3], 2, PLAIN)
    batch = batch_of(data, chosen)
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    full, plain = load_model(base, torch.float32), load_model(small, torch.float32)

    def adapted() -> Any:
        model = attach(load_model(small, torch.float32), discover(load_config(small)), section())
        generator = torch.Generator().manual_seed(5)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
        return model

    # Layers 1 and 3: two at a time, from the full model's states before them.
    states: dict[str, dict[int, torch.Tensor]] = {"full": {}, "small": {}}

    def record(kind: str, layer: int, *call: Any) -> torch.Tensor | None:
        output = call[-1]
        states[kind][layer] = output
        return states["full"][layer] if kind == "small" and layer in (1, 3) else None

    with torch.no_grad():
        for kind, model in (("full", full), ("small", plain)):
            for layer, module in enumerate(decoder(model)):
                module.register_forward_hook(partial(record, kind, layer))
            model(**inputs)
    reference = adapted()
    for layer in (1, 3):
        constant = states["full"][layer] - states["small"][layer]
        decoder(reference.get_base_model())[layer].register_forward_hook(
            lambda module, args, output, constant=constant: output + constant
        )
    logits = reference(**inputs).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    used = torch.arange(labels.shape[1]) < (batch["tokens"][:, None] - 1)
    assert bool(used[labels != -100].all())
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    model = adapted()
    prepare_activations(model, section(), adapter=True)
    with Anchors(folder, decoder(model.get_base_model())) as anchors, anchors.at(chosen, labels.shape[1] + 1):
        found, _ = summed_nll(model.train(), batch)
        found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.requires_grad}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.allclose(parameter.grad, wanted[name], rtol=1e-3, atol=1e-5), name


def trained(
    base: Path, small: Path, scratch: Path, changes: dict[str, Any], data: PackedRows, folder: Path
) -> dict[str, torch.Tensor]:
    settings = section(**changes)
    scratch.mkdir(exist_ok=True)
    model = load_model(small, NF4)
    prepare_activations(model, settings, adapter=True)
    adapted = attach(model, discover(load_config(small)), settings)
    with Anchors(folder, decoder(model)) as anchors:
        loop.train(adapted.train(), data, settings, scratch, torch.float32, anchors=anchors)
    return trainable(adapted)


def test_a_run_begins_at_the_full_models_loss_at_any_micro_batch_and_after_an_interrupt(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", num_hidden_layers=3)
    small = pruned(base, tmp_path / "small", 1)
    data = rows()
    folder = made(base, small, tmp_path / "anchors", data, list(range(len(data))), 3)
    four = {"per_device_train_batch_size": 4, "max_steps": 5, "lora_dropout": 0.1}
    one = four | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "lora_dropout": 0.0}
    whole = trained(base, small, tmp_path / "whole", four | {"lora_dropout": 0.0}, data, folder)
    parts = trained(base, small, tmp_path / "parts", one, data, folder)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)
    assert all(torch.allclose(whole[name], parts[name], atol=1e-3) for name in whole)
    first = StepSampler(len(data), 0, 4).rows_of(1)
    nll, count = summed_nll(load_model(base, torch.float32), batch_of(data, first))
    assert losses(tmp_path / "whole")[0] == pytest.approx(nll.item() / count, rel=1e-4)
    uninterrupted = trained(base, small, tmp_path / "straight", four, data, folder)
    with pytest.MonkeyPatch.context() as patch:
        send_after(patch, 2)
        with pytest.raises(Exception, match="Stopped at step"):
            trained(base, small, tmp_path / "stopped", four, data, folder)
    assert same(trained(base, small, tmp_path / "stopped", four, data, folder), uninterrupted)
    assert [e["loss"] for e in history(tmp_path / "stopped")] == [e["loss"] for e in history(tmp_path / "straight")]


def test_a_row_without_anchors_and_another_model_are_refused(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    small = pruned(base, tmp_path / "small", 1)
    folder = made(base, small, tmp_path / "anchors", rows(), [0, 2], 1)
    model = load_model(small, torch.float32)
    with Anchors(folder, decoder(model)) as anchors, pytest.raises(InputError, match="Row 1 of the training data"):
        anchors.at([0, 1], 64).__enter__()
    with pytest.raises(InputError, match="a model of 2 layers, this one has 1"):
        Anchors(folder, decoder(model)[:1])


@pytest.mark.parametrize("changes", [{"max_steps": 2}, {"max_steps": 7}, {}, {"tokens_per_step": 60, "max_steps": 3}])
def test_the_rows_that_get_anchors_are_those_that_train(changes: dict[str, Any]) -> None:
    data, settings = rows(30), section(per_device_train_batch_size=2, **({"max_steps": -1} | changes))
    found = loop.rows_trained(settings, data)
    sampler = loop.steps(settings, data)
    count = settings.max_steps if settings.max_steps > 0 else len(sampler)
    assert found == sorted({row for step in range(1, count + 1) for row in sampler.rows_of(step)})


def test_runs_that_take_the_same_rows_share_their_anchors(recipe: Path) -> None:
    def fingerprinted(*overrides: str) -> dict[str, Any]:
        return STAGES["anchor"].settings(load_recipe(recipe, ["train.anchors=2", *overrides]))

    accumulated = fingerprinted("train.per_device_train_batch_size=4", "train.gradient_accumulation_steps=2")
    assert fingerprinted("train.per_device_train_batch_size=8") == accumulated
    assert fingerprinted("train.per_device_train_batch_size=4") != accumulated
    epochs = [fingerprinted("train.max_steps=-1", f"train.num_train_epochs={count}") for count in (0.5, 1, 3)]
    assert epochs[0] != epochs[1] == epochs[2]
    assert fingerprinted("train.quantizer=none") != fingerprinted()
    assert fingerprinted("train.learning_rate=0.5") == fingerprinted()
    assert "anchors" not in load_recipe(recipe).train.settings(), "drafts from before are resumed"


# -- through the command line ----------------------------------------------------------------------------------------


def test_anchors_go_all_the_way(loram: Cli, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored in 16 bits as they are."""
    monkeypatch.setattr(anchoring, "_DTYPE", torch.bfloat16)
    root = tmp_path / "a"
    command = (recipe, "train.anchors=2", "--artifacts", root)
    done = loram("run", *command)
    assert done.code == 0, done.err
    assert "trained for the full model alone" in done.out
    first = next((root / "test").glob("train-*"))
    assert "| anchors |" in (next((root / "test").glob("recover-*")) / "README.md").read_text()
    base_loss = history(first)[0]["loss"]
    plain = loram("run", recipe, "--artifacts", root, "--json")
    assert [line["stage"] for line in plain.json if not line["cached"]] == ["train", "recover", "merge", "evaluate"]
    small_loss = history(Path(next(line["folder"] for line in plain.json if line["stage"] == "train")))[0]["loss"]
    full = loram("run", recipe, "evaluate.baseline=true", "train.quantizer=none", "--artifacts", root, "--json").json
    baseline = next(line["folder"] for line in full if line["stage"] == "train (baseline)")
    assert base_loss == pytest.approx(history(Path(baseline))[0]["loss"], rel=2e-3)
    assert small_loss != pytest.approx(base_loss, rel=2e-3)
    slower = loram("run", *command, "train.learning_rate=0.002", "--json").json
    assert "anchor" not in [line["stage"] for line in slower if not line["cached"]], "another rate needs no others"


def test_anchors_are_made_for_the_folder_that_training_starts_from(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    publisher, tuner = tmp_path / "publisher", tmp_path / "tuner"
    for stage in ("prune", "align"):
        assert loram(stage, recipe, "--artifacts", publisher).code == 0
    shared = next((publisher / "test").glob("align-*"))
    trained = loram("train", recipe, "train.anchors=1", "--from", shared, "--artifacts", tuner, "--json")
    assert trained.code == 0, trained.err
    assert sorted(path.name.partition("-")[0] for path in (tuner / "test").iterdir()) == ["anchor", "train"]


def test_anchors_of_rows_that_have_moved_are_refused(
    loram: Cli, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Hub set without a revision: its fingerprint stays, its rows do not."""
    data = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sources, "identity", lambda dataset: {"path": dataset.path})
    monkeypatch.setattr(sources, "hub_revision", lambda dataset: file_digest(Path(dataset.path)))
    command = ("run", recipe, "train.anchors=1", "align.max_steps=0", "--artifacts", tmp_path / "a", "--json")
    assert loram(*command).code == 0
    assert loram(*command, "train.learning_rate=0.002").code == 0
    data.write_text(data.read_text().replace("It is", "That is"))
    refused = loram(*command, "train.learning_rate=0.003")
    assert refused.code == 1
    assert "are not those that" in refused.err
    assert "loram anchor RECIPE --remake" in refused.err
    assert loram("anchor", *command[1:], "--remake").code == 0
    assert loram(*command, "train.learning_rate=0.003").code == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["train.anchors=1", "train.init_lora_weights=pissa"], "starts from other weights"),
        (["train.anchors=1", "train.early_stopping_patience=1", "train.eval_steps=1",
          "train.eval_datasets.held={path: rows.jsonl}"], "made without anchors"),
        (["train.anchors=1", "recover.correction=emloc"], "trained for the full one"),
        ([], "train.anchors is 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_anchored_is_refused(
    loram: Cli, recipe: Path, tmp_path: Path, settings: list[str], words: str
) -> None:
    root = ["--artifacts", tmp_path / "a", "align.max_steps=0"]
    assert loram("prune", recipe, *root).code == 0
    refused = loram("anchor", recipe, *settings, *root)
    assert refused.code != 0
    assert words in refused.err
