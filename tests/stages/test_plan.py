"""`loram plan`, and the same checks before stages run: published numbers, offline, no room, --force."""

from __future__ import annotations

import json
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loram_stages.work import Work
from safetensors.torch import load_file

from loram import processes
from loram.memory.fit import Fit, fit
from loram.memory.tracker import tensor_bytes
from loram.models.loading import Precision, load_model
from loram.recipe import Recipe
from loram.store import Draft
from tests.conftest import ROOT, Result, make_model

Cli = Callable[..., Result]
SEVENTY = ROOT / "recipes" / "llama-2-70b.yaml"


def planned(loram: Cli, name: str, *arguments: object) -> Any:
    result = loram("plan", ROOT / "recipes" / f"{name}.yaml", "--json", *arguments)
    assert result.code == 0, result.err
    return result.json


@pytest.mark.parametrize(
    ("name", "ratio", "base", "pruned", "reduction"),
    [
        ("llama-2-70b", 0.65, 68_976_648_192, 28_099_436_544, 9.82),
        ("llama-2-70b", 0.75, 68_976_648_192, 21_488_738_304, 12.84),
        ("llama-2-70b", 0.85, 68_976_648_192, 16_272_924_672, 16.95),
        ("llama-2-70b", 0.95, 68_976_648_192, 9_662_226_432, 28.56),
        ("llama-3.1-70b", 0.85, 70_553_706_496, 17_849_982_976, 15.81),
        ("llama-2-13b", 0.65, 13_015_864_320, 6_005_662_720, 8.67),
    ],
)
def test_published_rows_to_the_parameter(
    loram: Cli, name: str, ratio: float, base: int, pruned: int, reduction: float
) -> None:
    got = planned(loram, name, f"prune.ratio={ratio}")
    assert (got["base"]["parameters"], got["pruned"]["parameters"]) == (base, pruned)
    assert got["reduction_counted_at_4_bits"] == pytest.approx(reduction, abs=0.011)


@pytest.mark.parametrize(("name", "wanted"), [("llama-2-70b", 16.95), ("llama-3.1-70b", 15.81)])
def test_the_published_reduction_in_stored_bytes(loram: Cli, name: str, wanted: float) -> None:
    variant = planned(loram, f"{name}-{wanted}x")
    found = planned(loram, name, "--stored-reduction", wanted)["stored_reduction"]
    assert found["ratio"] == variant["ratio"]
    assert found["reached"] == variant["reduction_in_stored_bytes_quantized_embeddings"] >= wanted
    below = planned(loram, name, f"prune.ratio={found['ratio'] - 0.001:.3f}")
    assert below["reduction_in_stored_bytes_quantized_embeddings"] < wanted
    too_much = loram("plan", ROOT / "recipes" / f"{name}.yaml", "--stored-reduction", 1000)
    assert too_much.code == 3
    assert "No ratio" in too_much.err


def test_stored_bytes_are_those_of_a_quantized_model(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    """From the model folder alone; the pruned model is then really made and quantized."""
    command = (recipe, "--json", "--artifacts", tmp_path / "a", "prune.criterion=random")
    got = loram("plan", *command).json
    assert got["disk"]["stages"]["prune"]["kept"] == 4 * got["pruned"]["parameters"]  # the config says float32
    model = load_model(Path(loram("prune", *command).json["folder"]), Precision(torch.bfloat16, "nf4"))
    constants = [tensor for name, tensor in model.named_buffers() if "rotary" not in name]
    assert got["pruned"]["stored_bytes"] == tensor_bytes([*model.parameters(), *constants])


def test_a_doubled_vocabulary_doubles_embedding_and_head(loram: Cli) -> None:
    one, two = (
        planned(loram, "llama-2-70b", f"model.config.vocab_size={n}", "train.lora_lm_head=false")
        for n in (32000, 64000)
    )
    for key in one["training"]:
        before, after = (of["training"][key]["components"] for of in (one, two))
        constant = 1092 if key.startswith("q") else 0  # tables and an offset that each 4-bit tensor has
        for name in ("embedding", "head"):
            assert after[name] - constant == 2 * (before[name] - constant)
        for name in ("quantized_linears", "linears", "norms_and_biases", "adapter"):
            assert after[name] == before[name]


def test_no_room_says_so_with_exit_code_3_and_the_ratio_that_fits(loram: Cli) -> None:
    asked = ("plan", SEVENTY, "--device-memory", "11GiB", "--json")
    short = loram(*asked)
    assert short.code == 3
    fit = short.json["fit"]
    assert (fit["fits"], fit["available"]) == (False, 11 << 30)
    for words in ("a step needs", "packed linears", f"prune.ratio={fit['smallest_ratio']:g} or more"):
        assert words in short.err
    assert loram(*asked, f"prune.ratio={fit['smallest_ratio']}").code == 0
    assert loram(*asked, f"prune.ratio={fit['smallest_ratio'] - 0.001:.3f}").code == 3
    assert loram(*asked, "--devices", 4).code == 0
    assert loram(*asked, "--devices", 4, "--sharding", "ddp").code == 3
    nothing = loram("plan", SEVENTY, "--device-memory", "1MiB")
    assert nothing.code == 3
    assert "No ratio, batch or length alone" in nothing.err
    assert "no ratio, no batch, no length" in nothing.out


def test_without_a_small_model_it_is_polish_that_must_fit(loram: Cli) -> None:
    asked = (
        "plan",
        SEVENTY,
        "polish.start=fresh",
        "polish.max_steps=-1",
        "train.lora_lm_head=false",
        "--device-memory",
    )
    fits = loram(*asked, "8GB")
    assert (fits.code, "Polishing fits" in fits.out, "Training" in fits.out) == (0, True, False)
    short = loram(*asked, "3GB")
    assert (short.code, "polish: a step needs" in short.err) == (3, True)
    assert "No way fits: not even one layer" in loram("plan", SEVENTY, "--device-memory", "1GB").out


def test_the_table_has_every_part(loram: Cli) -> None:
    tiny = ROOT / "recipes" / "tiny.yaml"
    shown = loram("plan", tiny, "--devices", 2, "--card", "l4", "--device-memory", "20GiB", "prune.ratio=0.25")
    assert shown.code == 0
    for words in (
        "4 bits a parameter", "QLoRAM*", "optimizer state", "Each of 2 devices, FSDP", "gathered whole",
        "L4 (121 TFLOP/s", "a ceiling, not a prediction", "while running", "are free below", "Training fits",
    ):  # fmt: skip
        assert words in shown.out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--card", "rtx-4080"], 2, "did you mean 'rtx-"),
        (["--device-memory", "much"], 2, "'much' is no size"),
        (["--devices", "0"], 2, "devices"),
        (["--picture", "memory.jpg"], 2, "neither .svg nor .png"),
        (["train.target_modules=[q_prj]"], 2, "did you mean 'q_proj'"),
        (["model.config={}"], 1, "No config of"),
        (["train.quantizer=none"], 2, "quantize_embeddings needs quantizer"),
    ],
)
def test_wrong_questions_are_refused(loram: Cli, arguments: list[str], code: int, words: str) -> None:
    result = loram("plan", SEVENTY, *arguments)
    assert (result.code, result.out) == (code, "")
    assert words in result.err


