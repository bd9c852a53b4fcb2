"""The loss of packed rows, with logits only where a label counts.

Shape suffixes: B rows, T tokens of a row, K positions with a label in some row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from loram.data.encode import IGNORED


def summed_nll(model: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Total negative log-likelihood of the labelled tokens, in nats, and their number.

    Args:
        model: a causal LM of transformers, maybe wrapped by PEFT or an engine.
        batch: `input_ids`, `position_ids` and unshifted `labels`, each [B, T].

    The head runs only on the positions whose next token is labelled in some row, so logits are [B, K, V].
    """
    labels_BT = batch["labels"][:, 1:]
    positions_K = (labels_BT != IGNORED).any(0).nonzero().flatten()
    logits_BKV = model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        use_cache=False,
        logits_to_keep=positions_K,
    ).logits
    targets_BK = labels_BT[:, positions_K]
    nll = functional.cross_entropy(
        logits_BKV.flatten(0, 1).float(), targets_BK.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return nll, int((targets_BK != IGNORED).sum())
