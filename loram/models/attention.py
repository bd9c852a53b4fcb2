"""Attention of packed rows, document by document: nothing is computed between examples that must not see each other.

transformers describes a mask as a function of (row, head, query, key). For packed rows it says that documents are
causal and blind to one another; a mask of T² entries and products with it are then mostly zeros. Here that function
is asked at the few places that settle the matter, and attention runs over each document alone: causal, without a mask.
On a CUDA device in 16 bits one kernel takes all documents (FlashAttention's variable lengths); elsewhere fused
attention runs once a document. What is anything else (a window shorter than a document, padding, a cache) gets
transformers' ordinary mask and fused attention.

Shape suffixes: B rows, T tokens of a row, N = B·T tokens of all rows, Q query heads, G key-value heads, D head size.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

_NAME = "by_document"
# FlashAttention's largest head.
_LARGEST_HEAD = 256


@dataclass(frozen=True)
class Documents:
    """What layers get instead of a mask.

    `lengths`: tokens of each document, rows laid end to end. `bounds`: where they begin, and N; int32, on the device.
    """

    lengths: tuple[int, ...]
    bounds: torch.Tensor


def attend_by_document(model: PreTrainedModel) -> None:
    """Makes a model of transformers attend so, if it runs fused attention and hands masks to it untouched."""
    source = inspect.getsource(inspect.getmodule(type(model.base_model)))  # type: ignore[arg-type]
    if not model._can_set_attn_implementation() or re.search(r"(attention|causal)_mask(\[|\.\w)", source):
        return
    for module in model.modules():  # pruned layers have configs of their own
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig) and config._attn_implementation == "sdpa":
            config._attn_implementation = _NAME


def documents_or_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Documents | torch.Tensor | None:
    """A mask interface of transformers: documents where that is all the mask says, else what fused attention takes."""
    packed = not allow_is_causal_skip and attention_mask is None and not use_vmap and q_length == kv_length > 1
    if packed and isinstance(q_offset, int) and q_offset == kv_offset == 0:
        documents = _documents(batch_size, q_length, mask_function, torch.device(device))
        if documents is not None:
            return documents
    mask: torch.Tensor | None = sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
        allow_is_causal_skip=allow_is_causal_skip, use_vmap=use_vmap, device=device, **options,
    )  # fmt: skip
    return mask


def _documents(rows: int, length: int, allowed: Callable[..., torch.Tensor], device: torch.device) -> Documents | None:
    """Where documents begin, if within each the mask is causal and nothing less.

    A token begins one if it does not see the token before it. Masks made of causal, window and document rules are
    causal within a document when its last token sees its first one, and no token sees the one behind it.
    """
    row_B1 = torch.arange(rows, device=device)[:, None]
    head = torch.zeros((), dtype=torch.int64, device=device)
    query = torch.arange(1, length, device=device)[None]
    begins_BT = torch.ones(rows, length, dtype=torch.bool, device=device)
    begins_BT[:, 1:] = ~allowed(row_B1, head, query, query - 1)
    behind = allowed(row_B1, head, query - 1, query)
    starts = begins_BT.flatten().nonzero().flatten()
    bounds = torch.cat([starts, starts.new_tensor([rows * length])])
    row, last = starts // length, (bounds[1:] - 1) % length
    whole = allowed(row, head, last, starts % length)
    if not bool(whole.all() & ~behind.any()):
        return None
    return Documents(tuple(bounds.diff().tolist()), bounds.int())


def attention_by_document(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Documents | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention interface of transformers: query [B, Q, T, D], key and value [B, G, T, D] to [B, T, Q, D]."""
    if not isinstance(attention_mask, Documents):
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return found
    rows, _, tokens, _ = query.shape
    q_NQD, k_NGD, v_NGD = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    if _one_kernel(q_NQD, v_NGD, dropout):
        out_NQD = _flash(q_NQD, k_NGD, v_NGD, attention_mask, scaling)
    else:
        lengths = list(attention_mask.lengths)
        pieces = zip(q_NQD.split(lengths), k_NGD.split(lengths), v_NGD.split(lengths), strict=True)
        out_NQD = torch.cat([_causal(q, k, v, dropout, scaling) for q, k, v in pieces])
    return out_NQD.unflatten(0, (rows, tokens)), None


def _one_kernel(query: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    """Whether FlashAttention's kernel for variable lengths takes it."""
    if not query.is_cuda or dropout or torch.version.hip is not None or _kernel() is None:
        return False
    size = query.shape[-1]
    fits = query.dtype in (torch.bfloat16, torch.float16) and size == value.shape[-1] <= _LARGEST_HEAD and size % 8 == 0
    return fits and torch.cuda.get_device_capability(query.device) >= (8, 0)


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    """The kernel, where torch is new enough to have it with grouped heads and windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"enable_gqa", "window_size"} <= inspect.signature(varlen_attn).parameters.keys() else None


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, scaling: float | None
) -> torch.Tensor:
    kernel = _kernel()
    assert kernel is not None
    longest = max(documents.lengths)
    out = kernel(
        query, key, value, documents.bounds, documents.bounds, longest, longest,
        scale=scaling, window_size=(-1, 0), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, scaling: float | None
) -> torch.Tensor:
    """One document, [T, heads, D] each."""
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    out = scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out[0].transpose(0, 1)


AttentionInterface.register(_NAME, attention_by_document)
AttentionMaskInterface.register(_NAME, documents_or_mask)
