"""loram data show: examples with their loss mask, counts, and why rows were dropped."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.conftest import Result, make_model

Cli = Callable[..., Result]


@pytest.fixture
def command(recipe: Path, tmp_path: Path) -> list[str]:
    """`data show` on the tests' recipe, with a second training set of odd rows."""
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "HELLO"}]},
        {"messages": [{"role": "user", "content": "x" * 200}, {"role": "assistant", "content": "long"}]},
        {"messages": [{"role": "user", "content": "x" * 250}, {"role": "assistant", "content": "long"}]},
        {"messages": [{"role": "user", "content": "nobody answers"}]},
    ]
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    value = yaml.safe_load(recipe.read_text())
    value["train"]["datasets"].append({"path": str(tmp_path / "odd.jsonl"), "weight": 3})
    value["train"]["eval_datasets"] = {"odd": {"path": str(tmp_path / "odd.jsonl")}}
    recipe.write_text(yaml.safe_dump(value))
    return ["data", "show", str(recipe), "--artifacts", str(tmp_path / "a")]


def test_examples_are_shown_with_their_mask_and_counts(loram: Cli, command: list[str], tmp_path: Path) -> None:
    result = loram(*command, "--rows", "2")
    assert result.code == 0, result.err
    for words in (
        "What the loss counts is in [[…]].",
        f"train.datasets.0: {tmp_path}/rows.jsonl (train)",
        "24 rows gave 24 examples",
        "example 1: ",
        "Add 1 and 1.",
        "[[It is 2.<|end|>]]",
        "4 rows gave 1 examples",
        "weight 3: 3 examples an epoch",
        "[[HELLO<|end|>]]",
        f"dropped 2: longer than 128 tokens (first {tmp_path}/odd.jsonl:2)",
        f"dropped 1: nothing to learn in it (first {tmp_path}/odd.jsonl:4)",
    ):
        assert words in result.out
    assert "Add 2 and 2." not in result.out
    assert "\x1b" not in result.out


def test_json_has_every_number(loram: Cli, command: list[str]) -> None:
    first, second = loram(*command, "--rows", "1", "--json").json
    assert first["set"] == "train.datasets.0"
    assert second["dropped"]["longer than 128 tokens"]["count"] == 2
    assert (second["rows"], second["examples"], second["weight"], second["examples_per_epoch"]) == (4, 1, 3, 3)
    assert second["tokens"] == second["lengths"]["longest"] == len(second["shown"][0]["input_ids"])
    assert second["loss_tokens"] == sum(second["shown"][0]["loss"]) == len("HELLO") + 1
    assert second["shown"][0]["runs"][-1] == {"loss": True, "text": "HELLO<|end|>"}
    assert len(first["shown"]) == 1
    assert list(first["lengths"]) == ["shortest", "median", "90%", "99%", "longest"]
    assert first["lengths"]["shortest"] <= first["lengths"]["median"] <= first["lengths"]["longest"]


@pytest.mark.parametrize(
    ("arguments", "sets"),
    [
        (("--section", "align"), ["align.datasets.0"]),
        (("--section", "calibration"), ["prune.calibration"]),
        (("--section", "eval"), ["evaluate.datasets.sums", "train.eval_datasets.odd"]),
        (("--section", "eval", "--name", "odd"), ["train.eval_datasets.odd"]),
        (("data.loss=last_assistant_turn",), ["train.datasets.0", "train.datasets.1"]),
    ],
)
def test_every_section_can_be_shown(
    loram: Cli, command: list[str], arguments: tuple[str, ...], sets: list[str]
) -> None:
    shown = loram(*command, *arguments, "--json").json
    assert [each["set"] for each in shown] == sets
    assert all(each["tokens"] > each["loss_tokens"] > 0 for each in shown)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--section", "eval", "--name", "od"), "did you mean 'odd'"),
        (("--name", "odd"), "--section eval"),
        (("--section", "align", "align.datasets=null", "align.max_steps=0"), "no data set for 'align'"),
        (("--from", "nowhere"), "No folder at nowhere"),
    ],
)
def test_what_is_not_there_is_said(loram: Cli, command: list[str], arguments: tuple[str, ...], words: str) -> None:
    result = loram(*command, *arguments)
    assert result.code == 2
    assert words in result.err


def test_stages_find_what_was_shown(loram: Cli, command: list[str], tmp_path: Path) -> None:
    """The cache is shared: after `data show` training tokenizes nothing, from whatever folder it starts."""
    for section in ("train", "eval", "calibration"):
        assert loram(*command, "--section", section).code == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a" / "tokens").rglob("*.bin")}
    stage = (command[2], "align.max_steps=0", *command[3:])
    assert loram("prune", *stage).code == 0
    trained = loram("train", *stage, "--json")
    assert trained.code == 0, trained.err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a" / "tokens").rglob("*.bin")} == before
    notes = "\n".join(trained.json["notes"])
    assert "weight 3, so 3 an epoch" in notes
    assert "an epoch: 27 examples packed" in notes
    assert trained.json["metrics"]["eval_odd_perplexity"] > 1


def test_another_folders_tokenizer_can_be_used(loram: Cli, command: list[str], tmp_path: Path) -> None:
    folder = make_model(tmp_path / "other")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] + '> ' + m['content'] }}"
        "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant> {% endif %}"
    )
    shown = loram(*command, "model.path=./nowhere", "--from", folder).out
    assert "user> Add 0 and 0.assistant> [[It is 0.<|end|>]]" in shown


@pytest.mark.parametrize("no_color", [False, True])
def test_colours_are_for_terminals_that_want_them(command: list[str], no_color: bool) -> None:
    ours, theirs = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key not in {"NO_COLOR", "FORCE_COLOR"}}
    environment |= {"TERM": "xterm-256color", **({"NO_COLOR": "1"} if no_color else {})}
    process = subprocess.Popen(
        [sys.executable, "-m", "loram_stages", *command, "--rows", "1"], stdout=theirs, env=environment
    )
    os.close(theirs)
    out = b""
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # how Linux says that the other end was closed
            break
        if not piece:
            break
        out += piece
    os.close(ours)
    assert process.wait(timeout=120) == 0
    text = out.decode()
    assert ("[[It is 0.<|end|>]]" in text) == no_color
    assert ("\x1b[1;32mIt is 0.<|end|>" in text) == (not no_color)
