"""loram evaluate RECIPE: perplexity of every variant side by side, on each evaluation set."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import nn

from loram.adapter.folder import CONFIG_NAME
from loram.checkpoint import CheckpointReader
from loram.data.encode import EncodedSet, encode_dataset
from loram.errors import InputError, RecipeError
from loram.evaluate.perplexity import Perplexity, perplexity
from loram.memory.measured import peak_bytes, reset_peak
from loram.models.loading import load_model, load_tokenizer, require_vocabulary, resolve_dtype
from loram.progress import logger
from loram.pruning.plan import PLAN_NAME, PruningPlan
from loram.recipe import Recipe
from loram.report.table import markdown_table, text_table

from .training import pad_id
from .work import Work, require_model_folder

Variant = tuple[str, Callable[[], nn.Module]]
RESULT_NAME = "evaluation.json"
_FULL = "full LoRA (ratio 0)"


def _variants(work: Work) -> Iterator[Variant]:
    """(label, loader) of each variant, in the order of the pipeline."""
    recipe, inputs = work.recipe, work.inputs
    dtype = resolve_dtype(recipe.evaluate.dtype)
    train = recipe.train
    small = inputs["aligned"] if "aligned" in inputs else inputs["pruned"]
    yield "base", lambda: load_model(inputs["base"], dtype)
    yield "pruned", lambda: load_model(inputs["pruned"], dtype)
    if "aligned" in inputs:
        yield "aligned", lambda: load_model(inputs["aligned"], dtype)
    yield (
        "pruned + adapter",
        lambda: _adapted(load_model(small, dtype, train.quantizer, train.bnb_4bit_use_double_quant), inputs["adapter"]),
    )
    yield "base + recovered", lambda: _adapted(load_model(inputs["base"], dtype), inputs["recovered"])
    yield "merged", lambda: load_model(inputs["merged"], dtype)
    if "baseline" in inputs:
        yield _FULL, lambda: _adapted(load_model(inputs["base"], dtype), inputs["baseline"])


def _adapted(model: nn.Module, folder: Path) -> nn.Module:
    from peft import PeftModel

    try:
        adapted: nn.Module = PeftModel.from_pretrained(model, str(folder))
    except RuntimeError as error:  # PyTorch's size mismatch
        raise InputError(
            f"The adapter {folder} does not fit the model: {str(error).splitlines()[-1].strip()}",
            fix="An adapter trained on a pruned model has to be recovered (loram recover) before the base can use it.",
        ) from error
    applied = [p for name, p in adapted.named_parameters() if ".lora_B." in name]
    if not any(bool(parameter.any()) for parameter in applied):
        raise InputError(f"No tensor of the adapter {folder} was applied.", fix="Train or recover it again.")
    return adapted


def run(work: Work) -> None:
    """Does the stage's work."""
    section = work.recipe.evaluate
    _require_sets(work.recipe)
    tokenizer = load_tokenizer(work.inputs["base"])
    sets: dict[str, EncodedSet] = {}
    for name, dataset in section.datasets.items():
        sets[name] = encode_dataset(dataset, tokenizer, section.max_length, work.recipe.data.chat_template)
        work.note(f"{name}: {sets[name].describe()}")
    reset_peak()
    results: dict[str, dict[str, Perplexity]] = {}
    for label, load in _variants(work):
        model = load()
        results[label] = {
            name: perplexity(
                model, data.examples, section.max_length, pad_id(tokenizer), description=f"{label}: {name}"
            )
            for name, data in sets.items()
        }
        logger.info("%s: %s", label, {name: round(result.value, 3) for name, result in results[label].items()})
        del model
        gc.collect()
    report(work, results)
    work.draft.metrics |= peak_bytes()


def _require_sets(recipe: Recipe) -> None:
    if not recipe.evaluate.datasets:
        raise RecipeError("evaluate.datasets is empty.", fix="Name at least one evaluation set in the recipe.")


