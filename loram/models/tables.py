"""Sizes of the common model types straight from config.json: what `discover` would find, without torch.

Tracing proves an architecture; this only repeats what it proved, so that a plan is there at once. Whatever is not
certain here is None, and the caller traces instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from loram.models.architecture import Architecture, Cut, Projection, Unit
from loram.models.shape import ModelShape

# Rows (or columns) that one unit takes in a slab: a KV head, its query heads, one neuron.
Slab = Literal["key", "query", "neuron"]
# Which layers see a window only: all, with their list ignored; else those that the config lists, or without a list
# those after `max_window_layers`, all but every n-th, or every other. "upper" and "listed" have a switch besides.
Windows = Literal["none", "every", "upper", "listed", "pattern", "alternate"]
# Whether a projection has a bias: always, never, or as the config's key of that name says.
Bias = bool | str


@dataclass(frozen=True)
class _Row:
    """A projection before its sizes are known; `slabs` lie end to end on the cut axis."""

    name: str
    axis: Literal[0, 1]
    slabs: tuple[Slab, ...]
    bias: Bias = False


@dataclass(frozen=True)
class _ModelType:
    """What one model type is made of.

    `defaults` are transformers' for keys that config.json leaves out; a head_dim of None there means that it follows
    from hidden size and heads. `nullable` keys may also stand as null, with that same meaning; elsewhere transformers
    refuses null. `hidden_norms` and `head_norms` are a layer's norms over the hidden size and over one head.
    """

    rows: tuple[_Row, ...]
    defaults: Mapping[str, Any]
    nullable: tuple[str, ...] = ("num_key_value_heads",)
    hidden_norms: int = 2
    head_norms: int = 0
    heads_divide_hidden: bool = False
    """transformers refuses a hidden size that is no multiple of the heads, even where head_dim is given."""
    min_layers: int = 1
    windows: Windows = "none"
    window: int | None = 4096
    """transformers' default for `sliding_window`."""


def _separate(qkv: Bias, output: Bias, ffn: Bias) -> tuple[_Row, ...]:
    """The Llama layout, one linear each, in the order of the modules."""
    return (
        _Row("self_attn.q_proj", 0, ("query",), qkv),
        _Row("self_attn.k_proj", 0, ("key",), qkv),
        _Row("self_attn.v_proj", 0, ("key",), qkv),
        _Row("self_attn.o_proj", 1, ("query",), output),
        _Row("mlp.gate_proj", 0, ("neuron",), ffn),
        _Row("mlp.up_proj", 0, ("neuron",), ffn),
        _Row("mlp.down_proj", 1, ("neuron",), ffn),
    )


# Phi-3 keeps query, key and value in one linear, gate and up in another, and never has biases.
_FUSED = (
    _Row("self_attn.o_proj", 1, ("query",)),
    _Row("self_attn.qkv_proj", 0, ("query", "key", "key")),
    _Row("mlp.gate_up_proj", 0, ("neuron", "neuron")),
    _Row("mlp.down_proj", 1, ("neuron",)),
)
_SWITCHED = _separate("attention_bias", "attention_bias", "mlp_bias")
_ATTENTION_SWITCHED = _separate("attention_bias", "attention_bias", False)


def _defaults(
    vocabulary: int,
    hidden: int,
    neurons: int,
    layers: int,
    heads: int,
    kv_heads: int | None,
    *,
    head_dim: int | None = None,
    tied: bool = False,
    pad: int | None = None,
) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": neurons,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": tied,
        "pad_token_id": pad,
        "attention_bias": False,
        "mlp_bias": False,
    }


