"""The factors found are those of a plain search with PEFT in memory, and are kept where they hold up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from loram.adapter.folder import WEIGHTS_NAME, Adapter
from loram.adapter.scale import Search, kind_of, search, write_scaled
from loram.models.layerwise import LayerwiseModel
from loram.models.loading import Precision
from tests.conftest import ROOT, Result, make_model
from tests.numerics.test_recover_merge import ALL, trained_adapter

Cli = Callable[..., Result]
Batch = dict[str, torch.Tensor]


class InMemory:
    """PEFT's own layers on the whole model, B multiplied by hand."""

    def __init__(self, base: Path, adapter: Path) -> None:
        self.model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
        self._b = {
            name: parameter.detach().clone()
            for name, parameter in self.model.named_parameters()
            if "lora_B" in name or "lora_embedding_A" in name
        }

    def set(self, factors: Mapping[str, float]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in self._b:
                    kind = name[: name.index(".lora_")].rpartition(".")[2]
                    parameter.copy_(self._b[name] * factors[kind])

    @torch.no_grad()
    def logits(self, batch: Batch) -> torch.Tensor:
        return self.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits

    def loss(self, rows: Sequence[Batch], factors: Mapping[str, float]) -> float:
        self.set(factors)
        nll, tokens = 0.0, 0
        for batch in rows:
            labels = batch["labels"][:, 1:]
            chances = self.logits(batch)[:, :-1].double().log_softmax(-1)
            nll -= float(chances.gather(-1, labels.clamp(min=0)[..., None])[..., 0][labels != -100].sum())
            tokens += int((labels != -100).sum())
        return nll / tokens

    def rows(self, count: int, factors: Mapping[str, float], seed: int) -> list[Batch]:
        """Random rows; what follows each token is drawn as the model with such factors would."""
        self.set(factors)
        generator = torch.Generator().manual_seed(seed)
        found = []
        for length in torch.randint(24, 48, (count,), generator=generator).tolist():
            ids = torch.randint(3, 270, (1, length), generator=generator)
            batch = {"input_ids": ids, "position_ids": torch.arange(length)[None]}
            chances = self.logits(batch)[0, :-1].softmax(-1)
            drawn = torch.multinomial(chances, 1, generator=generator)[:, 0]
            labels = torch.cat([torch.tensor([-100, -100]), drawn[1:]])[None]
            found.append(batch | {"labels": labels})
        return found


def by_hand(
    model: InMemory, rows: Sequence[Batch], kinds: Sequence[str], grid: Sequence[float], per_kind: bool
) -> tuple[dict[str, float], float]:
    """One factor for all, then kind after kind, every candidate alone."""
    best = dict.fromkeys(kinds, 1.0)
    lowest = model.loss(rows, best)
    for step in [kinds, *[[kind] for kind in kinds]] if per_kind else [kinds]:
        losses = {factor: model.loss(rows, {**best, **dict.fromkeys(step, factor)}) for factor in grid}
        factor = min(losses, key=lambda each: losses[each])
        if losses[factor] < lowest:
            best, lowest = {**best, **dict.fromkeys(step, factor)}, losses[factor]
    return best, lowest


def found(
    folder: Path, chosen: list[Batch], check: list[Batch], grid: Sequence[float], per_kind: bool = True
) -> Search:
    with LayerwiseModel(
        folder / "base", Precision(torch.float32), 10**9, folder / "hidden", folder / "adapter"
    ) as engine:
        return search(engine, chosen, check, grid, per_kind)


def loud(folder: Path, times: float) -> None:
    """Multiplies every B of the adapter."""
    path = folder / "adapter" / WEIGHTS_NAME
    tensors = {name: tensor * (times if "lora_B" in name else 1) for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 6},
        "alpha_pattern": {"(k|v)_proj": 3, "layers.0.self_attn.q_proj": 40},
    },
    "head and embedding": {"target_modules": ["q_proj", "down_proj", "lm_head", "embed_tokens"]},
    "a head trained whole": {"target_modules": ["o_proj", "up_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("per_kind", [True, False])
def test_the_search_is_the_one_by_hand(tmp_path: Path, options: dict[str, Any], per_kind: bool) -> None:
    base = make_model(tmp_path / "base", seed=1)
    trained_adapter(base, tmp_path / "adapter", 1, **{"target_modules": ALL, **options})
    model = InMemory(base, tmp_path / "adapter")
    kinds = sorted(options.get("target_modules", ALL))
    hidden = {kind: (0.5, 1.0, 2.0)[number % 3] for number, kind in enumerate(kinds)}
    chosen, check = model.rows(6, hidden, 0), model.rows(3, hidden, 1)
    grid = (0.5, 0.7, 1.0, 1.4, 2.0)
    result = found(tmp_path, chosen, check, grid, per_kind)
    expected, lowest = by_hand(model, chosen, kinds, grid, per_kind)
    assert result.found == expected
    assert result.chosen[1].loss == pytest.approx(lowest, rel=1e-5)
    plain = dict.fromkeys(kinds, 1.0)
    for rows, (before, after) in ((chosen, result.chosen), (check, result.check)):
        assert before.loss == pytest.approx(model.loss(rows, plain), rel=1e-5)
        assert after.loss == pytest.approx(model.loss(rows, expected), rel=1e-5)
        assert before.tokens == sum(int((row["labels"] != -100).sum()) for row in rows)
    with Adapter(tmp_path / "adapter") as adapter:
        write_scaled(adapter, result.found, tmp_path / "scaled")
        with Adapter(tmp_path / "scaled") as scaled:
            assert scaled.config == adapter.config
            for tensor in adapter.tensors:
                factor = expected[kind_of(tensor.module)] if tensor.part == "B" else 1.0
                old, new = (each.reader.read(tensor.key) for each in (adapter, scaled))
                assert torch.equal(new, old if factor == 1 else old * factor), tensor.key
    again = InMemory(base, tmp_path / "scaled")
    assert again.loss(check, plain) == pytest.approx(result.check[1].loss, rel=1e-5)


@pytest.mark.parametrize("per_kind", [True, False])
def test_an_adapter_four_times_too_loud_is_brought_back(tmp_path: Path, per_kind: bool) -> None:
    base = make_model(tmp_path / "base", seed=2)
    trained_adapter(base, tmp_path / "adapter", 2, lora_alpha=20)
    model = InMemory(base, tmp_path / "adapter")
    plain = dict.fromkeys(ALL, 1.0)
    chosen, check = model.rows(24, plain, 0), model.rows(24, plain, 1)
    loud(tmp_path, 4.0)
    result = found(tmp_path, chosen, check, (0.25, 0.5, 2.0, 4.0), per_kind)
    assert result.helps
    assert result.factors == result.found
    assert result.check[1].loss < result.check[0].loss - 0.01
    if not per_kind:
        assert result.found == dict.fromkeys(ALL, 0.25)
        with Adapter(tmp_path / "adapter") as adapter:
            write_scaled(adapter, result.factors, tmp_path / "scaled")
        loud(tmp_path, 0.25)  # powers of two: not a bit is lost
        before, after = (load_file(tmp_path / name / WEIGHTS_NAME) for name in ("adapter", "scaled"))
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_good_adapter_stays_bit_for_bit(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", seed=2)
    trained_adapter(base, tmp_path / "adapter", 2, lora_alpha=20)
    plain = dict.fromkeys(ALL, 1.0)
    model = InMemory(base, tmp_path / "adapter")
    result = found(tmp_path, model.rows(24, plain, 0), model.rows(24, plain, 1), (0.25, 0.5, 2.0, 4.0), False)
    assert result.found == result.factors == plain
    assert not result.helps
    with Adapter(tmp_path / "adapter") as adapter:
        write_scaled(adapter, result.factors, tmp_path / "scaled")
    before, after = (load_file(tmp_path / name / WEIGHTS_NAME) for name in ("adapter", "scaled"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_does_not_hold_up_on_other_rows_is_dropped(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", seed=2)
    trained_adapter(base, tmp_path / "adapter", 2, lora_alpha=20)
    model = InMemory(base, tmp_path / "adapter")
    chosen, check = (model.rows(16, dict.fromkeys(ALL, factor), 0) for factor in (0.25, 1.0))
    result = found(tmp_path, chosen, check, (0.25, 0.5, 2.0), False)
    assert result.found == dict.fromkeys(ALL, 0.25)
    assert result.chosen[1].loss < result.chosen[0].loss
    assert not result.helps
    assert result.factors == dict.fromkeys(ALL, 1.0)


def test_a_factor_is_not_lost_to_16_bits(tmp_path: Path) -> None:
    trained_adapter(make_model(tmp_path / "base"), tmp_path / "adapter")
    path = tmp_path / "adapter" / WEIGHTS_NAME
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    with Adapter(tmp_path / "adapter") as adapter:
        write_scaled(adapter, {"q_proj": 1.2}, tmp_path / "scaled")
    before, after = (load_file(tmp_path / name / WEIGHTS_NAME) for name in ("adapter", "scaled"))
    for name, tensor in before.items():
        scaled = "q_proj.lora_B" in name
        assert after[name].dtype == (torch.float32 if scaled else torch.bfloat16)
        assert torch.equal(after[name], tensor.float() * 1.2 if scaled else tensor)


def test_the_stage_on_the_tiny_recipe(loram: Cli, tmp_path: Path) -> None:
    settings = [
        "scale.dataset={path: 'stdlib:docstrings', limit: 24, seed: 5}", "scale.max_length=1024", "scale.rows=4",
        "scale.grid=[0.5, 1, 2]", "train.learning_rate=0.01",
    ]  # fmt: skip
    command = (ROOT / "recipes" / "tiny.yaml", *settings, "--artifacts", tmp_path / "a", "--json")
    assert "skipped" in loram("scale", *command, "scale.dataset=null").json
    first = loram("run", *command)
    assert first.code == 0, first.err
    made = {entry["stage"]: entry for entry in first.json}
    assert all(entry["cached"] for entry in loram("run", *command).json)
    metrics = made["scale"]["metrics"]
    assert set(metrics["factors"]) == set(metrics["found_factors"]) == set(ALL)
    assert metrics["kept"] == (metrics["check_loss_after"] < metrics["check_loss_before"])
    assert metrics["chosen_loss_after"] <= metrics["chosen_loss_before"]
    assert min(metrics["chosen_loss_tokens"], metrics["check_loss_tokens"]) > 0
    variants = made["evaluate"]["metrics"]["variants"]
    losses = {name: variant["docstrings"]["loss"] for name, variant in variants.items()}
    assert losses["merged"] == pytest.approx(losses["base + scaled"], rel=1e-5)
    assert (losses["base + scaled"] == losses["base + recovered"]) == (not metrics["kept"])
    with Adapter(Path(made["recover"]["folder"])) as before, Adapter(Path(made["scale"]["folder"])) as after:
        for tensor in before.tensors:
            factor = metrics["factors"][kind_of(tensor.module)] if tensor.part == "B" else 1.0
            assert torch.equal(after.reader.read(tensor.key), before.reader.read(tensor.key) * factor)

    def remade(*overrides: str) -> list[str]:
        run = loram("run", *command, "evaluate.datasets={}", *overrides).json
        return [entry["stage"] for entry in run if not entry["cached"]]

    assert remade("scale.grid=[0.5, 1, 3]", "scale.per_kind=false") == ["scale", "merge"]
    assert remade("scale.dataset.limit=20", "scale.per_kind=false") == ["scale", "merge"]
    assert remade("scale.dataset=null") == ["merge"]
    states = [(line["stage"], line["state"]) for line in loram("status", *command, "scale.seed=9").json]
    assert ("recover", "ready") in states
    assert {("scale", "to make"), ("merge", "to make")} <= set(states)
    planned = loram("plan", *command).json
    assert planned["host_bytes"]["scale"] >= planned["host_bytes"]["merge"]
    assert planned["disk"]["stages"]["scale"] == planned["disk"]["stages"]["recover"]
    assert loram("data", "show", command[0], *settings, "--section", "scale", "--json").json[0]["examples"] > 0
    assert loram("merge", *command, "--from", made["scale"]["folder"]).code == 0


def test_anybodys_adapter_of_the_base_is_scaled(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    adapter = trained_adapter(tmp_path / "base", tmp_path / "adapter", 3, lora_alpha=200, target_modules=["q_proj"])
    command = (recipe, f"scale.dataset={tmp_path / 'rows.jsonl'}", "scale.max_length=64", "--artifacts", tmp_path / "a")
    made = loram("scale", *command, "--from", adapter, "--json")
    assert made.code == 0, made.err
    assert set(made.json["metrics"]["factors"]) == {"q_proj"}
    assert any("no plan.json" in note for note in made.json["notes"])
    assert loram("scale", *command, "--from", adapter, "--json").json["cached"]
    scarce = loram("scale", *command, "--from", adapter, "--json", "--remake", "--memory", "300KiB").json
    assert scarce["metrics"]["check_loss_after"] == pytest.approx(made.json["metrics"]["check_loss_after"], rel=1e-5)


def test_what_cannot_be_scaled_is_refused(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    command = (recipe, f"scale.dataset={rows}", "--artifacts", tmp_path / "a")
    refused = loram("run", *command, "train.use_dora=true")
    assert refused.code == 2
    assert "belong to one scale" in refused.err
    dora = trained_adapter(tmp_path / "base", tmp_path / "dora", use_dora=True)
    refused = loram("scale", *command, "--from", dora)
    assert refused.code == 1
    assert "a DoRA" in refused.err
    lora = trained_adapter(tmp_path / "base", tmp_path / "lora")
    refused = loram("scale", *command, "--from", lora, f"scale.dataset={{path: {rows}, limit: 1}}")
    assert refused.code == 1
    assert "1 packed row" in refused.err
    missing = loram("run", *command, "scale.dataset=nowhere.jsonl")
    assert missing.code == 1
    assert "nowhere.jsonl" in missing.err
    assert not list((tmp_path / "a").glob("*/scale-*"))
