"""Faults found by trying to break the commands: wrong or edited input must be noticed, by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loram.checkpoint import CheckpointReader
from loram.data.cache import tokenized
from loram.data.encode import Encoder
from loram.errors import DataError
from loram.models.source import byte_tokenizer
from loram.recipe import DatasetSection, load_recipe
from tests.conftest import ROOT, Result, make_model

Cli = Callable[..., Result]


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_edited_base_config_or_template_is_another_base(
    loram: Cli, recipe: Path, tiny: Path, tmp_path: Path
) -> None:
    command = ("prune", recipe, "--json", "--artifacts", tmp_path / "a")
    first = loram(*command).json
    assert loram(*command).json["cached"]
    edit(tiny / "config.json", rms_norm_eps=0.5)
    second = loram(*command).json
    assert not second["cached"]
    (tiny / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    third = loram(*command).json
    assert len({run["fingerprint"] for run in (first, second, third)}) == 3
    (tiny / "README.md").write_text("a note changes nothing")
    assert loram(*command).json["cached"]


def test_a_given_folder_counts_by_its_content_not_its_manifest(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    command = (recipe, "align.max_steps=0", "--json", "--artifacts", tmp_path / "a")
    pruned = tmp_path / "given"
    shutil.copytree(loram("prune", *command).json["folder"], pruned)
    adapter = Path(loram("train", *command, "--from", pruned).json["folder"])
    assert loram("train", *command, "--from", pruned).json["cached"]
    weights = (pruned / "model.safetensors").read_bytes()
    (pruned / "model.safetensors").write_bytes(weights[:-1000])
    damaged = loram("train", *command, "--from", pruned)
    assert damaged.code == 1
    assert "corrupt" in damaged.err

    given = tmp_path / "adapter"
    shutil.copytree(adapter, given)
    assert loram("recover", *command, "--from", given).code == 0
    (given / "plan.json").write_text('{"x": 1}')
    broken = loram("recover", *command, "--from", given)
    assert broken.code == 1
    assert "plan.json" in broken.err


def test_an_adapter_is_not_evaluated_on_another_base(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    command = (recipe, "align.max_steps=0", "--json", "--artifacts", tmp_path / "a")
    for stage in ("prune", "train", "recover"):
        folder = loram(stage, *command).json["folder"]
    other = make_model(tmp_path / "other", seed=50)
    result = loram("evaluate", *command, "--from", folder, f"model.path={other}")
    assert result.code == 1
    assert "not the base model" in result.err
    assert loram("evaluate", *command, "--from", folder).code == 0


def test_a_tied_embedding_is_trained_or_refused_but_never_silently_kept(
    loram: Cli, recipe: Path, tmp_path: Path
) -> None:
    base = make_model(tmp_path / "tied", tie_word_embeddings=True)
    command = (recipe, f"model.path={base}", "--artifacts", tmp_path / "a")
    pruned = Path(loram("prune", *command, "--json").json["folder"])
    for flag in ("train_embeddings", "train_lm_head"):
        result = loram("align", *command, f"align.{flag}=true")
        assert result.code == 2
        assert "ties its embedding" in result.err
    both = loram("align", *command, "align.train_embeddings=true", "align.train_lm_head=true", "--json").json
    with CheckpointReader(pruned) as before, CheckpointReader(Path(both["folder"])) as after:
        name = "model.embed_tokens.weight"
        assert not torch.equal(before.read(name), after.read(name))


def test_a_model_that_computes_nan_is_an_error(loram: Cli, recipe: Path, tiny: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * float("nan")
    save_file(tensors, tiny / "model.safetensors", {"format": "pt"})
    result = loram("evaluate", recipe, "--from", tiny, "--json", "--artifacts", tmp_path / "a")
    assert result.code == 1
    assert result.out == ""
    assert "NaN" in result.err


def test_a_run_that_never_stepped_is_not_resumable(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    command = (recipe, "align.max_steps=0", "train.optim=adamw_torch_4bit", "--artifacts", tmp_path / "a")
    loram("prune", *command)
    result = loram("train", *command)
    assert result.code == 1
    assert "needs a package" in result.err
    states = {line["stage"]: line["state"] for line in loram("status", *command, "--json").json}
    assert states["train"] == "to make"
    assert not list((tmp_path / "a" / "test").glob(".*"))


def test_a_skipped_alignment_is_json_too(loram: Cli, recipe: Path) -> None:
    assert "max_steps" in loram("align", recipe, "align.max_steps=0", "--json").json["skipped"]


def test_status_of_a_model_that_is_not_here_says_so(loram: Cli, tmp_path: Path) -> None:
    result = loram("status", ROOT / "recipes" / "llama-2-70b.yaml", "--artifacts", tmp_path)
    assert result.code == 1
    assert "not on this machine" in result.err
    assert "loram prune" in result.err


@pytest.mark.parametrize(
    "override",
    [
        "train.learning_rate=.inf",
        "train.seed=-1",
        "prune.seed=99999999999999",
        "train.target_modules=[]",
        "train.lora_alpha=.nan",
    ],
)
def test_numbers_that_no_run_could_use_are_refused_at_once(loram: Cli, recipe: Path, override: str) -> None:
    result = loram("recipe", "show", recipe, override)
    assert result.code == 2
    assert override.partition("=")[0] in result.err


def test_a_data_set_may_be_just_a_path(recipe: Path) -> None:
    recipe_with = load_recipe(recipe, ["train.datasets=rows.jsonl", "prune.calibration=rows.jsonl"])
    assert [dataset.path for dataset in recipe_with.train.datasets] == ["rows.jsonl"]
    assert recipe_with.prune.calibration is not None
    assert recipe_with.prune.calibration.path == "rows.jsonl"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("r.csv", "prompt,completion\na,b,c\n", r"r\.csv:2 has more cells"),
        ("r.jsonl", '{"prompt": "a\\ud800", "completion": "b"}\n', r"r\.jsonl:1"),
        ("r.json", "[" * 100_000, "nested too deeply|not JSON"),
        ("r.jsonl", '{"messages": [{"role": "assistent", "content": "x"}]}\n', "did you mean 'assistant'"),
        ("r.parquet", "garbage", "not a Parquet file"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=words):
        tokenized(DatasetSection(path=str(tmp_path / name)), Encoder(byte_tokenizer(), None, 100), tmp_path / "t")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("long.csv", "prompt,completion\n" + "x" * 200_000 + ",b\nc,d\n"),
        ("marked.csv", "\ufeffprompt,completion\nc,d\n"),
        ("marked.jsonl", '\ufeff{"prompt": "c", "completion": "d"}\n'),
    ],
)
def test_ordinary_files_are_read(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    dataset = DatasetSection(path=str(tmp_path / name))
    assert len(tokenized(dataset, Encoder(byte_tokenizer(), None, 200), tmp_path / "t")) == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("truncated", "corrupt"),
        ("empty", "no config.json"),
        ("vocabulary", "embedding only"),
        ("widths", "damaged"),
    ],
)
def test_unusable_model_folders_are_named(
    loram: Cli, recipe: Path, tiny: Path, tmp_path: Path, damage: str, words: str
) -> None:
    folder = tiny
    if damage == "truncated":
        (tiny / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:20_000])
    elif damage == "empty":
        folder = tmp_path / "empty"
        folder.mkdir()
    elif damage == "vocabulary":
        folder = make_model(tmp_path / "small", vocab_size=200)
    else:
        edit(tiny / "config.json", loram={"architecture": {}})
    result = loram("evaluate", recipe, "--from", folder, "--artifacts", tmp_path / "a")
    assert result.code == 1, result.err
    assert words in result.err
    assert "unexpected" not in result.err
