"""Gradient scores one layer at a time equal those of the whole model, computed plainly in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from loram.checkpoint import CheckpointReader
from loram.errors import InputError
from loram.models.discover import discover
from loram.models.layerwise import LayerwiseModel
from loram.models.loading import Precision
from loram.models.pruned import load_config
from loram.pruning.plan import PruningPlan
from loram.pruning.scores import gradient_scores, load_scores, projection_weights, save_scores
from tests.conftest import Result, make_model

# In these families the rows (or columns) of unit u of a projection are told here by hand, apart from the table.
HEAD, GROUPS, NEURONS = 32, 2, 48
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "qwen2 with biases": {"model_type": "qwen2"},
    "phi3, fused": {"model_type": "phi3"},
}


def rows_of(name: str, kind: str, unit: int) -> tuple[int, list[int]] | None:
    """(axis, indices) of a unit's part of a weight."""
    query = [*range(unit * 2 * HEAD, (unit + 1) * 2 * HEAD)]
    key = [*range(unit * HEAD, (unit + 1) * HEAD)]
    if kind == "kv_group":
        if name.endswith("qkv_proj"):
            return 0, [*query, *(4 * HEAD + i for i in key), *(6 * HEAD + i for i in key)]
        parts = {"q_proj": (0, query), "k_proj": (0, key), "v_proj": (0, key), "o_proj": (1, query)}
    else:
        if name.endswith("gate_up_proj"):
            return 0, [unit, NEURONS + unit]
        parts = {"gate_proj": (0, [unit]), "up_proj": (0, [unit]), "down_proj": (1, [unit])}
    return parts.get(name.rpartition(".")[2])


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for lengths in ((7, 12), (4, 9, 3)):
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        ids = torch.randint(3, 272, positions.shape, generator=generator)
        labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.5, ids, -100)
        found.append({"input_ids": ids, "position_ids": positions, "labels": labels})
    return found


@pytest.mark.parametrize("memory", [10**9, 220_000], ids=["plenty", "scarce"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_squares_of_each_batchs_gradient(tmp_path: Path, family: str, memory: int) -> None:
    base = make_model(tmp_path / "base", **FAMILIES[family])
    architecture = discover(load_config(base))
    with LayerwiseModel(
        base, Precision(torch.float32), memory, tmp_path / "spill", trains=projection_weights(architecture)
    ) as engine:
        got = gradient_scores(engine, architecture, batches())
    model = AutoModelForCausalLM.from_pretrained(base).double()
    squares = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for batch in batches():
        model.zero_grad()
        logits = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        targets = batch["labels"][:, 1:].flatten()
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum").backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                squares[name] += parameter.grad.square()
    for layer in range(2):
        for kind, count in (("kv_group", GROUPS), ("neuron", NEURONS)):
            expected = torch.zeros(count, dtype=torch.float64)
            for name, value in squares.items():
                for unit in range(count):
                    part = rows_of(name.removesuffix(".weight"), kind, unit)
                    if f"layers.{layer}." in name and part is not None and name.endswith(".weight"):
                        expected[unit] += value.index_select(part[0], torch.tensor(part[1])).sum()
            torch.testing.assert_close(got[layer][kind], expected.sqrt(), rtol=1e-4, atol=1e-6)  # type: ignore[index]


def test_scores_come_back_from_their_file_and_only_for_their_model(tmp_path: Path) -> None:
    architecture = discover(load_config(make_model(tmp_path / "base")))
    scores = [{u: torch.rand(architecture.units(u), dtype=torch.float64) for u in ("kv_group", "neuron")}] * 2
    digests = save_scores(scores, tmp_path)  # type: ignore[arg-type]
    assert set(digests) == {"scores.safetensors"}
    back = load_scores(tmp_path, architecture)
    assert all(torch.equal(a[u], b[u]) for a, b in zip(scores, back, strict=True) for u in a)  # type: ignore[index]
    other = discover(load_config(make_model(tmp_path / "other", intermediate_size=47)))
    with pytest.raises(InputError, match="47 of 'neuron' in layer 0"):
        load_scores(tmp_path, other)


def test_another_ratio_cuts_the_same_scores(loram: Callable[..., Result], recipe: Path, tmp_path: Path) -> None:
    command = (recipe, "--artifacts", tmp_path / "a", "--json", "prune.criterion=adapter_gradient")
    scored = loram("score", *command)
    assert scored.code == 0, scored.err
    kept = {}
    for ratio in ("0.3", "0.6"):
        made = loram("prune", *command, f"prune.ratio={ratio}")
        assert made.code == 0, made.err
        kept[ratio] = set(PruningPlan.load(Path(made.json["folder"])).layers[0].kept_neurons)
    assert kept["0.6"] < kept["0.3"]
    assert len(list((tmp_path / "a" / "test").glob("score-*"))) == 1
    with CheckpointReader(Path(scored.json["folder"]), single="scores.safetensors") as reader:
        values = reader.read("0.neuron")
    assert kept["0.6"] == set(values.sort(descending=True).indices[: len(kept["0.6"])].tolist())


def test_pruning_another_folder_scores_that_folder(loram: Callable[..., Result], recipe: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", seed=5)
    plans = {}
    for name, options in {"own": (), "given": ("--from", other)}.items():
        made = loram("prune", recipe, "--artifacts", tmp_path / "a", "--json", "prune.criterion=magnitude", *options)
        assert made.code == 0, made.err
        plans[name] = PruningPlan.load(Path(made.json["folder"])).layers[0]
    assert plans["own"] != plans["given"]
    assert len(list((tmp_path / "a" / "test").glob("score-*"))) == 2
