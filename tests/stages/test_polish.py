"""loram polish through the command line: chained, alone, interrupted, refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from loram.adapter.folder import Adapter
from loram.artifact import Manifest
from tests.conftest import Result
from tests.faults.test_resume import send_after

Cli = Callable[..., Result]
STEPS = (
    "polish.max_steps=2",
    "polish.max_length=128",
    "polish.per_device_train_batch_size=1",
    "polish.learning_rate=0.01",
)


def stages(root: Path) -> list[str]:
    return sorted(path.name.split("-")[0] for path in (root / "test").iterdir())


def test_it_stands_between_recover_and_merge(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    root = tmp_path / "artifacts"
    done = loram("run", recipe, *STEPS, "--artifacts", root)
    assert done.code == 0, done.err
    assert "base + polished" in done.out
    assert "polished adapter changes the base's log-perplexity" in done.out
    assert stages(root).count("polish") == 1
    evaluation = json.loads((next((root / "test").glob("evaluate-*")) / "evaluation.json").read_text())["variants"]
    merged, polished, recovered = (
        evaluation[name]["sums"]["loss"] for name in ("merged", "base + polished", "base + recovered")
    )
    assert merged == pytest.approx(polished, rel=1e-5)
    assert polished != recovered
    folder = next((root / "test").glob("polish-*"))
    assert "steps on the full model | 2" in (folder / "README.md").read_text()
    assert "final training loss" in (folder / "README.md").read_text(), "what train did is still told"
    assert Manifest.read(folder).metrics["steps"] == 2
    again = loram("run", recipe, *STEPS, "--artifacts", root)
    assert "Nothing to do" in again.out
    more = loram("run", recipe, *STEPS, "polish.max_steps=3", "--json", "--artifacts", root)
    made = [line["stage"] for line in more.json if not line["cached"]]
    assert made == ["polish", "merge", "evaluate"]


def test_a_fresh_adapter_needs_no_small_model(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    root = tmp_path / "artifacts"
    done = loram("run", recipe, *STEPS, "polish.start=fresh", "train.use_dora=true", "--artifacts", root)
    assert done.code == 0, done.err
    assert stages(root) == ["evaluate", "merge", "polish"]
    planned = loram("plan", recipe, *STEPS, "polish.start=fresh", "--json", "--artifacts", root)
    assert set(planned.json["disk"]["stages"]) == {"polish", "merge"}
    with Adapter(next((root / "test").glob("polish-*"))) as adapter:
        adapter.require_trained()
        assert adapter.is_dora
    refused = loram("polish", recipe, *STEPS, "polish.start=fresh", "--from", tmp_path, "--artifacts", root)
    assert refused.code == 1
    assert "nothing to stand in for" in refused.err


def test_anybodys_adapter_will_do(loram: Cli, recipe: Path, tmp_path: Path, tiny: Path) -> None:
    from tests.numerics.test_recover_merge import trained_adapter

    adapter = trained_adapter(tiny, tmp_path / "theirs", target_modules=["q_proj", "down_proj"], r=3)
    root = tmp_path / "artifacts"
    done = loram("polish", recipe, *STEPS, "--from", adapter, "--json", "--artifacts", root)
    assert done.code == 0, done.err
    assert any("no plan.json" in note for note in done.json["notes"])
    with Adapter(Path(done.json["folder"])) as polished, Adapter(adapter) as before:
        assert polished.modules == before.modules
        assert not torch.equal(polished.factors(polished.modules[0])[0], before.factors(before.modules[0])[0])


def test_an_interrupted_polish_goes_on(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    root, other = tmp_path / "artifacts", tmp_path / "other"
    steps = (*STEPS, "polish.max_steps=4")
    for folder in (root, other):
        for stage in ("prune", "align", "train", "recover"):
            assert loram(stage, recipe, "--artifacts", folder).code == 0
    whole = loram("polish", recipe, *steps, "--json", "--artifacts", other).json
    with pytest.MonkeyPatch.context() as patch:
        send_after(patch, 2)
        assert loram("polish", recipe, *steps, "--artifacts", root).code == 130
    gone_on = loram("polish", recipe, *steps, "--json", "--artifacts", root).json
    assert gone_on["metrics"]["resumed_from_step"] > 0
    weights = [(Path(result["folder"]) / "adapter_model.safetensors").read_bytes() for result in (whole, gone_on)]
    assert weights[0] == weights[1]


def test_without_steps_it_is_skipped(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    done = loram("polish", recipe, "--artifacts", tmp_path / "artifacts")
    assert (done.code, "polish: skipped" in done.out) == (0, True)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("polish.start=fresh", "would train nothing"),
        ("polish.checkpoint_every=2", "computes every layer again"),
    ],
)
def test_what_cannot_be_done_is_said(loram: Cli, recipe: Path, tmp_path: Path, override: str, words: str) -> None:
    changes = () if override == "polish.start=fresh" else STEPS
    failed = loram("polish", recipe, *changes, override, "--from", tmp_path, "--artifacts", tmp_path / "artifacts")
    assert failed.code != 0
    assert words in failed.err


def test_the_plan_tells_memory_traffic_and_time(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    options = ("--card", "rtx-4090", "--disk", "1GB", "--artifacts", tmp_path / "artifacts")
    planned = loram("plan", recipe, *STEPS, "--json", *options).json["polish"]
    assert planned["rows"] == 1
    assert planned["seconds"]["reading"] == pytest.approx(planned["weights_read"] / 1e9)
    assert planned["seconds"]["step"] == max(planned["seconds"]["reading"], planned["seconds"]["computing"])
    more = loram("plan", recipe, *STEPS, "polish.gradient_accumulation_steps=4", "--json", *options).json["polish"]
    assert more["weights_read"] == planned["weights_read"]
    assert more["flops"] == 4 * planned["flops"]
    assert more["device"] <= planned["device"], "gradients are added where they lie"
    text = loram("plan", recipe, *STEPS, *options).out
    assert "weights read a step" in text
    assert loram("plan", recipe, "--json", *options).json["polish"] is None
    assert loram("plan", recipe, *STEPS, "--disk", "fast", *options[:2], *options[4:]).code == 2
