"""The scale at which an adapter does the full model most good: found on rows, checked on others, folded into B.

An adapter trained on a small model may be too loud or too quiet on the full one. Factors of its scale come from a grid:
first one for all modules, then one for each kind (the last part of a module's name: `q_proj`), kind after kind, the
others as found so far. All factors tried in a step pass a layer together, so weights are read once a step; nothing is
trained. What was found is kept only if it lowers the loss on rows that had no part in finding it.

The factor goes into B, not into alpha: readers that know no `alpha_pattern` take that for the plain `lora_alpha`, and
its patterns may span kinds. So ranks, patterns and rsLoRA stay as they are, at the price of one rounding in float32.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer

from loram.adapter.folder import CONFIG_NAME, WEIGHTS_NAME, Adapter, AdapterTensor
from loram.checkpoint import CheckpointWriter, TensorSpec
from loram.evaluate.perplexity import Perplexity, sound
from loram.models.layerwise import Batch, LayerwiseModel

_NAME = "default"  # of the adapter that the engine put on


@dataclass(frozen=True)
class Search:
    """What was found: kind of module → factor, and the losses with the adapter as it was and scaled so.

    `chosen` and `check` are (before, after) on the rows the factors were found on, and on the others.
    """

    found: dict[str, float]
    chosen: tuple[Perplexity, Perplexity]
    check: tuple[Perplexity, Perplexity]

    @property
    def helps(self) -> bool:
        """Whether the loss is lower on rows that had no part in finding them."""
        return self.check[1].loss < self.check[0].loss

    @property
    def factors(self) -> dict[str, float]:
        """Those to use: 1 where what was found does not help."""
        return self.found if self.helps else dict.fromkeys(self.found, 1.0)

    def metrics(self) -> dict[str, Any]:
        """For the manifest; losses in nats a token."""
        return {
            "factors": self.factors,
            "found_factors": self.found,
            "kept": self.helps,
            **{
                f"{rows}_{name}": value
                for rows, (before, after) in (("chosen", self.chosen), ("check", self.check))
                for name, value in (
                    ("loss_before", before.loss), ("loss_after", after.loss), ("loss_tokens", before.tokens)
                )
            },
        }  # fmt: skip


def kind_of(module: str) -> str:
    """The last part of a module's name, `q_proj`."""
    return module.rpartition(".")[2]


def search(
    engine: LayerwiseModel, chosen: Sequence[Batch], check: Sequence[Batch], grid: Sequence[float], per_kind: bool
) -> Search:
    """Finds the factors with the lowest loss, 1 being tried always, and measures them on other rows.

    Args:
        engine: the full model with the adapter, a LoRA, on it; left at some scale.
        chosen: rows to find them on.
        check: other rows.
        grid: the factors to try.
        per_kind: whether kinds get factors of their own, after the one for all.

    Raises:
        LoramError: the model with the adapter as it is computes NaN or infinity.
    """
    layers = [(kind_of(name), of) for name, of in engine.model.named_modules() if isinstance(of, LoraLayer)]
    kinds = sorted({kind for kind, _ in layers})
    plain = best = dict.fromkeys(kinds, 1.0)
    steps = [kinds, *([kind] for kind in kinds)] if per_kind and len(kinds) > 1 else [kinds]
    known: dict[tuple[float, ...], Perplexity] = {}
    for number, step in enumerate(steps, 1):
        tried = [best, *(best | dict.fromkeys(step, factor) for factor in grid)]
        new = {_key(factors): factors for factors in tried if _key(factors) not in known}
        if new:
            losses = _losses(engine, layers, chosen, list(new.values()), f"scale {number}/{len(steps) + 1}")
            known.update(zip(new, losses, strict=True))
        sound(known[_key(best)], "scale")
        best = min(tried, key=lambda factors: known[_key(factors)].loss)  # the first of equals, and never a NaN
    before, after = _losses(engine, layers, check, [plain, best], f"scale {len(steps) + 1}/{len(steps) + 1}")
    return Search(best, (known[_key(plain)], known[_key(best)]), (sound(before, "scale"), after))


def _key(factors: Mapping[str, float]) -> tuple[float, ...]:
    return tuple(factors.values())


def _losses(
    engine: LayerwiseModel,
    layers: Sequence[tuple[str, LoraLayer]],
    rows: Sequence[Batch],
    candidates: Sequence[Mapping[str, float]],
    description: str,
) -> list[Perplexity]:
    """The loss on all rows with each candidate's factors, in one pass over the layers."""
    at: int | None = None

    def before(number: int) -> None:
        nonlocal at
        if at != number // len(rows):
            at = number // len(rows)
            for kind, layer in layers:
                layer.set_scale(_NAME, candidates[at][kind])

    engine.before_batch = before
    results = engine.nll([*rows] * len(candidates), description)
    found = []
    for start in range(0, len(results), len(rows)):
        here = results[start : start + len(rows)]
        found.append(Perplexity(sum(nll for nll, _ in here), sum(tokens for _, tokens in here)))
    return found


def write_scaled(adapter: Adapter, factors: Mapping[str, float], folder: Path) -> dict[str, str]:
    """Writes the adapter with every B times the factor of its kind, in float32 where that is not 1; all else as it is.

    Returns:
        sha256 of the weights file.
    """

    def factor(tensor: AdapterTensor) -> float:
        return factors.get(kind_of(tensor.module), 1.0) if tensor.part == "B" else 1.0

    layout = []
    for tensor in adapter.tensors:
        info = adapter.reader.info(tensor.key)
        layout.append(TensorSpec(tensor.key, info.dtype if factor(tensor) == 1 else torch.float32, info.shape))
    with CheckpointWriter(folder, {WEIGHTS_NAME: layout}) as writer:
        for tensor in adapter.tensors:
            values, times = adapter.reader.read(tensor.key), factor(tensor)
            writer.write(tensor.key, values if times == 1 else values.float() * times)
    shutil.copyfile(adapter.folder / CONFIG_NAME, folder / CONFIG_NAME)
    return writer.digests
