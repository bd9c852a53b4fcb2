"""An interrupted run must equal the uninterrupted one, bit for bit, whenever and however it was stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from loram.data.encode import encode_text
from loram.errors import InputError, Interrupted
from loram.evaluate.perplexity import Perplexity, perplexity
from loram.models.source import byte_tokenizer
from loram.recipe import TrainSection
from loram.training import checkpoints, loop
from loram.training.history import HISTORY_NAME, History
from loram.training.trainer import StepTrainer
from tests.conftest import Result
from tests.faults.test_training import adapted, history, rows, same, section, trainable

# What differs between two runs that do the same.
CLOCK = {"seconds", "tokens_per_second", "rows_per_second", "host_peak_bytes", "device_peak_bytes"}
HELD_OUT = [encode_text(f"held out {i}", byte_tokenizer()) for i in range(3)]


def held_out(model: torch.nn.Module) -> Perplexity:
    return perplexity(model, HELD_OUT, 14, 0)


def events(scratch: Path) -> list[dict[str, Any]]:
    """The history without what a clock or the system measured."""
    return [{name: value for name, value in entry.items() if name not in CLOCK} for entry in history(scratch)]


class Runs:
    """Runs of the same settings, each in a folder of its own."""

    def __init__(self, base: Path, root: Path, **settings: Any) -> None:
        self.section = section(**{"max_steps": 7, "lora_dropout": 0.1, "quantizer": "none", **settings})
        self._base = base
        self.root = root

    def go(self, name: str, settings: TrainSection | None = None, **options: Any) -> dict[str, torch.Tensor]:
        """Trains, or goes on, in the folder of that name; returns what was trained."""
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        chosen = settings or self.section
        model = adapted(self._base, chosen, "none")
        self.result = loop.train(model.train(), rows(), chosen, folder, torch.float32, **options)
        return trainable(model)


def send_after(patch: pytest.MonkeyPatch, step: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Signals this process once, when a step has just gone into the history."""
    original = History.add

    def add(self: History, entry: dict[str, Any]) -> None:
        original(self, entry)
        if entry["step"] == step and "loss" in entry:
            os.kill(os.getpid(), number)

    patch.setattr(History, "add", add)


VARIANTS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "tokens per step": {"tokens_per_step": 100},
    "noise and LoRA+": {"neftune_noise_alpha": 5.0, "loraplus_lr_ratio": 4.0},
    "8-bit optimizer": {"optim": "adamw_8bit", "lora_r": 64},  # bitsandbytes leaves less than 4,096 weights in 32 bits
}


@pytest.mark.parametrize(
    ("variant", "stop_at"),
    [
        ("accumulation", 2),
        ("accumulation", 6),
        ("tokens per step", 5),
        ("noise and LoRA+", 4),
        ("8-bit optimizer", 3),
    ],
)
def test_an_interrupted_run_equals_the_whole_one(tmp_path: Path, tiny: Path, variant: str, stop_at: int) -> None:
    """Six rows and two a step make epochs of three steps, so step 6 ends one, and step 2 is inside one."""
    runs = Runs(tiny, tmp_path, **VARIANTS[variant])
    whole = runs.go("whole")
    with pytest.MonkeyPatch.context() as patch:
        send_after(patch, stop_at - 1)
        with pytest.raises(Interrupted, match=f"step {stop_at} of 7"):
            runs.go("halves")
    assert len(history(tmp_path / "halves")) == stop_at
    assert same(runs.go("halves"), whole)
    assert runs.result.resumed_from_step == stop_at
    assert events(tmp_path / "halves") == events(tmp_path / "whole")


def test_random_state_of_every_library_goes_on(tmp_path: Path, tiny: Path) -> None:
    """A model that draws with python, numpy and torch draws the same; an evaluation that does leaves no trace."""
    drawn: list[float] = []

    def draw(*_: Any) -> None:
        drawn.extend((random.random(), float(numpy.random.rand()), float(torch.rand(()))))

    def noisy(model: torch.nn.Module) -> Perplexity:
        random.random(), numpy.random.rand(), torch.rand(())
        return Perplexity(1.0, 1)

    original = StepTrainer.training_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepTrainer, "training_step", lambda self, *rest: (draw(), original(self, *rest))[1])
        quiet, runs = Runs(tiny, tmp_path), Runs(tiny, tmp_path, eval_steps=1)
        weights = quiet.go("quiet")
        expected = drawn.copy()
        drawn.clear()
        with pytest.MonkeyPatch.context() as stopping:
            send_after(stopping, 2)
            with pytest.raises(Interrupted):
                runs.go("halves", evaluations={"noisy": noisy})
        assert same(runs.go("halves", evaluations={"noisy": noisy}), weights)
        assert drawn == expected
        assert len(set(drawn)) == 3 * 7


