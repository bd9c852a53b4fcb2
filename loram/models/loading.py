"""Loading a model folder, whole or pruned, quantized or not, for computing with it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from loram.checkpoint import CheckpointReader
from loram.errors import CheckpointError, MissingPackageError
from loram.models.pruned import load_config, model_class
from loram.models.quantized import QuantizedMatrix, quantize_vocabulary


@functools.cache
def has_fast_bfloat16() -> bool:
    """True where bfloat16 matmuls run in hardware; on other CPUs they are tens of times slower than float32."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags or " bf16" in flags


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
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise CheckpointError(
            f"The tokenizer has {len(tokenizer):,} tokens, the model's embedding only {rows:,} rows.",
            fix="Put the tokenizer that belongs to the model into its folder.",
        )


@dataclass(frozen=True)
class Precision:
    """How weights are held for computing.

    `dtype`: of what is not quantized, and of the computation. `quantizer`: `nf4` or `fp4` for the projections through
    bitsandbytes (QLoRA), `none` to keep them. `double_quant`: quantize the quantization constants too.
    `quantize_embeddings`: embedding and head in the same format.
    """

    dtype: torch.dtype
    quantizer: str = "none"
    double_quant: bool = True
    quantize_embeddings: bool = False


def load_model(folder: Path, precision: Precision | torch.dtype) -> PreTrainedModel:
    """Loads a model folder (pruned or not) onto the GPU if there is one, else the CPU.

    Args:
        folder: config.json and safetensors; a pruned model is recognised by its config.
        precision: a dtype alone means nothing quantized.

    Raises:
        CheckpointError: weights missing, unexpected or of the wrong shape.
        MissingPackageError: quantization asked for without bitsandbytes.
    """
    precision = Precision(precision) if isinstance(precision, torch.dtype) else precision
    config = load_config(folder)
    CheckpointReader(folder).close()  # names what is missing or corrupt, where loading would only fail
    arguments: dict[str, object] = {}
    if precision.quantizer != "none":
        arguments["quantization_config"] = _bitsandbytes(precision)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model, loaded = model_class(config).from_pretrained(
            str(folder),
            config=config,
            dtype=precision.dtype,
            device_map={"": device},
            local_files_only=True,
            output_loading_info=True,
            **arguments,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be loaded: {error}", fix="Copy or make the model again.") from error
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if loaded[problem]:
            first = sorted(map(str, loaded[problem]))[0]
            raise CheckpointError(
                f"{folder} does not fit its config.json: {problem.replace('_', ' ')}, such as '{first}'.",
                fix="Copy or make the model again.",
            )
    if precision.quantizer != "none":
        _keep_layout(model)
    if precision.quantize_embeddings:
        quantize_vocabulary(model, precision.quantizer, precision.double_quant)
    model.config.use_cache = False
    result: PreTrainedModel = model.eval()
    return result


def _bitsandbytes(precision: Precision) -> Any:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            f"Quantizing to {precision.quantizer} needs bitsandbytes, which cannot be imported ({error}).",
            fix="pip install bitsandbytes, or set train.quantizer=none.",
        ) from error
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=precision.quantizer,
        bnb_4bit_use_double_quant=precision.double_quant,
        bnb_4bit_compute_dtype=precision.dtype,
    )


def _keep_layout(model: PreTrainedModel) -> None:
    """Stops bitsandbytes from repacking 4-bit weights on the first CPU eval: after that, gradients are wrong."""
    import bitsandbytes

    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False


def empty_model(config: PretrainedConfig, precision: Precision) -> PreTrainedModel:
    """The model of a config with parameters that take no memory, buffers (rotary positions, scales) real."""
    from accelerate import init_empty_weights

    before = torch.get_default_dtype()
    torch.set_default_dtype(precision.dtype)  # as from_pretrained does while it builds
    try:
        with init_empty_weights(include_buffers=False):
            model = model_class(config)(config)
        model.tie_weights()
    finally:
        torch.set_default_dtype(before)
    if precision.quantizer != "none":
        from transformers.integrations import replace_with_bnb_linear

        head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
        model = replace_with_bnb_linear(model, [head], _bitsandbytes(precision))
        _keep_layout(model)
    model.config.use_cache = False
    result: PreTrainedModel = model.eval()
    return result


def filled(module: nn.Module, name: str, weight: torch.Tensor, precision: Precision, vocabulary: bool) -> nn.Parameter:
    """What a parameter of an `empty_model` becomes: `weight`, in 4 bits where the module computes so.

    Args:
        vocabulary: embedding or head. Quantized ones are held dequantized here: the same numbers, while they are used.
    """
    empty = module._parameters[name]
    if precision.quantizer != "none" and hasattr(empty, "quant_type"):
        import bitsandbytes

        return bitsandbytes.nn.Params4bit(
            weight, requires_grad=False, quant_type=precision.quantizer, compress_statistics=precision.double_quant,
            module=module,
        ).to(weight.device)  # fmt: skip
    if vocabulary and precision.quantize_embeddings and weight.dim() == 2:
        weight = QuantizedMatrix(weight, precision.quantizer, precision.double_quant).rows(slice(None))
    return nn.Parameter(weight, requires_grad=False)