def test_a_pruned_folder_is_no_base(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    command = (recipe, "--artifacts", tmp_path / "a", "prune.criterion=random")
    folder = loram("prune", *command, "--json").json["folder"]
    assert "already pruned" in loram("plan", *command, f"model.path={folder}").err


def test_a_made_base_is_read_from_the_store(loram: Cli, tmp_path: Path) -> None:
    rows = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 272}  # fmt: skip
    recipe = tmp_path / "made.yaml"
    recipe.write_text(json.dumps({"name": "made", "model": {"path": "random:", "config": rows}}))
    got = loram("plan", recipe, "--json", "--artifacts", tmp_path).json
    assert got["disk"]["stages"]["prune"]["kept"] == 4 * got["base"]["parameters"]
    assert got["geometry"].startswith("identity plan")
    assert "align" not in got["training"]


def test_the_picture_is_an_svg(loram: Cli, tmp_path: Path) -> None:
    path = tmp_path / "memory.svg"
    assert loram("plan", SEVENTY, "--picture", path).code == 0
    assert ElementTree.parse(path).getroot().tag.endswith("svg")
    assert "llama-2-70b" in path.read_text()
    missing = loram("plan", SEVENTY, "--picture", tmp_path / "no" / "memory.png")
    assert missing.code == 1
    assert "Cannot write" in missing.err


