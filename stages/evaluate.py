"""loram evaluate RECIPE: perplexity of every variant side by side, on each evaluation set.

One layer of a model is in memory at a time, so a 70B base is evaluated where it could never be loaded.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loram.adapter.folder import CONFIG_NAME
from loram.artifact import MANIFEST_NAME, Manifest, fingerprint
from loram.checkpoint import CheckpointReader
from loram.data.cache import tokenized
from loram.data.encode import Encoder, resolve_template
from loram.data.tokens import TokenSet
from loram.errors import RecipeError
from loram.evaluate.known import recall, remember
from loram.evaluate.perplexity import Perplexity, perplexities
from loram.memory.measured import peak_bytes, reset_peak
from loram.memory.units import size
from loram.models.layerwise import LayerwiseModel
from loram.models.loading import Precision, load_tokenizer, require_vocabulary, resolve_dtype
from loram.progress import logger
from loram.pruning.plan import PLAN_NAME, PruningPlan
from loram.recipe import Recipe
from loram.report.table import markdown_table, text_table

from .graph import STAGES, evaluated
from .training import pad_id, training_precision
from .work import Work, require_model_folder

RESULT_NAME = "evaluation.json"
_FULL = "full LoRA (ratio 0)"


@dataclass(frozen=True)
class Variant:
    """A model folder in some precision, maybe with an adapter on it."""

    label: str
    folder: Path
    precision: Precision
    adapter: Path | None = None


def _variants(recipe: Recipe, inputs: Mapping[str, Path]) -> Iterator[Variant]:
    """Every variant that is asked for, in the order of the pipeline."""
    plain = Precision(resolve_dtype(recipe.evaluate.dtype))
    yield Variant("base", inputs["base"], plain)
    asked = evaluated(recipe)
    for role in ("pruned", "aligned"):
        if role in asked:
            yield Variant(role, inputs[role], plain)
    if "adapter" in asked:
        small = inputs.get("aligned", inputs["pruned"])
        yield Variant("pruned + adapter", small, training_precision(recipe.train, plain.dtype), inputs["adapter"])
    for role in ("recovered", "polished", "scaled"):
        if role in asked:
            yield Variant(f"base + {role}", inputs["base"], plain, inputs[role])
    if "merged" in asked:
        yield Variant("merged", inputs["merged"], plain)
    if "baseline" in inputs:
        yield Variant(_FULL, inputs["base"], plain, inputs["baseline"])


def _measure(
    variant: Variant, sets: Mapping[str, TokenSet], recipe: Recipe, tokenizer: Any, memory: int, scratch: Path
) -> dict[str, Perplexity]:
    """Perplexity of a variant on every set, one layer in memory at a time."""
    with LayerwiseModel(variant.folder, variant.precision, memory, scratch, variant.adapter) as engine:
        require_vocabulary(engine.model, tokenizer)
        found = perplexities(engine, sets, recipe.evaluate.max_length, pad_id(tokenizer), variant.label)
        if engine.spilled:
            logger.info("%s: %s of hidden states went through the disk", variant.label, size(engine.spilled))
    return found


def _keys(variant: Variant, sets: Mapping[str, TokenSet]) -> dict[str, str] | None:
    """What a variant's perplexity on each set is kept under; None for a folder that no manifest identifies."""
    folders = [variant.folder, *([] if variant.adapter is None else [variant.adapter])]
    if not all((folder / MANIFEST_NAME).is_file() for folder in folders):
        return None
    model = {
        "version": STAGES["evaluate"].version,
        "folders": [_identity(Manifest.read(folder)) for folder in folders],
        "precision": asdict(variant.precision) | {"dtype": str(variant.precision.dtype)},
    }
    return {name: fingerprint(model | {"tokens": tokens.key}) for name, tokens in sets.items()}


def _identity(manifest: Manifest) -> dict[str, str]:
    """What a folder was made from and the weights that came out: other code, or another machine, may make others."""
    weights = {name: digest for name, (_, digest) in manifest.files.items() if name.endswith(".safetensors")}
    return {"fingerprint": manifest.fingerprint, **weights}


def _known_or_measured(
    work: Work, variant: Variant, sets: Mapping[str, TokenSet], tokenizer: Any
) -> dict[str, Perplexity]:
    keys = _keys(variant, sets)
    if keys is not None and not work.anew:
        before = {name: recall(work.perplexity, key) for name, key in keys.items()}
        if (known := {name: each for name, each in before.items() if each is not None}).keys() == before.keys():
            return known
    found = _measure(variant, sets, work.recipe, tokenizer, work.memory, work.draft.scratch / "hidden")
    for name, key in (keys or {}).items():
        remember(work.perplexity, key, found[name])
    return found


def _tokenized(recipe: Recipe, tokenizer: Any, tokens: Path) -> dict[str, TokenSet]:
    section = recipe.evaluate
    if not section.datasets:
        raise RecipeError("evaluate.datasets is empty.", fix="Name at least one evaluation set in the recipe.")
    template = resolve_template(recipe.data.chat_template, tokenizer)
    encoder = Encoder(tokenizer, template, section.max_length, recipe.data.loss)
    return {name: tokenized(dataset, encoder, tokens) for name, dataset in section.datasets.items()}


