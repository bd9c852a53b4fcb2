"""A grid's points and the table of their results, without running anything."""

from __future__ import annotations

import csv
import io
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from loram_stages.sweep import folder_of, grid, split

from loram.errors import RecipeError
from loram.report.sweep import _points, _worth, cost, draw, flat, table


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("0.3,0.5", ["0.3", "0.5"]),
        ("cut, low_rank", ["cut", "low_rank"]),
        ("[tensorboard,wandb]", ["[tensorboard,wandb]"]),
        ("{path: a, limit: 3},{path: b}", ["{path: a, limit: 3}", "{path: b}"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ("", [""]),
    ],
)
def test_commas_within_a_value_belong_to_it(text: str, items: list[str]) -> None:
    assert split(text) == items


@given(st.lists(st.recursive(st.integers() | st.text("ab ,]}[{'\""), st.lists, max_leaves=4), min_size=1, max_size=4))
def test_json_values_come_apart_as_they_went_together(values: list[Any]) -> None:
    texts = [json.dumps(value).replace('\\"', "'") for value in values]
    assert split(",".join(texts)) == texts


def test_a_grid_is_every_combination_once(recipe: Path) -> None:
    points = grid(recipe, ["prune.ratio=0.25,0.5,0.50", "train.seed=0,1", "train.max_steps=2"])
    assert [dict(point.labels) for point in points] == [
        {"prune.ratio": ratio, "train.seed": seed} for ratio in ("0.25", "0.5") for seed in ("0", "1")
    ]
    assert {point.recipe.train.max_steps for point in points} == {2}
    assert [point.recipe.prune.ratio for point in points] == [0.25, 0.25, 0.5, 0.5]
    assert folder_of(points) == folder_of(grid(recipe, ["train.max_steps=2", "prune.ratio=0.25,0.5", "train.seed=0,1"]))


def test_what_is_compared_is_evaluated(recipe: Path) -> None:
    with pytest.raises(RecipeError, match="leaves them out") as caught:
        grid(recipe, ["train.seed=0,1", "evaluate.variants=[pruned, merged]"])
    assert "'recovered'" in str(caught.value.fix)
    assert len(grid(recipe, ["train.seed=0,1", "evaluate.variants=[recovered]"])) == 2