@pytest.mark.parametrize("stop_at", [2, 4, 6])
def test_interrupted_in_an_evaluation(tmp_path: Path, tiny: Path, stop_at: int) -> None:
    """It is given up at once, and made when the run goes on; also the last one (step 6). A best state is kept."""
    settings = {"max_steps": 6, "eval_steps": 2, "load_best_model_at_end": True, "eval_datasets": {"a": "x"}}
    runs = Runs(tiny, tmp_path, **settings, learning_rate=0.3)
    whole = runs.go("whole", evaluations={"held": held_out})
    forwards = []

    def interrupted(model: torch.nn.Module) -> Perplexity:
        def count(*_: Any) -> None:
            forwards.append(1)
            if len(history(tmp_path / "halves")) == stop_at + stop_at // 2 - 1:
                os.kill(os.getpid(), signal.SIGTERM)

        hook = model.register_forward_hook(count)
        try:
            return held_out(model)
        finally:
            hook.remove()

    with pytest.raises(Interrupted, match=f"step {stop_at} of 6"):
        runs.go("halves", evaluations={"held": interrupted})
    assert len(forwards) == (stop_at // 2 - 1) * 3 + 1
    assert [entry["step"] for entry in history(tmp_path / "halves") if "loss" not in entry] == [*range(2, stop_at, 2)]
    assert same(runs.go("halves", evaluations={"held": held_out}), whole)
    assert events(tmp_path / "halves") == events(tmp_path / "whole")


@pytest.mark.parametrize("place", ["_save_optimizer_and_scheduler", "_save_rng_state", "check_saved"])
def test_stopped_at_once_while_saving(tmp_path: Path, tiny: Path, place: str) -> None:
    """A second Ctrl-C in the middle of a checkpoint: the one before it counts."""
    runs = Runs(tiny, tmp_path, save_steps=2)
    whole = runs.go("whole")
    saves = 0

    def stop(*arguments: Any) -> None:
        nonlocal saves
        saves += 1
        if saves == 3:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        options: dict[str, Any] = {}
        if place == "check_saved":
            options["check_saved"] = stop
        else:
            original = getattr(StepTrainer, place)
            patch.setattr(StepTrainer, place, lambda self, folder: (stop(), original(self, folder)))
        with pytest.raises(KeyboardInterrupt):
            runs.go("halves", **options)
    assert (tmp_path / "halves" / "checkpoint-6").is_dir()
    assert same(runs.go("halves"), whole)
    assert runs.result.resumed_from_step == 4
    assert events(tmp_path / "halves") == events(tmp_path / "whole")


def damage_flip(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def damage_cut(folder: Path) -> None:
    path = folder / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:-100])


def damage_missing(folder: Path) -> None:
    (folder / "rng_state.pth").unlink()


def damage_list(folder: Path) -> None:
    (folder / "complete").write_text("{", encoding="utf-8")


