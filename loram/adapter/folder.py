"""A PEFT adapter folder as data: its config, its tensors, and which module and part each tensor belongs to."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch

from loram.checkpoint import CheckpointReader
from loram.errors import InputError

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
Part = Literal["A", "B", "saved"]
_PARTS: dict[str, Part] = {"lora_A.weight": "A", "lora_B.weight": "B"}


@dataclass(frozen=True)
class AdapterTensor:
    """A stored tensor: `A` [r, in] or `B` [out, r] of a module, or a whole `saved` tensor (`modules_to_save`)."""

    key: str
    module: str
    part: Part


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
        self.modules = sorted({t.module for t in self.tensors if t.part != "saved"})
        for module in self.modules:
            parts = {t.part for t in self.tensors if t.module == module and t.part != "saved"}
            if parts != {"A", "B"}:
                raise InputError(f"{folder}: '{module}' lacks lora_{'B' if 'A' in parts else 'A'}.", fix="Train again.")
        if not self.modules and not self.saved:
            raise InputError(f"{folder / WEIGHTS_NAME} holds no adapter tensors.", fix="Train again.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()

    @property
    def saved(self) -> dict[str, str]:
        """Base tensor name → key, for the whole tensors of `modules_to_save`."""
        return {t.module: t.key for t in self.tensors if t.part == "saved"}

    def key(self, module: str, part: Part) -> str:
        """Where a module's A or B is stored."""
        return f"{_PREFIX}{module}.lora_{part}.weight"

    def factors(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A [r, in] and B [out, r], as stored."""
        return self.reader.read(self.key(module, "A")), self.reader.read(self.key(module, "B"))

    def scale(self, module: str) -> float:
        """s in W + s·B·A: alpha/r, or alpha/√r for rsLoRA (arXiv 2312.03732), patterns honoured."""
        rank = _pattern(self.config.get("rank_pattern"), module, self.config["r"])
        alpha = _pattern(self.config.get("alpha_pattern"), module, self.config["lora_alpha"])
        return float(alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank)

    def require_trained(self) -> None:
        """Refuses an adapter whose every B is zero: it would change nothing (InputError)."""
        if self.modules and not any(bool(self.reader.read(self.key(m, "B")).any()) for m in self.modules):
            raise InputError(
                f"{self.folder}: every lora_B is zero, so the adapter was not trained.", fix="Train again."
            )


def write_config(config: Mapping[str, Any], base_model: str, folder: Path) -> None:
    """Writes adapter_config.json for a base model, lists sorted so that equal adapters are equal files."""
    written = {name: sorted(value) if isinstance(value, list) else value for name, value in config.items()}
    written["base_model_name_or_path"] = base_model
    text = json.dumps(written, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_NAME).write_text(text, encoding="utf-8")


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
    unsupported = {"use_dora": False, "fan_in_fan_out": False, "lora_bias": False, "bias": "none", "use_qalora": False}
    for name, plain in unsupported.items():
        if config.get(name, plain) != plain:
            raise InputError(f"{folder} uses {name}={config[name]}, which cannot be recovered or merged exactly.")
    return config


def _classify(key: str, folder: Path) -> AdapterTensor:
    if not key.startswith(_PREFIX):
        raise InputError(f"{folder / WEIGHTS_NAME}: unknown tensor '{key}'.", fix=f"Keys must begin with {_PREFIX}")
    name = key.removeprefix(_PREFIX)
    for suffix, part in _PARTS.items():
        if name.endswith(f".{suffix}"):
            return AdapterTensor(key, name.removesuffix(f".{suffix}"), part)
    if "lora_" in name:
        raise InputError(f"{folder / WEIGHTS_NAME}: '{key}' is a kind of adapter tensor that cannot be handled.")
    return AdapterTensor(key, name, "saved")


def _pattern(patterns: Mapping[str, float] | None, module: str, default: float) -> float:
    """PEFT's rule: the first pattern that equals the module name or a dotted end of it, as a regular expression."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
