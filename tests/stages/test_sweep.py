"""loram sweep through the command line on a tiny model."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result
from tests.faults.test_resume import send_after

Cli = Callable[..., Result]


def made(root: Path, stage: str) -> int:
    return len(list((root / "test").glob(f"{stage}-*")))


def test_shared_stages_are_made_once_and_a_second_run_makes_nothing(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    root = tmp_path / "artifacts"
    command = ("sweep", recipe, "train.seed=0,1", "evaluate.baseline=true", "--artifacts", root)
    planned = loram(*command, "--dry-run")
    assert "train.seed=1" in planned.out
    assert "score               0 there, 1 to make" in planned.out
    assert "train               0 there, 2 to make" in planned.out
    assert not root.exists()
    first = loram(*command)
    assert first.code == 0, first.err
    assert (made(root, "score"), made(root, "align"), made(root, "evaluate")) == (1, 1, 2)
    (folder,) = (root / "test").glob("sweep-*")
    before = sorted(path.name for path in (root / "test").iterdir())
    again = loram(*command, "--json")
    assert again.code == 0
    assert sorted(path.name for path in (root / "test").iterdir()) == before
    assert "0 to make" in loram(*command, "--dry-run").out
    results = json.loads((folder / "results.json").read_text())
    assert results == again.json
    evaluations = [
        json.loads((root / "test" / point["stages"]["evaluate"]["folder"] / "evaluation.json").read_text())
        for point in results
    ]
    for point, evaluation in zip(results, evaluations, strict=True):
        assert point["variants"] == evaluation["variants"]
        perplexity = evaluation["variants"]["base + recovered"]["sums"]["perplexity"]
        assert f"{perplexity:.3f}" in (folder / "results.md").read_text()
        share = evaluation["share_of_full_lora_gain"]["base + recovered"]["sums"]
        assert point["share_of_full_lora_gain"]["base + recovered"]["sums"] == share
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["labels.train.seed"] for row in rows] == ["0", "1"]
    status = loram("status", recipe, "--json", "--artifacts", root).json
    assert not any("sweep" in line["folder"] for line in status)


def test_a_point_that_fails_does_not_stop_the_others(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    root = tmp_path / "artifacts"
    result = loram(
        "sweep", recipe, "prune.keep_first_layers=9,0", "--json", "--out", tmp_path / "out", "--artifacts", root
    )
    assert result.code == 1
    assert "1 of 2 points failed" in result.err
    failed, sound = result.json
    assert "leaves none to cut" in failed["error"]
    assert (sound["error"], bool(sound["variants"])) == (None, True)
    assert "leaves none to cut" in (tmp_path / "out" / "results.md").read_text()


def test_an_interrupted_sweep_goes_on(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    command = ("sweep", recipe, "train.lora_r=2,3", "--artifacts", tmp_path / "artifacts")
    with pytest.MonkeyPatch.context() as patch:
        send_after(patch, 1)
        assert loram(*command).code == 130
    assert loram(*command).code == 0
    assert made(tmp_path / "artifacts", "train") == 2


def test_an_axis_to_average_over_must_be_there(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    result = loram("sweep", recipe, "train.lora_r=2,3", "--over", "train.seed", "--artifacts", tmp_path / "artifacts")
    assert result.code == 2
    assert "train.lora_r" in result.err
