"""A PEFT adapter folder as data: its config, its tensors, and which module and part each tensor belongs to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from loram.adapter.patterns import matched
from loram.checkpoint import CheckpointReader
from loram.errors import InputError

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
RATIOS_NAME = "dora_ratios.safetensors"
PREFIX = "base_model.model."
"""Of PEFT's names: what it wraps a model in."""
Part = Literal["A", "B", "magnitude", "saved"]
# Ends of PEFT's keys: (part, whether it is stored transposed). Its embedding layers call A what is B here, and
# store both transposed, so that the weight [vocabulary, hidden] changes by B·A like any other.
_NAMES: dict[str, tuple[Part, bool]] = {
    "lora_A.weight": ("A", False),
    "lora_B.weight": ("B", False),
    "lora_magnitude_vector": ("magnitude", False),
    "lora_embedding_B": ("A", True),
    "lora_embedding_A": ("B", True),
}


@dataclass(frozen=True)
class AdapterTensor:
    """A stored tensor: `A` [r, in], `B` [out, r] or DoRA's `magnitude` [out] of a module, or one `saved` whole.

    `transposed`: stored with its axes exchanged.
    """

    key: str
    module: str
    part: Part
    transposed: bool = False


class Adapter:
    """Reads a PEFT LoRA folder.

    Raises:
        InputError: not a LoRA folder, a kind of adapter that cannot be handled exactly, an A without its B, or
            all B zero (an adapter that was never trained).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = _read_config(folder)
        self.reader = CheckpointReader(folder, single=WEIGHTS_NAME)
        # PEFT also stores the frozen weight under an adapted head or embedding; the base model has it already.
        keys = [key for key in sorted(self.reader.tensors) if ".base_layer." not in key]
        self.tensors = [_classify(key, folder) for key in keys]
        self._by_place = {(tensor.module, tensor.part): tensor for tensor in self.tensors}
        self.modules = sorted({t.module for t in self.tensors if t.part != "saved"})
        for module in self.modules:
            parts = {t.part for t in self.tensors if t.module == module and t.part != "saved"}
            for part in self._parts ^ parts:
                what = "has" if part in parts else "lacks"
                name = "lora_magnitude_vector" if part == "magnitude" else f"lora_{part}"
                raise InputError(f"{folder}: '{module}' {what} {name}.", fix="Train again.")
        if not self.modules and not self.saved:
            raise InputError(f"{folder / WEIGHTS_NAME} holds no adapter tensors.", fix="Train again.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()

    @property
    def _parts(self) -> set[Part]:
        return {"A", "B", "magnitude"} if self.is_dora else {"A", "B"}

    @property
    def is_dora(self) -> bool:
        """Whether rows have magnitudes (arXiv 2402.09353)."""
        return bool(self.config.get("use_dora"))

    @property
    def saved(self) -> dict[str, str]:
        """Base tensor name → key, for the whole tensors of `modules_to_save`."""
        return {t.module: t.key for t in self.tensors if t.part == "saved"}

    def tensor(self, module: str, part: Part) -> AdapterTensor:
        """A module's A, B or magnitude."""
        return self._by_place[module, part]

    def shape(self, module: str) -> tuple[int, int]:
        """(out, in) of the weight that a module's factors change."""
        (_, inputs), (outputs, _) = (self._shape(self.tensor(module, part)) for part in ("A", "B"))
        return outputs, inputs

    def _shape(self, tensor: AdapterTensor) -> tuple[int, ...]:
        shape = self.reader.info(tensor.key).shape
        return shape[::-1] if tensor.transposed else shape

    def factors(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A [r, in] and B [out, r], in the dtype they are stored in."""
        return self._read(module, "A"), self._read(module, "B")

    def _read(self, module: str, part: Part) -> torch.Tensor:
        tensor = self.tensor(module, part)
        values = self.reader.read(tensor.key)
        return values.T if tensor.transposed else values

    def magnitude(self, module: str) -> torch.Tensor | None:
        """DoRA's magnitude of every row [out], float32; None for a LoRA."""
        return self._read(module, "magnitude").float() if self.is_dora else None

    def ratios(self) -> dict[str, torch.Tensor]:
        """Module → DoRA's m / ‖W + s·B·A‖ [out] on the model it was trained on, float32.

        Raises:
            InputError: the file that `loram train` writes them to is missing or does not fit.
        """
        path = self.folder / RATIOS_NAME
        fix = "Train again; only what loram train wrote can be recovered, since the norms belong to its small model."
        try:
            found = load_file(path)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}, which the recovery of a DoRA needs, cannot be read: {error}", fix=fix) from error
        for module in self.modules:
            rows, _ = self.shape(module)
            if module not in found or found[module].shape != (rows,):
                raise InputError(f"{path} does not hold {rows} ratios for '{module}'.", fix=fix)
        return found

    def scale(self, module: str) -> float:
        """s in W + s·B·A: alpha/r, or alpha/√r for rsLoRA (arXiv 2312.03732), patterns honoured."""
        ranks, alphas = (self.config.get(name) or {} for name in ("rank_pattern", "alpha_pattern"))
        rank = matched(ranks.items(), module, self.config["r"])
        alpha = matched(alphas.items(), module, self.config["lora_alpha"])
        return float(alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank)

    def require_trained(self) -> None:
        """Refuses an adapter whose every B is zero: it would change nothing (InputError)."""
        if self.modules and not any(bool(self._read(m, "B").any()) for m in self.modules):
            raise InputError(
                f"{self.folder}: every lora_B is zero, so the adapter was not trained.", fix="Train again."
            )


def write_config(config: Mapping[str, Any], base_model: str, folder: Path) -> None:
    """Writes adapter_config.json for a base model, lists sorted so that equal adapters are equal files."""
    written = {name: sorted(value) if isinstance(value, list) else value for name, value in config.items()}
    written["base_model_name_or_path"] = base_model
    text = json.dumps(written, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_NAME).write_text(text, encoding="utf-8")


def save_ratios(ratios: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes what `Adapter.ratios` reads."""
    save_file({name: tensor.cpu().contiguous() for name, tensor in sorted(ratios.items())}, folder / RATIOS_NAME)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise InputError(f"{folder} has no {CONFIG_NAME}, so it is not an adapter.", fix="Give a PEFT adapter folder.")
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{path} is not a JSON object.", fix="Train again, or copy the file again.")
    if config.get("peft_type") != "LORA":
        raise InputError(f"{folder} is a {config.get('peft_type')} adapter; only LORA can be handled.")
    unsupported = {"fan_in_fan_out": False, "lora_bias": False, "bias": "none", "use_qalora": False}
    for name, plain in unsupported.items():
        if config.get(name, plain) != plain:
            raise InputError(f"{folder} uses {name}={config[name]}, which cannot be recovered or merged exactly.")
    return config


def _classify(key: str, folder: Path) -> AdapterTensor:
    if not key.startswith(PREFIX):
        raise InputError(f"{folder / WEIGHTS_NAME}: unknown tensor '{key}'.", fix=f"Keys must begin with {PREFIX}")
    name = key.removeprefix(PREFIX)
    for suffix, (part, transposed) in _NAMES.items():
        if name.endswith(f".{suffix}"):
            return AdapterTensor(key, name.removesuffix(f".{suffix}"), part, transposed)
    if "lora_" in name:
        raise InputError(f"{folder / WEIGHTS_NAME}: '{key}' is a kind of adapter tensor that cannot be handled.")
    return AdapterTensor(key, name, "saved")
