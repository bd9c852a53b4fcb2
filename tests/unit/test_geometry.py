"""The paper's rule, held against its published parameter counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loram.errors import RecipeError
from loram.memory.stored import sizes
from loram.models.architecture import UNITS, Architecture, Unit
from loram.models.shape import Widths
from loram.models.sizes import inline_shape
from loram.pruning.geometry import plan_geometry
from loram.pruning.plan import PruningPlan
from loram.pruning.scores import Scores, make_plan, random_scores
from loram.recipe import load_recipe
from tests.conftest import ROOT

PUBLISHED = [
    ("llama-2-70b", 0.65, 3, 10035, 68_976_648_192, 28_099_436_544, 9.82),
    ("llama-2-70b", 0.75, 2, 7168, 68_976_648_192, 21_488_738_304, 12.84),
    ("llama-2-70b", 0.85, 2, 4300, 68_976_648_192, 16_272_924_672, 16.95),
    ("llama-2-70b", 0.95, 1, 1433, 68_976_648_192, 9_662_226_432, 28.56),
    ("llama-3.1-70b", 0.85, 2, 4300, 70_553_706_496, 17_849_982_976, 15.81),
    ("llama-2-13b", 0.65, 14, 4838, 13_015_864_320, 6_005_662_720, 8.67),
]


@pytest.mark.parametrize(("name", "ratio", "groups", "neurons", "base", "pruned", "four_bit"), PUBLISHED)
def test_published_counts_to_the_parameter(
    name: str, ratio: float, groups: int, neurons: int, base: int, pruned: int, four_bit: float
) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    shape = inline_shape(recipe.model.config)
    architecture = shape.architecture
    geometry = plan_geometry(architecture, ratio, recipe.prune.keep_first_layers, recipe.prune.keep_last_layers)
    assert geometry.kept == {"kv_group": groups, "neuron": neurons}
    full, small = sizes(shape, Widths.whole(architecture)), sizes(shape, geometry.widths(architecture))
    assert full.parameters == base
    assert small.parameters == pruned
    assert round(full.bf16_bytes / small.four_bit_bytes, 2) == pytest.approx(four_bit, abs=0.011)


@pytest.mark.parametrize(
    ("name", "gigabytes", "reduction"), [("llama-2-70b", 9.17, 15.0), ("llama-3.1-70b", 12.33, 11.4)]
)
def test_stored_bytes_as_bitsandbytes_keeps_them(name: str, gigabytes: float, reduction: float) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    shape = inline_shape(recipe.model.config)
    geometry = plan_geometry(shape.architecture, 0.85, 4, 2)
    full, small = sizes(shape, Widths.whole(shape.architecture)), sizes(shape, geometry.widths(shape.architecture))
    assert small.stored_bytes / 1e9 == pytest.approx(gigabytes, abs=0.01)
    assert full.bf16_bytes / small.stored_bytes == pytest.approx(reduction, abs=0.05)


def architecture(**numbers: Any) -> Architecture:
    facts: dict[str, Any] = {
        "model_type": "x", "layers": 8, "layers_prefix": "model.layers", "kv_groups": 2, "neurons": 10,
        "query_heads_per_group": 1, "embedding": "e", "head": "h", "projections": (),
    }  # fmt: skip
    return Architecture(**{**facts, **numbers})


@given(st.integers(1, 64), st.integers(1, 30_000), st.floats(0, 0.999), st.integers(1, 256))
def test_something_always_stays_and_nothing_is_invented(groups: int, neurons: int, ratio: float, multiple: int) -> None:
    kept = plan_geometry(architecture(kv_groups=groups, neurons=neurons), ratio, 0, 0, multiple).kept
    assert 1 <= kept["kv_group"] <= groups
    assert 1 <= kept["neuron"] <= neurons


@pytest.mark.parametrize(("ratio", "neurons", "kept"), [(0.35, 20, 13), (0.3, 10, 7), (0.7, 10, 3), (0.1, 30, 27)])
def test_decimal_ratios_do_not_fall_off_by_one(ratio: float, neurons: int, kept: int) -> None:
    assert plan_geometry(architecture(neurons=neurons), ratio, 0, 0).kept["neuron"] == kept


def cut(architecture: Architecture, scores: Scores, ratio: float, multiple: int = 1) -> PruningPlan:
    geometry = replace(plan_geometry(architecture, ratio, 1, 0, multiple), across_layers=True, multiple_of=multiple)
    return make_plan(architecture, scores, geometry, "base", {})


@given(st.integers(0, 2**20), st.floats(0.05, 0.95), st.integers(1, 9), st.integers(1, 40))
def test_a_budget_of_the_model_is_used_and_kept(seed: int, ratio: float, groups: int, neurons: int) -> None:
    shape = inline_shape(
        {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 2 * groups, "intermediate_size": neurons,
         "num_attention_heads": groups, "num_key_value_heads": groups, "head_dim": 2, "vocab_size": 8}
    ).architecture  # fmt: skip
    plan = cut(shape, random_scores(shape, seed), ratio)
    allowed = plan_geometry(shape, ratio, 1, 0).widths(shape).parameters()
    units = [sum(p.parameters(1) for p in shape.projections if p.unit == unit) for unit in UNITS]
    assert plan.layers[0].kept_neurons == tuple(range(neurons))
    assert allowed - max(units) < plan.widths().parameters() <= allowed


def test_a_budget_of_the_model_goes_where_the_scores_are() -> None:
    shape = inline_shape(
        {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 4, "intermediate_size": 8,
         "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 8}
    ).architecture  # fmt: skip
    low = {"kv_group": torch.tensor([0.2, 0.1]).double(), "neuron": torch.arange(8).double() / 100}
    high: dict[Unit, torch.Tensor] = {"kv_group": torch.tensor([1.0, 2.0]).double(), "neuron": torch.ones(8).double()}
    plan = cut(shape, [high, low, high], 0.5)  # type: ignore[list-item]
    # A group has 32 weights and a neuron 12: room for two groups and eight neurons, one of each kind in either layer.
    assert plan.layers[2].kept_neurons == tuple(range(7))
    assert plan.layers[1].kept_kv_groups == (0,)
    assert plan.layers[1].kept_neurons == (7,)
    assert cut(shape, [high, low, high], 0.5, multiple=4).layers[1].kept_neurons == (4, 5, 6, 7)  # type: ignore[list-item]


def test_rounding_is_said() -> None:
    tiny = architecture()
    text = plan_geometry(tiny, 0.3, 0, 0).describe(tiny, 0.3)
    assert "2 of 2 KV groups (0% removed)" in text
    assert "7 of 10 neurons" in text


def test_one_kv_head_is_said() -> None:
    one = architecture(kv_groups=1)
    geometry = plan_geometry(one, 0.9, 0, 0)
    assert geometry.kept["kv_group"] == 1
    assert "attention is not cut" in geometry.describe(one, 0.9)


def test_no_layer_left_to_cut_is_refused() -> None:
    with pytest.raises(RecipeError, match="leaves none to cut"):
        plan_geometry(architecture(), 0.5, 4, 4)
    assert not plan_geometry(architecture(), 0.0, 4, 4).cut_layers


def test_multiple_of_rounds_the_neurons() -> None:
    assert plan_geometry(architecture(neurons=1000), 0.5, 0, 0, 64).kept["neuron"] == 512
