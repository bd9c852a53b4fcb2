"""A small model of low-rank factors: the best ones, computed as one linear, trained and recovered as any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from loram.adapter.folder import Adapter
from loram.adapter.linear import AdaptedLinear
from loram.checkpoint import CheckpointReader
from loram.errors import InputError
from loram.memory.resident import weights
from loram.memory.setup import TrainingSetup
from loram.memory.tracker import tensor_bytes
from loram.models.discover import discover
from loram.models.factored import FactoredLinear
from loram.models.layerwise import LayerwiseModel
from loram.models.loading import Precision, load_model
from loram.models.pruned import load_config
from loram.models.quantizers import PackedLinear, get_quantizer, weight_blocks
from loram.models.sizes import folder_shape
from loram.pruning.factors import FACTORS_NAME, factorize, factors
from loram.pruning.geometry import plan_geometry
from loram.pruning.plan import LayerPlan, PruningPlan
from loram.pruning.scores import make_plan
from loram.pruning.slicing import write_pruned
from loram.recipe import Criterion
from tests.conftest import Result, make_model

Cli = Callable[..., Result]


def best_error(seen_OI: torch.Tensor, rank: int) -> float:
    """Eckart and Young: what no factors of that rank can avoid."""
    return float(torch.linalg.svdvals(seen_OI)[rank:].square().sum().sqrt())


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 24), st.integers(1, 24), st.integers(1, 40), st.integers(1, 24), st.integers(0, 99))
def test_no_factors_of_the_rank_are_better(rows: int, columns: int, seen: int, rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rank = min(rank, rows, columns)
    weight_OI = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    x_TI = torch.randn(seen, columns, generator=generator, dtype=torch.float64)
    moment_II = x_TI.T @ x_TI
    u_OR, v_RI = factors(weight_OI, rank, moment_II)
    assert u_OR.shape == (rows, rank)
    assert v_RI.shape == (rank, columns)
    damped_II = moment_II + 0.01 * moment_II.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    square_root_II = torch.linalg.cholesky(damped_II)
    error = float(((weight_OI - u_OR @ v_RI) @ square_root_II).norm())
    whole = float((weight_OI @ square_root_II).norm())
    assert error == pytest.approx(best_error(weight_OI @ square_root_II, rank), abs=1e-7 * whole)

    g_TO = torch.randn(seen, rows, generator=generator, dtype=torch.float64)
    moment_OO = g_TO.T @ g_TO
    u_OR, v_RI = factors(weight_OI, rank, moment_II, moment_OO)
    damped_OO = moment_OO + 0.01 * moment_OO.diagonal().mean() * torch.eye(rows, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(damped_OO)  # another square root than a triangle
    root_OO = vectors * values.clamp(min=0).sqrt() @ vectors.T
    error = float((root_OO @ (weight_OI - u_OR @ v_RI) @ square_root_II).norm())
    seen_OI = root_OO @ weight_OI @ square_root_II
    assert error == pytest.approx(best_error(seen_OI, rank), abs=1e-6 * float(seen_OI.norm()))


def test_inputs_that_are_always_zero_still_leave_the_weight() -> None:
    weight_OI = torch.randn(6, 4, dtype=torch.float64)
    u_OR, v_RI = factors(weight_OI, 4, torch.zeros(4, 4))
    torch.testing.assert_close(u_OR @ v_RI, weight_OI)


def factored_model(folder: Path, ratio: float = 0.5, criterion: Criterion = "activation", **config: Any) -> PruningPlan:
    """`base` and `small` in a folder, every linear of every layer in two factors."""
    base = make_model(folder / "base", **config)
    architecture = discover(load_config(base))
    geometry = replace(plan_geometry(architecture, ratio, 0, 0), factored=frozenset(("kv_group", "neuron")))
    with CheckpointReader(base) as reader:
        plan = make_plan(architecture, None, geometry, "base", reader.identity())
        with LayerwiseModel(base, Precision(torch.float32), 10**9, folder / "hidden") as engine:
            data = () if criterion == "magnitude" else (engine, rows())
            factorize(reader, plan, folder / "factors", criterion, *data)
        with CheckpointReader(folder / "factors", single=FACTORS_NAME) as made:
            write_pruned(reader, plan, folder / "small", list, made)
    return plan


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for lengths in ((17, 20), (30,), (25, 9)):
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        found.append(
            {"input_ids": torch.randint(3, 272, positions.shape, generator=generator), "position_ids": positions}
        )
        found[-1]["labels"] = torch.where(positions > 2, found[-1]["input_ids"], -100)
    return found


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2 with biases": {"model_type": "qwen2"},
    "phi3, fused": {"model_type": "phi3"},
    "gemma3": {"model_type": "gemma3_text"},
}


@pytest.mark.parametrize("criterion", ["magnitude", "activation", "adapter_gradient"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_factored_model_computes_with_the_best_factors(tmp_path: Path, family: str, criterion: Criterion) -> None:
    """Against moments collected on transformers' own model in float64, and Eckart and Young's bound."""
    plan = factored_model(tmp_path, criterion=criterion, **FAMILIES[family])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").double().eval()
    inputs: dict[str, list[torch.Tensor]] = {}
    gradients: dict[str, list[torch.Tensor]] = {}

    def remember(name: str, x: torch.Tensor, out: torch.Tensor) -> None:
        inputs.setdefault(name, []).append(x.detach().flatten(0, -2))
        if out.requires_grad:
            out.register_hook(lambda g: gradients.setdefault(name, []).append(g.flatten(0, -2)))

    for name, module in base.named_modules():
        if plan.architecture.locate(name):
            module.register_forward_hook(lambda _, x, out, name=name: remember(name, x[0], out))
    for batch in rows():
        labels = batch["labels"]
        logits = base(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False).logits
        functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum").backward()
    small = load_model(tmp_path / "small", torch.float32)
    for name, x in inputs.items():
        module = small.get_submodule(name)
        assert isinstance(module, FactoredLinear)
        weight_OI = base.get_submodule(name).weight.detach()
        right_II = torch.eye(weight_OI.shape[1]) if criterion == "magnitude" else root(torch.cat(x))
        left_OO = root(torch.cat(gradients[name])) if criterion == "adapter_gradient" else torch.eye(len(weight_OI))
        product_OI = (module.u.weight.double() @ module.v.weight.double()).detach()
        rank = module.v.out_features
        seen_OI = left_OO.double().T @ weight_OI @ right_II.double()
        error = float((left_OO.double().T @ (weight_OI - product_OI) @ right_II.double()).norm())
        assert error == pytest.approx(best_error(seen_OI, rank), rel=1e-3, abs=1e-6 * float(seen_OI.norm())), name
        with torch.no_grad():
            base.get_submodule(name).weight.copy_(product_OI)
    with torch.no_grad():
        for batch in rows():
            inputs_only = {name: tensor for name, tensor in batch.items() if name != "labels"}
            got, expected = small(**inputs_only).logits, base(**inputs_only, use_cache=False).logits
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


def root(seen_TI: torch.Tensor) -> torch.Tensor:
    moment_II = seen_TI.T @ seen_TI
    moment_II.diagonal().add_(0.01 * moment_II.diagonal().mean())
    return torch.linalg.cholesky(moment_II)


@pytest.mark.parametrize("quantizer", ["none", "nf4", "int8", "hqq4"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_an_adapter_around_the_pair_is_one_around_its_product(quantizer: str, dora: bool) -> None:
    torch.manual_seed(0)
    pair = FactoredLinear(40, 56, 12, True, torch.device("cpu"), torch.float32)
    nn.init.normal_(pair.bias)
    if quantizer != "none":
        for name in ("u", "v"):
            packed = PackedLinear(getattr(pair, name), get_quantizer(quantizer))
            packed.fill(getattr(pair, name).weight.detach())
            setattr(pair, name, packed)
    pair.requires_grad_(False)
    whole = nn.Linear(40, 56)
    u_OR, v_RI = (torch.cat([b for _, b in weight_blocks(linear, torch.float32)]) for linear in (pair.u, pair.v))
    whole.load_state_dict({"weight": u_OR @ v_RI, "bias": pair.bias})
    torch.testing.assert_close(torch.cat([b for _, b in weight_blocks(pair, torch.float32)]), u_OR @ v_RI)
    whole.requires_grad_(False)
    results = []
    for base in (pair, whole):
        torch.manual_seed(1)
        layer = AdaptedLinear(base, "default", config=LoraConfig(r=3, lora_alpha=6, use_dora=dora), r=3, lora_alpha=6)
        nn.init.normal_(layer.lora_B["default"].weight)
        x = torch.randn(5, 7, 40, generator=torch.Generator().manual_seed(2)).requires_grad_()
        out = layer(x)
        out.square().sum().backward()
        trained = [p.grad for p in layer.parameters() if p.requires_grad]
        assert len(trained) == 2 + dora
        results.append([out, x.grad, *trained, base(x.detach())])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "criterion"),
    [("low_rank", "magnitude"), ("low_rank_ffn", "activation"), ("low_rank_attention", "adapter_gradient")],
)
def test_every_stage_takes_a_factored_model(
    loram: Cli, recipe: Path, tmp_path: Path, method: str, criterion: str
) -> None:
    command = (recipe, f"prune.method={method}", f"prune.criterion={criterion}", "--artifacts", tmp_path / "a")
    assert loram("run", *command).code == 0
    done = {entry["stage"]: entry for entry in loram("run", *command, "--json").json}
    assert ("score" in done) == (method != "low_rank")
    pruned, cut = (
        done["prune"]["metrics"],
        loram("prune", recipe, "--artifacts", tmp_path / "a", "--json").json["metrics"],
    )
    assert 0.9 * cut["parameters"] < pruned["parameters"] <= cut["parameters"]
    plan = PruningPlan.load(Path(done["prune"]["folder"]))
    shape = folder_shape(Path(done["prune"]["folder"]))
    assert shape.parameters(plan.widths()) == pruned["parameters"]
    base = tmp_path / "base"
    with Adapter(Path(done["train"]["folder"])) as small, Adapter(Path(done["recover"]["folder"])) as full:
        for module in small.modules:
            assert module in full.modules
            located = plan.architecture.locate(module)
            assert located is not None
            if located[1].name in plan.layers[located[0]].ranks:
                for one, other in zip(small.factors(module), full.factors(module), strict=True):
                    assert torch.equal(one, other), "recovery has nothing to do"
    expected = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), done["recover"]["folder"]
    ).merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(done["merge"]["folder"])
    for (name, one), other in zip(expected.named_parameters(), merged.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("quantizer", ["nf4", "none"])
def test_the_plan_counts_a_factored_models_bytes(tmp_path: Path, quantizer: Any) -> None:
    plan = factored_model(tmp_path, vocab_size=272)
    model = load_model(tmp_path / "small", Precision(torch.float32, quantizer))
    setup = TrainingSetup(1, 8, compute_bytes=4, quantizer=quantizer, device="cpu")
    shape = folder_shape(tmp_path / "small")
    assert weights(shape, plan.widths(), setup).weights == tensor_bytes([*model.parameters(), *model.buffers()])


def test_a_damaged_rank_is_refused(tmp_path: Path) -> None:
    plan = factored_model(tmp_path)
    for ranks in ({"self_attn.q_proj": 0}, {"self_attn.q_proj": 65}, {"self_attn.nosuch": 3}):
        first = LayerPlan(plan.layers[0].kept_kv_groups, plan.layers[0].kept_neurons, ranks)
        with pytest.raises(InputError, match="rank"):
            PruningPlan(plan.architecture, (first, *plan.layers[1:]), "base", plan.base)


def test_starts_that_move_the_weight_are_refused(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    command = ("--artifacts", tmp_path / "a", "prune.method=low_rank", "align.max_steps=0")
    refused = loram("train", recipe, *command, "train.init_lora_weights=pissa")
    assert refused.code == 2
    assert "keeps factors" in refused.err
    pruned = loram("prune", recipe, *command, "--json").json["folder"]
    given = loram("train", recipe, "--artifacts", tmp_path / "a", "--from", pruned, "train.init_lora_weights=loftq")
    assert given.code == 2
    assert "has factors" in given.err