def run(work: Work) -> None:
    """Does the stage's work."""
    tokenizer = load_tokenizer(work.inputs["base"])
    sets = _tokenized(work.recipe, tokenizer, work.tokens)
    for name, data in sets.items():
        work.note(f"{name}: {data.counts.describe()}")
    reset_peak()
    results: dict[str, dict[str, Perplexity]] = {}
    for variant in _variants(work.recipe, work.inputs):
        found = _known_or_measured(work, variant, sets, tokenizer)
        results[variant.label] = found
        logger.info("%s: %s", variant.label, {name: round(result.value, 3) for name, result in found.items()})
    report(work, results)
    work.draft.metrics |= peak_bytes()


def report(work: Work, results: dict[str, dict[str, Perplexity]]) -> None:
    """Writes evaluation.json and evaluation.md, and notes the table and what it means."""
    names = list(work.recipe.evaluate.datasets)
    header = ["perplexity", *names]
    rows = [[label, *(f"{of[name].value:.3f}" for name in names)] for label, of in results.items()]
    remarks = ["the adapter was trained for the full model alone (train.anchors)"] if _anchored(work.recipe) else []
    remarks += [shares(results, label, name) for name in names for label in adapted(results)] + identical(results)
    raw = {
        label: {n: {"perplexity": r.value, "loss": r.loss, "nll": r.nll, "tokens": r.tokens} for n, r in of.items()}
        for label, of in results.items()
    }
    kept = {
        label: {name: share for name in names if (share := kept_share(results, label, name)) is not None}
        for label in adapted(results)
    }
    summary = {"variants": raw, "share_of_full_lora_gain": kept}
    (work.out / RESULT_NAME).write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    markdown = markdown_table(header, rows) + "\n\n" + "\n".join(remarks) + "\n"
    (work.out / "evaluation.md").write_text(markdown, encoding="utf-8")
    work.draft.metrics |= summary
    work.note(text_table(header, rows))
    for remark in remarks:
        work.note(remark)


def _anchored(recipe: Recipe) -> bool:
    return recipe.small and recipe.train.anchors > 0


def adapted(results: dict[str, dict[str, Perplexity]]) -> list[str]:
    """The variants that are an adapter on the base, full LoRA aside."""
    return [label for label in results if label.startswith("base + ")]


def kept_share(results: dict[str, dict[str, Perplexity]], label: str, name: str) -> float | None:
    """Part of full LoRA's gain in log-perplexity that a variant has on a set; None without a baseline."""
    full = results.get(_FULL)
    if full is None:
        return None
    base = results["base"][name].loss
    gain = base - full[name].loss
    return (base - results[label][name].loss) / gain if gain > 0 else None


def shares(results: dict[str, dict[str, Perplexity]], label: str, name: str) -> str:
    """One sentence on what an adapter gained on a set."""
    gain = results["base"][name].loss - results[label][name].loss
    text = f"{name}: the {label.removeprefix('base + ')} adapter changes the base's log-perplexity by {-gain:+.3f}"
    share = kept_share(results, label, name)
    if share is not None and gain > 0:
        text += f", {share:.0%} of the gain of LoRA on the full model"
    elif _FULL not in results:
        text += " (set evaluate.baseline=true to see what share of full LoRA's gain that is)"
    return text


def identical(results: dict[str, dict[str, Perplexity]]) -> list[str]:
    """Warnings where an adapted variant scores exactly like the model under it, as if nothing had been applied."""
    small = "aligned" if "aligned" in results else "pruned"
    pairs = [(label, "base") for label in (*adapted(results), "merged")] + [("pruned + adapter", small)]
    return [
        f"warning: '{label}' scores exactly like '{plain}': was the adapter applied?"
        for label, plain in pairs
        if label in results
        and plain in results
        and all(results[label][name].nll == results[plain][name].nll for name in results[label])
    ]


def evaluate_folder(
    recipe: Recipe, folder: Path, base: Callable[[], Path], memory: int, tokens: Path
) -> dict[str, dict[str, float]]:
    """Perplexity of one model folder, or of one adapter folder on the base, on the recipe's evaluation sets."""
    adapter = folder if (folder / CONFIG_NAME).is_file() else None
    if adapter is None:
        require_model_folder(folder)
    model_folder = folder if adapter is None else base()
    tokenizer = load_tokenizer(model_folder)
    if adapter is not None and (adapter / PLAN_NAME).is_file():
        with CheckpointReader(model_folder) as reader:
            PruningPlan.load(adapter).require_base(reader.identity(), str(model_folder))
    variant = Variant("evaluate", model_folder, Precision(resolve_dtype(recipe.evaluate.dtype)), adapter)
    sets = _tokenized(recipe, tokenizer, tokens)
    # Beside the tokens: the system's folder for temporary files may be memory.
    with tempfile.TemporaryDirectory(prefix=".evaluate-", dir=tokens.parent) as scratch:
        found = _measure(variant, sets, recipe, tokenizer, memory, Path(scratch) / "hidden")
    return {name: {"perplexity": r.value, "loss": r.loss, "tokens": r.tokens} for name, r in found.items()}