def test_variants_change_several_keys(recipe: Path, tmp_path: Path) -> None:
    file = tmp_path / "variants.yaml"
    file.write_text(
        yaml.safe_dump(
            {"random": {"prune.criterion": "random"}, "long": {"train.max_steps": 9, "train.lora_r": 2}},
            sort_keys=False,
        )
    )
    points = grid(recipe, ["train.seed=0,1"], file)
    assert [tuple(point.labels.values()) for point in points] == [
        ("random", "0"), ("random", "1"), ("long", "0"), ("long", "1"),
    ]  # fmt: skip
    assert points[3].recipe.train.lora_r == 2
    assert points[0].recipe.prune.criterion == "random"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.sed=0,1"], "did you mean"),
        (["train.seed=0,x"], "train.seed"),
        (["train.seed=0,1", "train.seed=2,3"], "twice"),
        (["train.seed=0,,1"], "empty value"),
        (["train.seed"], "not an override"),
        (["evaluate.datasets={}", "train.seed=0,1"], "evaluate.datasets is empty"),
        (["train.datasets=missing.jsonl", "train.seed=0,1"], "missing.jsonl"),
    ],
)
def test_a_bad_grid_is_refused_before_any_work(recipe: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(Exception, match=words.replace(".", r"\.")):
        grid(recipe, arguments)


def test_damaged_variants_are_refused(recipe: Path, tmp_path: Path) -> None:
    for text in ("- a", "a: 3", "{", ""):
        (tmp_path / "v.yaml").write_text(text)
        with pytest.raises(RecipeError, match="NAME"):
            grid(recipe, [], tmp_path / "v.yaml")


def result(ratio: str, seed: str, loss: float, error: str | None = None) -> dict[str, Any]:
    variants = {
        name: {"sums": {"loss": value, "perplexity": 2**value, "tokens": 7}}
        for name, value in (("base", 3.0), ("base + recovered", loss), ("merged", loss))
    }
    return {
        "labels": {"prune.ratio": ratio, "train.seed": seed},
        "error": error,
        "variants": {} if error else variants,
        "share_of_full_lora_gain": {} if error else {"base + recovered": {"sums": 0.5}},
        "stages": {} if error else {"prune": {"seconds": 1.5, "folder": "prune-1"}, "train": {"seconds": 10}},
    }


def test_the_table_has_means_and_deviations_over_an_axis() -> None:
    losses = (2.0, 2.5, 2.25)
    results = [result("0.5", str(seed), loss) for seed, loss in enumerate(losses)] + [result("0.3", "0", 1.0)]
    header, rows = table(results)
    assert header == [
        "prune.ratio",
        "train.seed",
        "base",
        "base + recovered",
        "merged",
        "base + recovered, share",
        "seconds",
    ]
    assert rows[0] == ["0.5", "0", "8.000", "4.000", "4.000", "50%", "12"]
    header, rows = table(results, over="train.seed")
    values = [2**loss for loss in losses]
    assert header[0] == "prune.ratio"
    assert rows[0][2] == f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"
    assert rows[1] == ["0.3", "8.000", "2.000", "2.000", "50%", "12"]


def test_a_failed_point_keeps_its_place_and_says_why() -> None:
    header, rows = table([result("0.5", "0", 2.0), result("0.9", "0", 0.0, "no layer is left\nmore")])
    assert header[-1] == "error"
    assert (rows[0][-1], rows[1][-1]) == ("", "no layer is left")
    assert rows[1][2:-1] == [""] * 5


def test_csv_holds_every_number() -> None:
    (row,) = csv.DictReader(io.StringIO(flat([result("0.5", "1", 2.0)])))
    assert row["labels.train.seed"] == "1"
    assert float(row["variants.base + recovered.sums.loss"]) == 2.0
    assert float(row["stages.prune.seconds"]) == 1.5
    assert row["error"] == ""


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = [result(ratio, seed, float(ratio) + int(seed)) for ratio in ("0.3", "0.5") for seed in ("0", "1")]
    assert draw(results, tmp_path) == [tmp_path / "sums.svg"]
    assert "prune.ratio" in (tmp_path / "sums.svg").read_text() or (tmp_path / "sums.svg").stat().st_size > 1000


def test_pictures_show_shares_where_there_are_any() -> None:
    with_baseline = [result("0.5", "0", 2.0), result("0.3", "0", 1.0)]
    what, worth = _worth(with_baseline, "sums")
    assert what.startswith("share of full LoRA's gain")
    assert worth(with_baseline[0]) == 0.5
    without = [dict(with_baseline[0]) | {"share_of_full_lora_gain": {"base + recovered": {}}}, with_baseline[1]]
    what, worth = _worth(without, "sums")
    assert what.startswith("nats a token")
    assert worth(without[0]) == 2.0


def test_costs_are_those_of_the_way_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The baseline is what it is compared with; of peaks the highest counts, and no stage's number may be missing."""
    one = result("0.5", "0", 2.0)
    one["stages"] = {
        "prune": {"seconds": 2.0, "folder": "prune-1", "host_peak_bytes": 7},
        "train": {"seconds": 3.0, "flops": 10, "weight_bytes": 40, "host_peak_bytes": 5},
        "train (baseline)": {"seconds": 100.0, "flops": 1000, "weight_bytes": 80, "host_peak_bytes": 900},
    }
    names = ("seconds", "flops", "weight_bytes", "host_peak_bytes", "tokens")
    assert [cost(one, name) for name in names] == [5, 10, 40, 7, None]
    header, (row,) = table([one], against="weight_bytes")
    assert dict(zip(header, row, strict=True)) | {"weight_bytes": "40.000", "seconds": "5"} == dict(
        zip(header, row, strict=True)
    )
    other = result("0.5", "1", 3.0) | {"stages": one["stages"]}
    axes = ["prune.ratio", "train.seed"]
    points = _points([one, other], axes, lambda of: cost(of, "flops") or 0, lambda of: len(of["labels"]))
    assert points == [(10, 2, "0"), (10, 2, "1")]
    pytest.importorskip("matplotlib")
    two = [one, result("0.3", "0", 1.0)]
    (picture,) = draw(two, tmp_path, against="flops")
    before = picture.read_bytes()
    assert draw(two, tmp_path, against="flops")[0].read_bytes() == before, "the same picture is the same file"
    draw([one], tmp_path, against="tokens")
    assert "1 points are not in the pictures" in caplog.text
    odd = result("0.5", "0", 2.0) | {"labels": {"train.rank_pattern": '{"q_proj$": 2, "v_proj$\\x": 4}'}}
    assert draw([odd], tmp_path), "no formula"