@pytest.mark.parametrize("hurt", [damage_flip, damage_cut, damage_missing, damage_list])
def test_a_damaged_checkpoint_is_not_trusted(
    tmp_path: Path, tiny: Path, hurt: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    runs = Runs(tiny, tmp_path, save_steps=2)
    whole = runs.go("whole")
    folder = tmp_path / "whole"
    expected = events(folder)
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    hurt(folder / "checkpoint-6")
    with caplog.at_level("WARNING", logger="loram"):
        assert same(runs.go("whole"), whole)
    assert runs.result.resumed_from_step == 4
    assert "checkpoint-6 is damaged" in caplog.text
    assert events(folder) == expected
    for name in ("checkpoint-4", "checkpoint-6"):
        hurt(folder / name)
    assert same(runs.go("whole"), whole)
    assert runs.result.resumed_from_step == 0


def test_other_settings_are_refused_by_name(tmp_path: Path, tiny: Path) -> None:
    runs = Runs(tiny, tmp_path, save_steps=2, max_steps=3)
    runs.go("run")
    changed = runs.section.model_copy(update={"learning_rate": 0.02, "weight_decay": 0.1})
    with pytest.raises(
        InputError, match=r"learning_rate was 0\.01 and is 0\.02; weight_decay was 0\.0 and is 0\.1"
    ) as e:
        runs.go("run", changed)
    assert "--remake" in e.value.fix
    model = adapted(tiny, runs.section, "none")
    for other, name in ((rows(13), "rows was 6 and is 7"), (rows(12, 65), "rows_sha256 was")):
        with pytest.raises(InputError, match=name):
            loop.train(model, other, runs.section, tmp_path / "run", torch.float32)
    with pytest.raises(InputError, match=r'compute_dtype was "torch.float32" and is "torch.bfloat16"'):
        loop.train(model, rows(), runs.section, tmp_path / "run", torch.bfloat16)


def test_what_only_watches_may_change(tmp_path: Path, tiny: Path) -> None:
    """And it does: the checkpoint's own interval no longer counts."""
    runs = Runs(tiny, tmp_path, save_steps=3)
    with pytest.MonkeyPatch.context() as patch:
        send_after(patch, 2)
        with pytest.raises(Interrupted):
            runs.go("run")
    changed = runs.section.model_copy(update={"save_steps": 1, "logging_steps": 7, "max_loss_spike": 100.0})
    runs.go("run", changed)
    assert runs.result.resumed_from_step == 3
    assert [checkpoints.step_of(folder) for folder in sorted((tmp_path / "run").glob("checkpoint-*"))] == [5, 6]


def test_other_library_versions_are_said(tmp_path: Path, tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs = Runs(tiny, tmp_path, save_steps=2, max_steps=3)
    runs.go("run")
    folder = tmp_path / "run" / "checkpoint-2"
    record = json.loads((folder / checkpoints.SETTINGS_NAME).read_text())
    record["libraries"]["torch"] = "1.0"
    (folder / checkpoints.SETTINGS_NAME).write_text(json.dumps(record))
    with caplog.at_level("WARNING", logger="loram"):
        checkpoints.require_same_settings(folder, record["settings"])
    assert "was made with torch 1.0" in caplog.text


def test_stopping_in_the_first_step_of_a_warm_up_saves(tmp_path: Path, tiny: Path) -> None:
    """The learning rate was 0 so far, so every B is still zero; that is no fault of the checkpoint."""
    from loram_stages.train import _check

    runs = Runs(tiny, tmp_path, warmup_steps=4)
    whole = runs.go("whole", check_saved=_check)
    original = StepTrainer.training_step

    def signalled(self: StepTrainer, *arguments: Any) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepTrainer, "training_step", signalled)
        with pytest.raises(Interrupted, match="step 1 of 7"):
            runs.go("halves", check_saved=_check)
    assert same(runs.go("halves", check_saved=_check), whole)


# -- real processes --------------------------------------------------------------------------------------------------


def start(*command: object) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-m", "loram_stages", "train", *map(str, command)]
    # As many threads as the tests have: a product's last bits depend on how it is shared out.
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.Popen(
        arguments,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=environment,
        # A shell's background job ignores interrupts, and hands that on to what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for_steps(root: Path, count: int) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        for path in root.glob(f"test/.train-*/scratch/{HISTORY_NAME}"):
            if len(path.read_text().splitlines()) >= count:
                return
        time.sleep(0.02)
    raise AssertionError("the process did not begin to train")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_goes_on(
    loram: Callable[..., Result], recipe: Path, tmp_path: Path, number: signal.Signals
) -> None:
    root = tmp_path / "a"
    command = [recipe, "--artifacts", root, "align.max_steps=0", "train.max_steps=40", "train.lora_dropout=0.1"]
    loram("prune", *command)
    process = start(*command)
    wait_for_steps(root, 3)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "a checkpoint was saved" in err
    resumed = loram("train", *command, "--json").json
    assert 3 <= resumed["metrics"]["resumed_from_step"] < 40
    weights = Path(resumed["folder"]) / "adapter_model.safetensors"
    after = weights.read_bytes()
    whole = loram("train", *command, "--json", "--remake").json
    assert whole["metrics"]["resumed_from_step"] == 0
    assert weights.read_bytes() == after


def test_remake_does_not_go_on_from_a_checkpoint(loram: Callable[..., Result], recipe: Path, tmp_path: Path) -> None:
    command = [recipe, "--artifacts", tmp_path / "a", "align.max_steps=0"]
    loram("prune", *command)
    with pytest.MonkeyPatch.context() as patch:
        send_after(patch, 1)
        stopped = loram("train", *command)
    assert stopped.code == 130
    assert "without --remake" in stopped.err
    assert loram("train", *command, "--remake", "--json").json["metrics"]["resumed_from_step"] == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_second_signal_stops_at_once(
    loram: Callable[..., Result], recipe: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """In the middle of a step of hundreds of micro-batches; nothing of it is taken for a checkpoint."""
    root = tmp_path / "a"
    data = tmp_path / "many.jsonl"
    data.write_text("".join(json.dumps({"text": f"Row {number}. " * 10}) + "\n" for number in range(400)))
    command = [recipe, "--artifacts", root, "align.max_steps=0", f"train.datasets={data}", "train.max_length=120"]
    loram("prune", *command)
    # A row an example and a micro-batch: a step lasts for seconds, and the second signal comes well within one.
    process = start(*command, "train.per_device_train_batch_size=1", "train.gradient_accumulation_steps=400")
    wait_for_steps(root, 1)
    process.send_signal(number)
    assert process.stderr is not None
    for line in process.stderr:
        if "stopping after this step" in line:
            break
    # Python drops an interrupt that falls into a callback of the garbage collector, so a person would press again.
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(number)
        time.sleep(0.1)
    process.communicate(timeout=1)
    assert process.returncode in (code, -number)  # one more while Python ends is the end of it
    assert not list(root.glob("test/.train-*/scratch/checkpoint-*/complete"))
