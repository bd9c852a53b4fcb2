"""Finding what can be cut: trace a tiny copy of the model, then prove the answer on it.

`torch_pruning.DependencyGraph` says which linears share an axis. It knows nothing of grouped-query expansion, so
only membership and axis are taken from it; unit sizes come from the config. `loram.models.proof` then compares a
pruned forward with a masked one before anything is believed.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from loram.errors import UnsupportedModelError
from loram.models.architecture import Architecture, Cut, Projection, Unit
from loram.models.shape import ModelShape, whole_units

# Sizes of the skeleton. No two sums of them that occur as an axis may be equal, so that an axis tells its role.
_HEAD_DIM, _HIDDEN, _NEURONS, _VOCABULARY = 8, 20, 37, 64
_KV_GROUPS = 3
_FIX = "Supported: Llama, Mistral, Qwen2, Qwen3 and whatever else passes the check; see README, 'Architectures'."


def discover(config: PretrainedConfig) -> Architecture:
    """The table of prunable projections for a model config, proven on a skeleton.

    Raises:
        UnsupportedModelError: the coupled groups are not one attention and one FFN group per layer, or the pruned
            skeleton does not equal the masked one; says which.
    """
    text = require_dense_decoder(config)
    try:
        return _discovered(config, text)
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever a model class makes of the skeleton's sizes, or tracing of its code
        raise UnsupportedModelError(
            f"{config.model_type}: its layers cannot be traced ({type(error).__name__}: {error}).", fix=_FIX
        ) from error


def _discovered(config: PretrainedConfig, text: PretrainedConfig) -> Architecture:
    from loram.models.proof import prove  # proof builds pruned models, which need this module's helpers

    traced = build_skeleton(config, layers=1, query_heads_per_group=1)
    groups = _architecture(traced, traced.config, layers=1)
    skeleton = build_skeleton(config, layers=2, query_heads_per_group=min(2, query_heads_per_group(config)))
    prove(_architecture(skeleton, skeleton.config, layers=2, like=groups), skeleton)
    with torch.device("meta"), _quiet():
        one_layer = AutoModelForCausalLM.from_config(_with_layers(config, 1))
    return _architecture(one_layer, text, layers=text.num_hidden_layers, like=groups)


def traced_shape(config: PretrainedConfig) -> ModelShape:
    """The sizes of a model of any type, from its discovered table and a copy without memory.

    Whatever stands outside the layers and is neither embedding nor head counts as `final_norm`.

    Raises:
        UnsupportedModelError: discovery refuses the model, or its parameters are not those of equal layers, norms and
            two matrices of [vocabulary, hidden].
    """
    architecture = discover(config)
    with torch.device("meta"), _quiet():
        model = AutoModelForCausalLM.from_config(config)
    parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
    first, layers = f"{architecture.layers_prefix}.0.", f"{architecture.layers_prefix}."
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    one_layer = sum(p.numel() for name, p in parameters.items() if name.startswith(first))
    outside = [p for name, p in parameters.items() if not name.startswith(layers)]
    shape = ModelShape(
        architecture=architecture,
        hidden=embedding.shape[1],
        vocabulary=embedding.shape[0],
        head_dim=head_dim(config),
        tied=head is embedding,
        layer_norms=one_layer - architecture.layer_parameters(whole_units(architecture)),
        final_norm=sum(p.numel() for p in outside if p is not embedding and p is not head),
        windows=_windows(model, architecture.layers),
    )
    total = sum(p.numel() for p in parameters.values())
    if shape.parameters() != total:
        raise UnsupportedModelError(
            f"{config.model_type}: has {total:,} parameters, but equal layers would make it {shape.parameters():,}.",
            fix=_FIX,
        )
    return shape


def _windows(model: PreTrainedModel, layers: int) -> tuple[int, ...]:
    """`ModelShape.windows`. A config may carry a window that its model never looks at, so the model's code decides."""
    source = inspect.getsource(inspect.getmodule(type(model.base_model)))  # type: ignore[arg-type]
    window = getattr(model.config, "sliding_window", None)
    if not window or "sliding_window_causal_mask" not in source:
        return ()
    kinds = getattr(model.config, "layer_types", None) if "layer_types" in source else None
    slides = [kind == "sliding_attention" for kind in kinds] if kinds else [True] * layers
    return tuple(window if slide else 0 for slide in slides) if any(slides) else ()


