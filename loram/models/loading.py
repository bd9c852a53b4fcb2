"""Loading a model folder, whole or pruned, quantized or not, for computing with it."""

from __future__ import annotations

import functools
import re
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from loram.checkpoint import CheckpointReader
from loram.checkpoint.overlap import in_order
from loram.errors import CheckpointError
from loram.memory.formats import FORMATS
from loram.models.attention import attend_by_document
from loram.models.factored import FactoredLinear
from loram.models.pruned import load_config, model_class
from loram.models.quantizers import PackedLinear, get_quantizer
from loram.models.vocabulary import quantize_vocabulary


@functools.cache
def has_fast_bfloat16() -> bool:
    """True where bfloat16 is faster than float32: GPUs that have it, and CPUs with matrix units for it.

    On other CPUs it is tens of times slower. One with AVX512-BF16 alone (Intel) trained SmolLM2-135M at 0.57 to 0.7 of
    float32's speed.
    """
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "amx_bf16" in flags or " bf16" in flags  # x86; ARM


def resolve_dtype(name: str) -> torch.dtype:
    """`auto`, `float32` or `bfloat16` as a torch dtype."""
    if name == "auto":
        return torch.bfloat16 if has_fast_bfloat16() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder; CheckpointError if it has none."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder} has no usable tokenizer: {error}", fix="Copy the tokenizer files of the base model there."
        ) from error
    if tokenizer.eos_token_id is None:
        raise CheckpointError(f"The tokenizer in {folder} has no EOS token, so no completion could end.")
    return tokenizer


