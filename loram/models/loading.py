"""Loading a model folder, whole or pruned, quantized or not, for computing with it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from loram.checkpoint import CheckpointReader
from loram.errors import CheckpointError, MissingPackageError
from loram.models.pruned import load_config, model_class


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
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise CheckpointError(
            f"The tokenizer has {len(tokenizer):,} tokens, the model's embedding only {rows:,} rows.",
            fix="Put the tokenizer that belongs to the model into its folder.",
        )


def load_model(folder: Path, dtype: torch.dtype, quantizer: str = "none", double_quant: bool = True) -> PreTrainedModel:
    """Loads a model folder (pruned or not) onto the GPU if there is one, else the CPU.

    Args:
        folder: config.json and safetensors; a pruned model is recognised by its config.
        dtype: of what is not quantized, and of the computation.
        quantizer: `nf4` or `fp4` for the projections through bitsandbytes (QLoRA), `none` to keep them.
        double_quant: quantize the quantization constants too.

    Raises:
        CheckpointError: weights missing, unexpected or of the wrong shape.
        MissingPackageError: quantization asked for without bitsandbytes.
    """
    config = load_config(folder)
    CheckpointReader(folder).close()  # names what is missing or corrupt, where loading would only fail
    arguments: dict[str, object] = {}
    if quantizer != "none":
        arguments["quantization_config"] = _bitsandbytes(quantizer, dtype, double_quant)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model, loaded = model_class(config).from_pretrained(
            str(folder),
            config=config,
            dtype=dtype,
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
    if quantizer != "none":
        _keep_layout(model)
    model.config.use_cache = False
    result: PreTrainedModel = model.eval()
    return result


def _bitsandbytes(quantizer: str, dtype: torch.dtype, double_quant: bool) -> object:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            f"Quantizing to {quantizer} needs bitsandbytes, which cannot be imported ({error}).",
            fix="pip install bitsandbytes, or set train.quantizer=none.",
        ) from error
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantizer,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=dtype,
    )


def _keep_layout(model: PreTrainedModel) -> None:
    """Stops bitsandbytes from repacking 4-bit weights on the first CPU eval: after that, gradients are wrong."""
    import bitsandbytes

    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