_TYPES: Mapping[str, _ModelType] = {
    "llama": _ModelType(
        _SWITCHED,
        _defaults(32000, 4096, 11008, 32, 32, None),
        nullable=("num_key_value_heads", "head_dim"),
        heads_divide_hidden=True,
    ),
    # Has no switch for biases; a key of that name in its config means nothing.
    "mistral": _ModelType(
        _separate(False, False, False),
        _defaults(32000, 4096, 14336, 32, 32, 8),
        nullable=("head_dim",),
        windows="every",
    ),
    # Biases on query, key and value, whatever the config says.
    "qwen2": _ModelType(_separate(True, False, False), _defaults(151936, 4096, 22016, 32, 32, 32), windows="upper"),
    # head_dim is a fixed 128 and does not follow from the hidden size; norms over each query and key head.
    "qwen3": _ModelType(
        _ATTENTION_SWITCHED,
        _defaults(151936, 4096, 22016, 32, 32, 32, head_dim=128),
        head_norms=2,
        windows="upper",
    ),
    # All Gemmas: a fixed head_dim of 256, tied; from Gemma 2 on norms before and after both halves of a layer.
    "gemma": _ModelType(
        _ATTENTION_SWITCHED,
        _defaults(256000, 3072, 24576, 28, 16, 16, head_dim=256, tied=True, pad=0),
        nullable=(),
    ),
    "gemma2": _ModelType(
        _ATTENTION_SWITCHED,
        _defaults(256000, 2304, 9216, 26, 8, 4, head_dim=256, tied=True, pad=0),
        nullable=(),
        hidden_norms=4,
        heads_divide_hidden=True,
        windows="alternate",
    ),
    "gemma3_text": _ModelType(
        _ATTENTION_SWITCHED,
        _defaults(262208, 2304, 9216, 26, 8, 4, head_dim=256, tied=True, pad=0),
        nullable=(),
        hidden_norms=4,
        head_norms=2,
        heads_divide_hidden=True,
        windows="pattern",
    ),
    "phi3": _ModelType(_FUSED, _defaults(32064, 3072, 8192, 32, 32, None, pad=32000), windows="every", window=None),
    "granite": _ModelType(_SWITCHED, _defaults(32000, 4096, 11008, 32, 32, None)),
    # Lists each layer's use of RoPE, so discovery cannot make its skeleton of two layers from a config of one.
    "smollm3": _ModelType(
        _SWITCHED,
        _defaults(128256, 2048, 11008, 36, 16, 4, tied=True, pad=128004),
        min_layers=2,
        windows="listed",
        window=None,
    ),
}

# Keys that must be a positive number, or null where that may be.
_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
# Parts of a config that make it another model than its numbers say: nested, unlike layers, experts, an encoder.
_OTHERWISE = (
    "text_config",
    "per_layer_config",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "use_bidirectional_attention",
)


def known_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """The sizes of the whole model that a config.json means; equal to `loram.models.discover.traced_shape`.

    A key `loram` is ignored. None for another model type, a nested config, and whatever discovery refuses or might
    refuse: tracing then finds the sizes or says what is wrong.
    """
    known = _TYPES.get(str(config.get("model_type")))
    if known is None or any(config.get(key) not in (None, 0) for key in _OTHERWISE):
        return None
    numbers = _Numbers.read(config, known)
    if numbers is None:
        return None
    windows = _windows(config, known, numbers.layers)
    return None if windows is None else numbers.shape(str(config["model_type"]), known, windows)


def _windows(config: Mapping[str, Any], known: _ModelType, layers: int) -> tuple[int, ...] | None:
    """`ModelShape.windows`; None where the config does not say it plainly."""
    window = config.get("sliding_window", known.window)
    switched_off = known.windows in ("upper", "listed") and not config.get("use_sliding_window", False)
    if known.windows == "none" or switched_off or window is None:
        return ()
    kinds = config.get("layer_types")
    upper, interval = config.get("max_window_layers", 28), config.get("sliding_window_pattern", 6)
    if not all(map(_is_count, (window, upper, interval))):
        return None
    if known.windows == "every":
        slides = [True] * layers
    elif isinstance(kinds, list):
        slides = [kind == "sliding_attention" for kind in kinds]
    elif kinds is not None or known.windows == "listed":
        return None
    elif known.windows == "upper":
        slides = [layer >= upper for layer in range(layers)]
    else:
        slides = [bool((layer + 1) % (2 if known.windows == "alternate" else interval)) for layer in range(layers)]
    if len(slides) != layers:
        return None
    return tuple(window if slide else 0 for slide in slides) if any(slides) else ()