def require_vocabulary(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a tokenizer with ids that the model's embedding does not have (CheckpointError)."""
    embedding = model.get_input_embeddings()
    rows = getattr(embedding, "base_layer", embedding).num_embeddings
    if len(tokenizer) > rows:
        raise CheckpointError(
            f"The tokenizer has {len(tokenizer):,} tokens, the model's embedding only {rows:,} rows.",
            fix="Put the tokenizer that belongs to the model into its folder.",
        )


@dataclass(frozen=True)
class Precision:
    """How weights are held for computing.

    `dtype`: of what is not quantized, and of the computation. `quantizer`: the format of the projections
    (`loram.memory.formats`), `none` to keep them. `double_quant`: quantize the constants of 4-bit formats too.
    `quantize_embeddings`: embedding and head in the same format, NF4 or FP4.
    """

    dtype: torch.dtype
    quantizer: str = "none"
    double_quant: bool = True
    quantize_embeddings: bool = False


@dataclass(frozen=True)
class Slot:
    """A parameter of an `empty_model` to be filled from `source`, a tensor of its folder."""

    module: nn.Module
    name: str
    full_name: str
    source: str

    def fill(self, weight: torch.Tensor, requires_grad: bool = False) -> None:
        """Puts the weight there, packed if the module packs."""
        if self.name == "weight" and isinstance(self.module, PackedLinear):
            self.module.fill(weight)
        else:
            self.module._parameters[self.name] = nn.Parameter(weight, requires_grad=requires_grad)


def slots(model: nn.Module, reader: CheckpointReader) -> list[Slot]:
    """Every parameter of an `empty_model` and where its values are; a tied head may be stored as the embedding.

    Raises:
        CheckpointError: the folder lacks a tensor, or has it in another shape, or has one too many.
    """
    head = set(model.get_output_embeddings().modules())  # type: ignore[operator]
    embedding = _name_of(model, model.get_input_embeddings())  # type: ignore[operator]
    found = []
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.device.type != "meta":
                continue
            full_name = f"{path}.{name}"
            source = full_name.replace(".base_layer.", ".").replace(".original_module.", ".")
            if module in head and source not in reader and model.config.tie_word_embeddings:  # type: ignore[union-attr]
                source = f"{embedding}.weight"
            _require_tensor(reader, source, tuple(parameter.shape))
            found.append(Slot(module, name, full_name, source))
    used = {slot.source for slot in found} | {name for name, _ in model.named_buffers()}
    for name in sorted(set(reader.tensors) - used):
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
        if not name.endswith("rotary_emb.inv_freq") and not any(re.search(pattern, name) for pattern in ignored):
            raise _misfit(reader, "unexpected", name)
    return found


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _require_tensor(reader: CheckpointReader, name: str, shape: tuple[int, ...]) -> None:
    if name not in reader:
        raise _misfit(reader, "missing", name)
    if reader.info(name).shape != shape:
        raise _misfit(reader, "mismatched", name, f" of {list(reader.info(name).shape)}, not {list(shape)}")


def _misfit(reader: CheckpointReader, problem: str, name: str, more: str = "") -> CheckpointError:
    return CheckpointError(
        f"{reader.folder} does not fit its config.json: {problem} tensors, such as '{name}'{more}.",
        fix="Copy or make the model again.",
    )


def load_model(folder: Path, precision: Precision | torch.dtype) -> PreTrainedModel:
    """Loads a model folder (pruned or not) onto the GPU if there is one, else the CPU, packing as it reads.

    Args:
        folder: config.json and safetensors; a pruned model is recognised by its config.
        precision: a dtype alone means nothing quantized.

    Raises:
        CheckpointError: weights missing, unexpected, of the wrong shape, or quantized already (GPTQ, AWQ).
        MissingPackageError: quantization asked for without the library of its format.
    """
    precision = Precision(precision) if isinstance(precision, torch.dtype) else precision
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = load_config(folder)
    _require_plain(folder, config)
    model = empty_model(config, precision)
    with CheckpointReader(folder) as reader:
        places = slots(model, reader)
        shared = _shared(model, reader)
        if shared:  # one matrix, read once
            head = model.get_output_embeddings()
            places = [slot for slot in places if (slot.module, slot.name) != (head, "weight")]
        jobs = (functools.partial(_read, reader, slot.source, precision.dtype) for slot in places)
        with closing(in_order(jobs)) as weights:
            for slot, weight in zip(places, weights, strict=True):
                slot.fill(weight.to(device), requires_grad=not isinstance(slot.module, PackedLinear))
        if shared:
            model.get_output_embeddings().weight = model.get_input_embeddings().weight
        place_buffers(model, reader, device)
    if precision.quantize_embeddings:
        quantize_vocabulary(model, precision.quantizer, precision.double_quant)
    return model


def _require_plain(folder: Path, config: PretrainedConfig) -> None:
    """Refuses weights that another tool has quantized (CheckpointError): they are packed here, as they are read."""
    stored = getattr(config, "quantization_config", None)
    if stored is not None:
        method = stored.get("quant_method", "some") if isinstance(stored, dict) else stored.quant_method
        raise CheckpointError(
            f"{folder} is stored quantized ({method}), which is not read.",
            fix="Give the model in 16 or 32 bits; train.quantizer chooses the format it is held in "
            f"({', '.join(FORMATS)}).",
        )


def place_buffers(model: nn.Module, reader: CheckpointReader, device: torch.device) -> None:
    """Moves every buffer to the device; with the stored values of those that a checkpoint keeps."""
    for name, buffer in list(model.named_buffers()):
        parent, _, child = name.rpartition(".")
        value = reader.read(name).to(buffer.dtype) if name in reader and buffer.dtype.is_floating_point else buffer
        model.get_submodule(parent)._buffers[child] = value.to(device)


def _read(reader: CheckpointReader, name: str, dtype: torch.dtype) -> torch.Tensor:
    return reader.read(name).to(dtype)


def _shared(model: Any, reader: CheckpointReader) -> bool:
    """Whether embedding and head are one matrix: tied, and no other head is stored (which then counts)."""
    if not model.config.tie_word_embeddings:
        return False
    embedding, head = (
        f"{_name_of(model, module)}.weight" for module in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    return head not in reader or reader.equal(head, embedding)


def empty_model(config: PretrainedConfig, precision: Precision) -> PreTrainedModel:
    """The model of a config in eval mode; parameters take no memory, buffers (rotary positions, scales) are real.

    Its linears but the head pack what they are filled with, if the precision says so.
    """
    from accelerate import init_empty_weights

    before = torch.get_default_dtype()
    torch.set_default_dtype(precision.dtype)  # as from_pretrained does while it builds
    try:
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = model_class(config)(config)
        model.tie_weights()
    finally:
        torch.set_default_dtype(before)
    attend_by_document(model)
    if precision.quantizer != "none":
        quantizer = get_quantizer(precision.quantizer, precision.double_quant)
        head = model.get_output_embeddings()
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) and not isinstance(child, FactoredLinear) and child is not head:
                    setattr(parent, name, PackedLinear(child, quantizer))
    model.config.use_cache = False
    return model.eval()
