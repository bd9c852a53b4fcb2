"""A corrected adapter does to the full model what it did to the small one, on all that its A sees."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from loram.adapter.correct import Correction, corrected
from loram.adapter.folder import WEIGHTS_NAME, Adapter
from loram.adapter.recover import recover
from loram.checkpoint import CheckpointReader
from loram.errors import WrongBaseError
from loram.models.loading import Precision, load_model
from loram.models.quantizers import weight_blocks
from loram.pruning.plan import PruningPlan
from tests.conftest import Result, make_model
from tests.numerics.test_factors import factored_model
from tests.numerics.test_pruned_forward import prune
from tests.numerics.test_recover_merge import ALL, merged, trained

Cli = Callable[..., Result]
# No linear of the tiny model has more inputs, so its A sees all of them.
EVERYTHING = 128


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relatively(change: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return change.abs().mean(0) / of.abs().mean(0)


@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 20),
    rank=st.integers(1, 24),
    scale=st.sampled_from([0.1, 1.0, 7.0]),
    repeated=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_a_sees_is_computed_as_on_the_small_model(
    rows: int, columns: int, rank: int, scale: float, repeated: bool, seed: int
) -> None:
    full, small = random(rows, columns, seed=seed), random(rows, columns, seed=seed + 100)
    a, b = random(rank, columns, seed=seed + 200), random(rows, rank, seed=seed + 300)
    if repeated:  # a row of A that says nothing new
        a[-1] = 2 * a[0]
    found, limited = corrected(a, b, scale, lambda v: (full - small) @ v, None)
    assert limited == 0
    inverse = torch.from_numpy(np.linalg.pinv(a.numpy(), rcond=1e-9))
    torch.testing.assert_close(found, b - (full - small) @ inverse / scale, rtol=1e-7, atol=1e-7)
    seen = a.T @ random(rank, 5, seed=seed + 400)
    after, before = (full + scale * found @ a) @ seen, (small + scale * b @ a) @ seen
    torch.testing.assert_close(after, before, rtol=1e-7, atol=1e-7)
    if np.linalg.matrix_rank(a.numpy()) == columns:
        torch.testing.assert_close(full + scale * found @ a, small + scale * b @ a, rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 24), st.floats(0.01, 4), st.integers(0, 99))
def test_the_limit_holds_in_every_direction(rows: int, columns: int, rank: int, limit: float, seed: int) -> None:
    lost, scale = random(rows, columns, seed=seed), 2.0
    a, b = random(rank, columns, seed=seed + 1), random(rows, rank, seed=seed + 2)
    b[:, 0] *= 1e-3
    directions = torch.linalg.svd(a, full_matrices=False)[2].T
    whole, _ = corrected(a, b, scale, lambda v: lost @ v, None)
    held, limited = corrected(a, b, scale, lambda v: lost @ v, limit)
    own = scale * b @ a @ directions
    wanted, got = (scale * (factor - b) @ a @ directions for factor in (whole, held))
    above = relatively(wanted, own) > limit
    assert limited == int(above.sum())
    shrunk = torch.where(above, limit / relatively(wanted, own), 1.0)
    torch.testing.assert_close(got, wanted * shrunk, rtol=1e-7, atol=1e-9)
    assert bool((relatively(got, own) <= limit * (1 + 1e-7)).all())


def test_an_adapter_that_does_nothing_is_left_so() -> None:
    a, b = random(3, 8, seed=0), torch.zeros(5, 3, dtype=torch.float64)
    found, limited = corrected(a, b, 2.0, lambda v: random(5, 8, seed=1) @ v, 3.0)
    assert torch.equal(found, b)
    assert limited == 3


def trained_around(folder: Path, precision: Precision, **options: Any) -> dict[str, torch.Tensor]:
    """An adapter of `small`, saved as `adapter`; returns what each projection computes with then, float64 [O, I]."""
    adapted = trained(load_model(folder / "small", precision), folder / "adapter", **{"r": EVERYTHING, **options})
    with torch.no_grad():
        return {
            name.removeprefix("base_model.model."): torch.cat(
                [block for _, block in weight_blocks(module.base_layer, torch.float32)]
            ).double()
            for name, module in adapted.named_modules()
            if hasattr(module, "lora_A") and hasattr(module, "base_layer")
        }


def recovered(folder: Path, plan: PruningPlan, precision: Precision, limit: float | None = None) -> dict[str, int]:
    with (
        CheckpointReader(folder / "base") as base,
        Adapter(folder / "adapter") as adapter,
        Correction(folder / "small", precision, base, plan, limit) as correction,
    ):
        recover(adapter, plan, base, folder / "recovered", correction)
    return correction.metrics()


def aligned(folder: Path) -> None:
    """Moves every weight of `small` a little, as an alignment would."""
    path = folder / "small" / "model.safetensors"
    moved = {
        name: tensor + 0.02 * random(*tensor.shape, seed=number).to(tensor.dtype)
        for number, (name, tensor) in enumerate(sorted(load_file(path).items()))
    }
    save_file(moved, path, {"format": "pt"})


def require_as_trained(folder: Path, plan: PruningPlan, emulated: dict[str, torch.Tensor]) -> None:
    """Base + recovered is, on what was kept, small + adapter; and the base on all else."""
    with (
        Adapter(folder / "adapter") as small,
        Adapter(folder / "recovered") as full,
        CheckpointReader(folder / "base") as base,
    ):
        for module in small.modules:
            located = plan.architecture.locate(module)
            if located is None:
                continue
            index = torch.tensor(plan.index(*located))
            a, b = (factor.double() for factor in full.factors(module))
            delta = full.scale(module) * b @ a
            after = base.read(f"{module}.weight").double() + delta
            a, b = (factor.double() for factor in small.factors(module))
            before = emulated[module] + small.scale(module) * b @ a
            kept = after.index_select(located[1].axis, index)
            torch.testing.assert_close(kept, before, rtol=1e-3, atol=1e-4, msg=module)
            removed = delta.index_fill(located[1].axis, index, 0)
            assert not removed.any()


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 99),
    model_type=st.sampled_from(["llama", "qwen2", "phi3"]),
    quantizer=st.sampled_from(["none", "nf4", "int8"]),
    alignment=st.booleans(),
    rslora=st.booleans(),
)
def test_the_full_model_computes_as_the_small_one_did(
    seed: int, model_type: str, quantizer: str, alignment: bool, rslora: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, precision = Path(name), Precision(torch.float32, quantizer)
        plan = prune(make_model(folder / "base", seed=seed, model_type=model_type), folder / "small", seed)
        if alignment:
            aligned(folder)
        targets = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"] if model_type == "phi3" else ALL
        emulated = trained_around(folder, precision, target_modules=targets, use_rslora=rslora)
        metrics = recovered(folder, plan, precision)
        assert metrics["corrected_modules"] == len(emulated)
        require_as_trained(folder, plan, emulated)


@pytest.mark.parametrize("quantizer", ["none", "nf4"])
def test_factors_are_corrected_as_their_product(tmp_path: Path, quantizer: str) -> None:
    plan, precision = factored_model(tmp_path), Precision(torch.float32, quantizer)
    emulated = trained_around(tmp_path, precision)
    recovered(tmp_path, plan, precision)
    require_as_trained(tmp_path, plan, emulated)


def test_a_cut_alone_loses_nothing_to_correct(tmp_path: Path) -> None:
    precision = Precision(torch.float32)
    plan = prune(make_model(tmp_path / "base", seed=5), tmp_path / "small", 5)
    trained_around(tmp_path, precision, r=4, target_modules=[*ALL, "lm_head"])
    with CheckpointReader(tmp_path / "base") as base, Adapter(tmp_path / "adapter") as adapter:
        recover(adapter, plan, base, tmp_path / "plain")
    assert recovered(tmp_path, plan, precision, 3.0)["limited_directions"] == 0
    files = [(tmp_path / name / WEIGHTS_NAME).read_bytes() for name in ("plain", "recovered")]
    assert files[0] == files[1]


def test_head_and_embedding_are_recovered_as_they_are(tmp_path: Path) -> None:
    precision = Precision(torch.float32, "nf4")
    plan = prune(make_model(tmp_path / "base", seed=6), tmp_path / "small", 6)
    aligned(tmp_path)
    trained_around(tmp_path, precision, r=4, target_modules=["q_proj", "lm_head"], modules_to_save=["embed_tokens"])
    assert recovered(tmp_path, plan, precision)["corrected_modules"] == 2
    before, after = (load_file(tmp_path / name / WEIGHTS_NAME) for name in ("adapter", "recovered"))
    for name in after:
        if "lm_head" in name or "embed_tokens" in name or "lora_A" in name:
            assert torch.equal(before[name], after[name]), name


@pytest.mark.parametrize("quantizer", ["none", "nf4"])
def test_a_dora_computes_as_on_the_small_model(tmp_path: Path, quantizer: str) -> None:
    precision = Precision(torch.float32, quantizer)
    plan = prune(make_model(tmp_path / "base", seed=4), tmp_path / "small", 4)
    aligned(tmp_path)
    emulated = trained_around(tmp_path, precision, use_dora=True)
    recovered(tmp_path, plan, precision)
    with (
        Adapter(tmp_path / "adapter") as small,
        CheckpointReader(merged(tmp_path, plan)) as result,
    ):
        ratio = small.ratios()
        for module in small.modules:
            located = plan.architecture.locate(module)
            assert located is not None
            a, b = (factor.double() for factor in small.factors(module))
            expected = ratio[module].double()[:, None] * (emulated[module] + small.scale(module) * b @ a)
            index = torch.tensor(plan.index(*located))
            kept = result.read(f"{module}.weight").double().index_select(located[1].axis, index)
            torch.testing.assert_close(kept, expected, rtol=1e-3, atol=1e-4, msg=module)


def test_a_small_model_of_another_plan_is_refused(tmp_path: Path) -> None:
    plan = prune(make_model(tmp_path / "base", seed=4), tmp_path / "small", 4)
    prune(tmp_path / "base", tmp_path / "other", 8)
    with CheckpointReader(tmp_path / "base") as base, pytest.raises(WrongBaseError, match="trained on: their"):
        Correction(tmp_path / "other", Precision(torch.float32), base, plan, 3.0)


def test_recover_corrects_where_the_recipe_says_so(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    command = (recipe, "--artifacts", tmp_path / "a", "--json", "evaluate.datasets={}")
    plain = {entry["stage"]: entry for entry in loram("run", *command).json}
    done = loram("run", *command, "recover.correction=emloc")
    assert done.code == 0, done.err
    made = {entry["stage"]: entry for entry in done.json}
    assert [stage for stage, entry in made.items() if not entry["cached"]] == ["recover", "merge"]
    metrics = made["recover"]["metrics"]
    assert metrics["corrected_modules"] == metrics["modules"] == 14
    assert metrics["directions"] == 14 * 8
    before, after = (load_file(Path(run["recover"]["folder"]) / WEIGHTS_NAME) for run in (plain, made))
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if "lora_B" in name
    }
    assert "EMLoC" in (Path(made["recover"]["folder"]) / "README.md").read_text()
    plans = [loram("plan", *command, f"recover.correction={name}").json["host_bytes"] for name in ("none", "emloc")]
    assert plans[0]["recover"] < plans[1]["recover"]
    limited = loram("recover", *command, "recover.correction=emloc", "recover.correction_limit=0.001").json
    assert limited["metrics"]["limited_directions"] == 14 * 8
    assert loram("recover", *command, "recover.correction_limit=1").json["cached"], "no influence while it is off"


def test_the_small_model_must_be_the_adapters(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    command = (recipe, "--artifacts", tmp_path / "a", "--json")
    for stage in ("score", "prune", "align"):
        loram(stage, *command)
    adapter = loram("train", *command, "align.max_steps=0").json["folder"]
    refused = loram("recover", *command, "--from", adapter, "recover.correction=emloc")
    assert refused.code == 1
    assert "was not trained on" in refused.err
    moved = loram("recover", *command, "recover.correction=emloc", "train.init_lora_weights=pissa")
    assert moved.code == 2
    assert "moves part of them" in moved.err