def report(work: Work, results: dict[str, dict[str, Perplexity]]) -> None:
    """Writes evaluation.json and evaluation.md, and notes the table and what it means."""
    names = list(work.recipe.evaluate.datasets)
    header = ["perplexity", *names]
    rows = [[label, *(f"{of[name].value:.3f}" for name in names)] for label, of in results.items()]
    lines = [shares(results, name) for name in names]
    remarks = [line for line in lines if line] + identical(results)
    raw = {
        label: {n: {"perplexity": r.value, "loss": r.loss, "nll": r.nll, "tokens": r.tokens} for n, r in of.items()}
        for label, of in results.items()
    }
    kept = {name: share for name in names if (share := kept_share(results, name)) is not None}
    summary = {"variants": raw, "share_of_full_lora_gain": kept}
    (work.out / RESULT_NAME).write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    markdown = markdown_table(header, rows) + "\n\n" + "\n".join(remarks) + "\n"
    (work.out / "evaluation.md").write_text(markdown, encoding="utf-8")
    work.draft.metrics |= summary
    work.note(text_table(header, rows))
    for remark in remarks:
        work.note(remark)


def kept_share(results: dict[str, dict[str, Perplexity]], name: str) -> float | None:
    """Part of full LoRA's gain in log-perplexity that the recovered adapter keeps; None without a baseline."""
    full = results.get(_FULL)
    if full is None:
        return None
    base = results["base"][name].loss
    gain = base - full[name].loss
    return (base - results["base + recovered"][name].loss) / gain if gain > 0 else None


def shares(results: dict[str, dict[str, Perplexity]], name: str) -> str:
    """One sentence on what the recovered adapter gained on a set."""
    gain = results["base"][name].loss - results["base + recovered"][name].loss
    text = f"{name}: the recovered adapter changes the base's log-perplexity by {-gain:+.3f}"
    share = kept_share(results, name)
    if share is not None and gain > 0:
        text += f", {share:.0%} of the gain of LoRA on the full model"
    elif _FULL not in results:
        text += " (set evaluate.baseline=true to see what share of full LoRA's gain that is)"
    return text


def identical(results: dict[str, dict[str, Perplexity]]) -> list[str]:
    """Warnings where an adapted variant scores exactly like the model under it, as if nothing had been applied."""
    small = "aligned" if "aligned" in results else "pruned"
    pairs = (("base + recovered", "base"), ("merged", "base"), ("pruned + adapter", small))
    return [
        f"warning: '{adapted}' scores exactly like '{plain}': was the adapter applied?"
        for adapted, plain in pairs
        if all(results[adapted][name].nll == results[plain][name].nll for name in results[adapted])
    ]


def evaluate_folder(recipe: Recipe, folder: Path, base: Callable[[], Path]) -> dict[str, dict[str, float]]:
    """Perplexity of one model folder, or of one adapter folder on the base, on the recipe's evaluation sets."""
    section = recipe.evaluate
    _require_sets(recipe)
    dtype = resolve_dtype(section.dtype)
    adapter = (folder / CONFIG_NAME).is_file()
    if not adapter:
        require_model_folder(folder)
    model_folder = base() if adapter else folder
    tokenizer = load_tokenizer(model_folder)
    if adapter and (folder / PLAN_NAME).is_file():
        with CheckpointReader(model_folder) as reader:
            PruningPlan.load(folder).require_base(reader.identity(), str(model_folder))
    model: nn.Module = load_model(model_folder, dtype)
    require_vocabulary(model, tokenizer)
    if adapter:
        model = _adapted(model, folder)
    results = {}
    for name, dataset in section.datasets.items():
        data = encode_dataset(dataset, tokenizer, section.max_length, recipe.data.chat_template)
        result = perplexity(model, data.examples, section.max_length, pad_id(tokenizer), description=name)
        results[name] = {"perplexity": result.value, "loss": result.loss, "tokens": result.tokens}
    return results
