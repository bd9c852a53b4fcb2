"""Rates and MFU: the plan's operations without what checkpointing repeats, over the card's peak."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loram.memory.cards import CARDS
from loram.memory.flops import token_flops
from loram.memory.plan import pruned_widths, train_setup
from loram.models.shape import Widths
from loram.models.tables import known_shape
from loram.recipe import load_recipe
from loram.training.speed import _CUDA_NAMES, StepFlops, peak_flops, rates
from tests.conftest import ROOT


def test_every_card_has_its_cuda_name() -> None:
    assert set(_CUDA_NAMES.values()) == set(CARDS)
    assert peak_flops("NVIDIA H200") == 989e12
    for other in ("NVIDIA A10G", "NVIDIA H100 PCIe", "NVIDIA GeForce RTX 4090 Laptop GPU", "Some CPU"):
        assert peak_flops(other) is None


@pytest.mark.parametrize("labelled", [0, 1, 100, 511])
def test_a_steps_operations_are_the_plans(labelled: int, tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / "llama-2-70b.yaml")
    shape = known_shape(recipe.model.config)
    assert shape is not None
    setup = train_setup(recipe.train, shape.architecture)
    for widths in (Widths.whole(shape.architecture), pruned_widths(shape.architecture, recipe.prune)):
        flops = StepFlops.of(shape, widths, setup)
        planned = token_flops(
            shape, widths, replace(setup, activation_checkpointing=False, labelled_positions=labelled)
        )
        exact = flops.step(setup.tokens, labelled * setup.batch)
        assert exact == pytest.approx(planned.step * setup.tokens, rel=1e-6)
        assert exact < token_flops(shape, widths, setup).step * setup.tokens


def test_rates_and_mfu() -> None:
    counts = {"tokens": 1000, "loss_tokens": 100, "rows": 4, "padding_tokens": 24}
    flops = StepFlops(per_token=10_000, per_label=50_000)
    assert rates(counts, 2.0, None, 1e12) == {"tokens_per_second": 500.0, "rows_per_second": 2.0}
    assert rates(counts, 2.0, flops, None).keys() == {"tokens_per_second", "rows_per_second"}
    assert rates(counts, 2.0, flops, 1e7)["mfu"] == 0.75
    assert rates(counts, 0.0, flops, 1e7) == {}