def require_dense_decoder(config: PretrainedConfig) -> PretrainedConfig:
    """The config, if it has the plain numbers a dense decoder has; UnsupportedModelError otherwise."""
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"):
        if not isinstance(getattr(config, name, None), int):
            raise UnsupportedModelError(
                f"{config.model_type}: its config has no single '{name}', so it is not a plain dense decoder.", fix=_FIX
            )
    experts = [name for name in ("num_experts", "num_local_experts", "n_routed_experts") if getattr(config, name, None)]
    if experts:
        raise UnsupportedModelError(f"{config.model_type}: mixture of experts ({experts[0]}) cannot be cut.", fix=_FIX)
    return config


def kv_heads(config: PretrainedConfig) -> int:
    """KV heads; equal to the query heads where the config does not tell."""
    return getattr(config, "num_key_value_heads", None) or int(config.num_attention_heads)


def head_dim(config: PretrainedConfig) -> int:
    """Size of a head; may differ from hidden_size / heads (Qwen3, Gemma)."""
    return getattr(config, "head_dim", None) or int(config.hidden_size // config.num_attention_heads)


def query_heads_per_group(config: PretrainedConfig) -> int:
    """Query heads that share one KV head."""
    return int(config.num_attention_heads // kv_heads(config))


def build_skeleton(config: PretrainedConfig, layers: int, query_heads_per_group: int) -> PreTrainedModel:
    """The same model class with tiny layers, every parameter random (biases and norms too), in float32.

    For tracing take one query head a group: the graph does not follow the repetition of KV heads, and
    torch-pruning 1.6 does not end on it.
    """
    small = _with_layers(config, layers)
    group, groups = query_heads_per_group, 1 if kv_heads(config) == 1 else _KV_GROUPS
    small.hidden_size, small.intermediate_size, small.vocab_size = _HIDDEN, _NEURONS, _VOCABULARY
    small.num_key_value_heads, small.num_attention_heads = groups, groups * group
    small.head_dim = _HEAD_DIM
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(small, name, None) is not None:
            setattr(small, name, 0)
    rope = getattr(small, "rope_parameters", None) or {}
    if "short_factor" in rope:
        # Long RoPE lists a factor for every dimension of the real heads; what is cut does not depend on it.
        small.rope_parameters = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10_000.0)}
    small.use_cache = False  # tracing does not end with a cache
    small._attn_implementation = "eager"
    small.dtype = torch.float32  # a config of 16 bits would round buffers that are made with the model
    generator = torch.Generator().manual_seed(0)
    try:
        with _quiet():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(small)
    except Exception as error:
        raise UnsupportedModelError(
            f"{config.model_type}: a small copy cannot be built ({error}).", fix=_FIX
        ) from error
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.float().eval()


def _with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    small = copy.deepcopy(config)
    small.num_hidden_layers = layers
    if getattr(small, "layer_types", None):
        # Keep each kind of layer (sliding, full) that the model has.
        kinds = sorted(set(config.layer_types))
        small.layer_types = (kinds * layers)[:layers]
    for stale in ("loram", "quantization_config"):
        if hasattr(small, stale):
            delattr(small, stale)
    return small


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    level = logging.getLogger("transformers").level
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.getLogger("transformers").setLevel(level)


@dataclass(frozen=True)
class _Member:
    """A linear on one side of a coupled group: `axis` 0 where its outputs are shared, 1 where its inputs are."""

    module: str
    axis: Literal[0, 1]