@dataclass(frozen=True)
class _Numbers:
    """A config's numbers with defaults filled in; `biases` are the names of projections that have one."""

    vocabulary: int
    hidden: int
    neurons: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    biases: frozenset[str]

    @classmethod
    def read(cls, config: Mapping[str, Any], known: _ModelType) -> _Numbers | None:
        """None where transformers or discovery would refuse a value."""
        value = {key: config.get(key, default) for key, default in known.defaults.items()}
        if any(key in config and config[key] is None for key in _NUMBERS if key not in known.nullable):
            return None
        if value["num_key_value_heads"] is None:
            value["num_key_value_heads"] = value["num_attention_heads"]
        if not all(_is_count(value[key]) for key in _NUMBERS if key != "head_dim"):
            return None
        if value["head_dim"] is None:
            value["head_dim"] = value["hidden_size"] // value["num_attention_heads"]
        switches = {row.bias for row in known.rows if isinstance(row.bias, str)} | {"tie_word_embeddings"}
        if not all(type(value[key]) is bool for key in switches) or not _is_consistent(value, known):
            return None
        return cls(
            vocabulary=value["vocab_size"],
            hidden=value["hidden_size"],
            neurons=value["intermediate_size"],
            layers=value["num_hidden_layers"],
            heads=value["num_attention_heads"],
            kv_heads=value["num_key_value_heads"],
            head_dim=value["head_dim"],
            tied=value["tie_word_embeddings"],
            biases=frozenset(
                row.name for row in known.rows if (value[row.bias] if isinstance(row.bias, str) else row.bias)
            ),
        )

    def shape(self, model_type: str, known: _ModelType, windows: tuple[int, ...]) -> ModelShape:
        architecture = Architecture(
            model_type=model_type,
            layers=self.layers,
            layers_prefix="model.layers",
            kv_groups=self.kv_heads,
            neurons=self.neurons,
            query_heads_per_group=self.heads // self.kv_heads,
            embedding="model.embed_tokens",
            head="lm_head",
            projections=tuple(self._projection(row) for row in known.rows),
        )
        return ModelShape(
            architecture=architecture,
            hidden=self.hidden,
            vocabulary=self.vocabulary,
            head_dim=self.head_dim,
            tied=self.tied,
            layer_norms=known.hidden_norms * self.hidden + known.head_norms * self.head_dim,
            final_norm=self.hidden,
            windows=windows,
        )

    def _projection(self, row: _Row) -> Projection:
        unit: Unit = "neuron" if row.slabs[0] == "neuron" else "kv_group"
        units = self.neurons if unit == "neuron" else self.kv_heads
        extent = {"key": self.head_dim, "query": self.head_dim * (self.heads // self.kv_heads), "neuron": 1}
        extents = [extent[slab] for slab in row.slabs]
        *offsets, width = accumulate((units * each for each in extents), initial=0)
        cuts = tuple(Cut(unit, offset, each) for offset, each in zip(offsets, extents, strict=True))
        out_features, in_features = (width, self.hidden) if row.axis == 0 else (self.hidden, width)
        return Projection(row.name, out_features, in_features, row.name in self.biases, row.axis, cuts)


def _is_count(value: Any) -> bool:
    """A positive int; JSON's true is none."""
    return type(value) is int and value > 0


def _is_consistent(value: Mapping[str, Any], known: _ModelType) -> bool:
    heads, head_dim, pad = value["num_attention_heads"], value["head_dim"], value["pad_token_id"]
    return (
        heads % value["num_key_value_heads"] == 0
        and _is_count(head_dim)
        and head_dim % 2 == 0  # rotary embeddings turn pairs
        and value["num_hidden_layers"] >= known.min_layers
        and not (known.heads_divide_hidden and value["hidden_size"] % heads)
        and (pad is None or (type(pad) is int and -value["vocab_size"] <= pad < value["vocab_size"]))  # nn.Embedding
    )
