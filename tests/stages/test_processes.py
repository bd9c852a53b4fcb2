"""Several processes of one run on a CPU (gloo): the same losses as one, one writer, and nobody hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from loram.errors import MissingPackageError, RecipeError
from tests.conftest import ROOT, Result, make_model

TWO = ROOT / "recipes" / "accelerate" / "cpu2.yaml"
Cli = Callable[..., Result]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, *map(str, arguments)], env=ENVIRONMENT, capture_output=True, text=True, timeout=400, check=False
    )


def history(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry for entry in map(json.loads, lines) if "loss" in entry]


@pytest.mark.parametrize(("stage", "anchors"), [("train", 0), ("train", 1), ("align", 0)])
def test_two_processes_learn_as_one_does_and_one_writes(
    loram: Cli, recipe: Path, tmp_path: Path, stage: str, anchors: int
) -> None:
    shared = [f"{s}.max_length=96" for s in ("train", "align")] + [f"train.anchors={anchors}"]
    loram("prune", recipe, *shared, "--artifacts", tmp_path / "a")
    if stage == "train":
        shared.append("align.max_steps=0")
    # Four rows a step; the last step of an epoch has fewer, so one process gets a row that counts for nothing.
    settings = [f"{stage}.max_steps=4", f"{stage}.gradient_accumulation_steps=2"]
    settings.append(f"{stage}.per_device_train_batch_size=2")
    command = [stage, str(recipe), *shared, *settings, "--json", "--artifacts"]
    alone = loram(*command, tmp_path / "a")
    assert alone.code == 0, alone.err
    loram("prune", recipe, *shared, "--artifacts", tmp_path / "b")
    if anchors:
        assert loram("anchor", recipe, *shared, *settings, "--artifacts", tmp_path / "b").code == 0
    done = subprocess.run(
        [sys.executable, "-m", "loram_stages", *command, str(tmp_path / "b"), "--launch", str(TWO)],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    together = json.loads(done.stdout)  # of the writer alone
    one, other = (history(Path(folder)) for folder in (alone.json["folder"], together["folder"]))
    assert [entry["step"] for entry in one] == [entry["step"] for entry in other] == [1, 2, 3, 4]
    for a, b in zip(one, other, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert (a["tokens"], a["loss_tokens"]) == (b["tokens"], b["loss_tokens"])
    assert not list((tmp_path / "b").rglob(".*.draft"))


@pytest.mark.parametrize(("quantizer", "method"), [("nf4", "lora"), ("hqq3", "dora")])
def test_sharded_layers_give_the_same_gradients(tmp_path: Path, quantizer: str, method: str) -> None:
    folder = make_model(tmp_path / "base", hidden_size=72, intermediate_size=37)
    done = torchrun(ROOT / "tests" / "stages" / "sharded_step.py", folder, quantizer, method)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("same on") == 2


def test_a_killed_process_does_not_leave_the_other_waiting(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    settings = ["align.max_steps=0", "train.max_steps=100000", "train.max_length=96", "train.num_train_epochs=1"]
    loram("prune", recipe, *settings, "--artifacts", tmp_path / "a")
    process = subprocess.Popen(
        [sys.executable, "-m", "loram_stages", "train", str(recipe), *settings, "--artifacts", str(tmp_path / "a"),
         "--launch", str(TWO)],
        env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        _wait_for(lambda: any((tmp_path / "a").rglob("history.jsonl")), 300)
        workers = _workers(process.pid)
        assert len(workers) == 2
        os.kill(workers[-1], signal.SIGKILL)
        _, messages = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "ended with exit code" in messages
    _wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers), 30)
    assert not list((tmp_path / "a").rglob("train-*/manifest.json"))


def _wait_for(condition: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.2)


def _workers(launcher: int) -> list[int]:
    """Processes that run a stage below the launcher: its grandchildren."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    return sorted(worker for agent in children.get(launcher, []) for worker in children.get(agent, []))


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"num_processes": 2, "use_cpu": True, "distributed_type": "FSDP"}, RecipeError, "shards"),
        ({"num_processes": 2, "distributed_type": "DEEPSPEED"}, MissingPackageError, "needs deepspeed"),
        ({"distributed_type": "MULTI_GPU"}, RecipeError, "lacks num_processes"),
    ],
)
def test_what_cannot_be_launched_is_said_first(
    tmp_path: Path, settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    from loram_stages.launch import launch

    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    with pytest.raises(error, match=words):
        launch(path, ["train", "recipe.yaml"])


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp2-offload", "zero2", "cpu2"])
def test_shipped_configurations_are_what_accelerate_reads(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(ROOT / "recipes" / "accelerate" / f"{name}.yaml"))
    assert config.num_processes == 2