def test_without_matplotlib_the_command_to_get_it_is_said(
    loram: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = loram("plan", SEVENTY, "--picture", tmp_path / "memory.png")
    assert result.code == 1
    assert "pip install matplotlib" in result.err
    assert loram("plan", SEVENTY, "--quiet").code == 0


@pytest.mark.parametrize("stage", ["align", "train"])
def test_training_that_does_not_fit_is_refused_before_it_reads(
    loram: Cli, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    root = tmp_path / "a"
    command = (recipe, "prune.criterion=random", "--artifacts", root)
    loram("prune", *command)
    source = next((root / "test").glob("prune-*"))
    monkeypatch.setattr("loram_stages.training.free_memory", lambda: 200_000)
    refused = loram(stage, *command, "--from", source)
    assert refused.code == 3
    for words in (f"{stage}: a step needs", "this machine has 195.3 KiB", "The largest part", "--force goes on"):
        assert words in refused.err
    assert not list((root / "test").glob(f"*{stage}*"))
    forced = loram(stage, *command, "--from", source, "--force", "--json")
    assert forced.code == 0, forced.err
    again = loram(stage, *command, "--from", source, "--json").json
    assert again["cached"]
    assert again["fingerprint"] == forced.json["fingerprint"]


def test_a_full_disk_stops_every_stage_before_it_writes(
    loram: Cli, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "a"
    command = (recipe, "prune.criterion=random", "--artifacts", root, "--json")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "free")(100))
    for stage in ("prune", "align", "train", "recover", "merge"):
        refused = loram(stage, *command)
        assert refused.code == 3, refused.err
        assert f"{stage}: writes up to" in refused.err
        assert "100 B are free" in refused.err
        assert not list((root / "test").glob(f"*{stage}*"))
        assert loram(stage, *command, "--force").code == 0
    assert not loram("prune", *command, "--remake", "--force").json["cached"]
    assert loram("run", *command, "evaluate.datasets={}", "prune.seed=1").code == 3
    assert loram("run", *command, "evaluate.datasets={}", "prune.seed=1", "--force").code == 0


def test_the_predicted_disk_is_what_is_written(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    base = make_model(tmp_path / "half", dtype=torch.bfloat16)
    command = (recipe, f"model.path={base}", "prune.criterion=random", "--artifacts", tmp_path / "a", "--json")
    stages = loram("plan", *command).json["disk"]["stages"]
    for stage in ("prune", "align", "train", "recover", "merge"):
        folder = Path(loram(stage, *command).json["folder"])
        written = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        assert 0 <= written - stages[stage]["kept"] < 10_000, stage  # the header


def test_an_unknown_model_type_is_named_without_all_the_known_ones(loram: Cli) -> None:
    result = loram("plan", ROOT / "recipes" / "tiny.yaml", "model.config.model_type=nonsense")
    assert result.code == 2
    assert "nonsense" in result.err
    assert len(result.err) < 300


def test_processes_that_share_a_model_are_counted(
    loram: Cli, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (recipe, "prune.criterion=random", "align.max_steps=0", "--artifacts", tmp_path / "a")
    assert loram("prune", *command).code == 0
    held: list[tuple[Any, ...]] = []

    def spy(*arguments: Any) -> Fit:
        held.append(arguments[3:])
        return fit(*arguments)

    monkeypatch.setattr("loram_stages.training.fit", spy)
    monkeypatch.setattr("loram_stages.training.free_memory", lambda: 10**9)
    monkeypatch.setattr(processes, "sharing", lambda: (4, "fsdp"))
    monkeypatch.setattr(processes, "on_this_machine", lambda: 2)
    assert loram("train", *command).code == 0
    assert [(available, *shared) for available, _, *shared in held] == [(10**9 // 2, 4, "fsdp")]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (1, "ddp")),
        ({"WORLD_SIZE": "4"}, (4, "ddp")),
        ({"WORLD_SIZE": "4", "ACCELERATE_USE_FSDP": "true"}, (4, "fsdp")),
        ({"WORLD_SIZE": "4", "ACCELERATE_USE_DEEPSPEED": "true"}, (1, "ddp")),
    ],
)
def test_how_processes_share_a_model(
    environment: dict[str, str], expected: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert processes.sharing() == expected


def test_the_disk_of_the_writer_is_what_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other processes of a run have an output folder below the system's temporary ones."""
    asked: list[Path] = []

    def usage(path: Path) -> Any:
        asked.append(path)
        return namedtuple("usage", "free")(1000)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    for name in ("out", "scratch"):
        (tmp_path / name).mkdir()
    draft = Draft(tmp_path / "out", tmp_path / "scratch")
    work = Work(Recipe.model_construct(), {}, draft, 0, tokens=tmp_path, perplexity=tmp_path)
    work.require_disk(1000, "train")
    assert asked == [tmp_path / "scratch"]


def test_the_disk_of_factors_and_of_starts_that_move_weights_is_what_they_take(
    loram: Cli, recipe: Path, tmp_path: Path
) -> None:
    def tensors(stage: str) -> int:
        folder = next((tmp_path / "a" / "test").glob(f"{stage}-*"))
        found = [load_file(path) for path in folder.glob("*.safetensors")]
        return sum(tensor.nbytes for each in found for tensor in each.values())

    command = (recipe, "align.max_steps=0", "--artifacts", tmp_path / "a")
    for settings, stages in (
        (["prune.method=low_rank_ffn", "prune.criterion=magnitude"], ["prune"]),
        (["train.init_lora_weights=pissa"], ["train", "recover"]),
    ):
        planned = loram("plan", *command, *settings, "--json").json["disk"]["stages"]
        assert loram("run", *command, *settings, "evaluate.datasets={}").code == 0
        for stage in stages:
            assert planned[stage]["kept"] == tensors(stage)
        if stages == ["prune"]:
            model = load_file(next((tmp_path / "a" / "test").glob("prune-*")) / "model.safetensors")
            twice = sum(tensor.nbytes for name, tensor in model.items() if name.endswith((".u.weight", ".v.weight")))
            assert planned["prune"]["running"] == planned["prune"]["kept"] + twice > planned["prune"]["kept"]
        shutil.rmtree(tmp_path / "a")


def test_factors_whose_moments_do_not_fit_are_refused(
    loram: Cli, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (recipe, "prune.method=low_rank", "--artifacts", tmp_path / "a")
    monkeypatch.setattr("loram_stages.prune.free_memory", lambda: 1000)
    refused = loram("prune", *command)
    assert refused.code == 3
    assert "the moments of a layer's linears" in refused.err
    assert loram("prune", *command, "--force").code == 0
    assert loram("prune", *command, "prune.method=cut").code == 0