def _coupled_groups(model: PreTrainedModel) -> list[set[_Member]]:
    """Groups of linears that share an axis, from the traced graph; groups that share a member are joined."""
    import torch_pruning

    names = {module: name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = torch_pruning.DependencyGraph().build_dependency(
            model,
            example_inputs=torch.zeros((1, 4), dtype=torch.long),
            output_transform=lambda output: output.logits,
            verbose=False,
        )
        groups: list[set[_Member]] = []
        for module in names:
            group: set[_Member] = set()
            for item in graph.get_pruning_group(module, torch_pruning.prune_linear_out_channels, idxs=[0]):
                target = item.dep.target.module
                if target in names:
                    outward = item.dep.handler == torch_pruning.prune_linear_out_channels
                    group.add(_Member(names[target], 0 if outward else 1))
            touching = [other for other in groups if other & group]
            groups = [other for other in groups if not other & group]
            groups.append(group.union(*touching))
    return groups


def _architecture(
    model: PreTrainedModel, config: PretrainedConfig, layers: int, like: Architecture | None = None
) -> Architecture:
    """The table at the sizes of `model`'s config; groups come from tracing, or from `like` when that is given."""
    prefix = layers_prefix(model)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    inner = {n.removeprefix(f"{prefix}.0."): m for n, m in linears.items() if n.startswith(f"{prefix}.0.")}
    roles = _roles(model, prefix) if like is None else {p.name: (p.unit, p.axis) for p in like.projections}
    if set(roles) != set(inner):
        odd = sorted(set(inner) ^ set(roles))
        raise UnsupportedModelError(f"{config.model_type}: no rule for the projection '{odd[0]}'.", fix=_FIX)
    projections = []
    for name, linear in inner.items():
        unit, axis = roles[name]
        size = linear.out_features if axis == 0 else linear.in_features
        cuts = _slabs(config, unit, size)
        if cuts is None:
            raise UnsupportedModelError(
                f"{config.model_type}: '{name}' has {size} {'rows' if axis == 0 else 'columns'}, "
                f"which is no whole number of {unit} units.",
                fix=_FIX,
            )
        bias = linear.bias is not None
        projections.append(Projection(name, linear.out_features, linear.in_features, bias, axis, cuts))
    names = {module: name for name, module in model.named_modules()}
    return Architecture(
        model_type=config.model_type,
        layers=layers,
        layers_prefix=prefix,
        kv_groups=kv_heads(config),
        neurons=config.intermediate_size,
        query_heads_per_group=query_heads_per_group(config),
        embedding=names[model.get_input_embeddings()],
        head=names[model.get_output_embeddings()],
        projections=tuple(projections),
    )


def layers_prefix(model: PreTrainedModel) -> str:
    """The name of the list of decoder layers, `model.layers`; UnsupportedModelError if it is not clear."""
    found = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == _depth(model)]
    if len(found) != 1:
        raise UnsupportedModelError(f"{model.config.model_type}: decoder layers not found ({found}).", fix=_FIX)
    return found[0]


def _depth(model: PreTrainedModel) -> int:
    return int(model.config.num_hidden_layers)


def _roles(model: PreTrainedModel, prefix: str) -> dict[str, tuple[Unit, Literal[0, 1]]]:
    """Projection name → unit and cut axis, from the groups that stay inside layer 0."""
    first = f"{prefix}.0."
    roles: dict[str, tuple[Unit, Literal[0, 1]]] = {}
    for group in _coupled_groups(model):
        if not all(member.module.startswith(first) for member in group):
            continue  # the residual stream
        outputs = sorted(member.module for member in group if member.axis == 1)
        if len(outputs) != 1:
            members = sorted(member.module.removeprefix(first) for member in group)
            raise UnsupportedModelError(
                f"{model.config.model_type}: the group {members} has {len(outputs)} output projections, expected one.",
                fix=_FIX,
            )
        width = model.get_submodule(outputs[0]).in_features
        unit: Unit = "neuron" if width == model.config.intermediate_size else "kv_group"
        for member in group:
            roles[member.module.removeprefix(first)] = (unit, member.axis)
    return roles


def _slabs(config: PretrainedConfig, unit: Unit, size: Any) -> tuple[Cut, ...] | None:
    """The units along an axis of `size`: one slab, or several end to end where projections are fused."""
    if unit == "neuron":
        extents = [1] * (size // config.intermediate_size)
    else:
        key = head_dim(config)
        query = key * query_heads_per_group(config)
        layouts = {kv_heads(config) * sum(layout): layout for layout in ([key], [query], [query, key, key])}
        extents = layouts.get(size, [])
    count = config.intermediate_size if unit == "neuron" else kv_heads(config)
    if not extents or sum(extents) * count != size:
        return None
    offsets = [count * sum(extents[:i]) for i in range(len(extents))]
    return tuple(Cut(unit, offset, extent) for offset, extent in zip(offsets, extents, strict=True))
