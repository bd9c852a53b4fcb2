"""The loss of packed rows, with logits only where a label counts and never for the whole batch at once.

Shape suffixes: B rows, T tokens of a row, K positions with a label in some row, L labelled tokens, H hidden,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from loram.data.tokens import IGNORED
from loram.memory.resident import logit_rows

# What some models do to their logits after the head: config fields, and the values that mean nothing is done.
_AFTER_THE_HEAD = {"final_logit_softcapping": (None,), "logits_scaling": (None, 1, 1.0), "logit_scale": (None, 1, 1.0)}


def summed_nll(
    model: Callable[..., Any], batch: Mapping[str, torch.Tensor], owner: Any = None
) -> tuple[torch.Tensor, int]:
    """Total negative log-likelihood of the labelled tokens, in nats, and their number.

    Args:
        model: a causal LM of transformers, maybe wrapped by PEFT or an engine.
        batch: `input_ids`, `position_ids` and unshifted `labels`, each [B, T].
        owner: the causal LM whose head and config are meant, where `model` itself is something else that runs it.

    The head runs only on labelled tokens, some rows of logits at a time, and where gradients are wanted each chunk's
    are computed at once: logits [L, V] never exist as a whole. Models that change their logits after the head (a soft
    cap, a scale) get [B, K, V] instead.
    """
    owner = _unwrapped(model) if owner is None else owner
    labels_BT = batch["labels"][:, 1:]
    positions_K = (labels_BT != IGNORED).any(0).nonzero().flatten()
    targets_BK = labels_BT[:, positions_K]
    count = int((targets_BK != IGNORED).sum())

    def run() -> torch.Tensor:
        out: torch.Tensor = model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            use_cache=False,
            logits_to_keep=positions_K,
        ).logits
        return out

    if _changes_logits(owner.config):
        logits_BKV = run()
        nll = functional.cross_entropy(
            logits_BKV.flatten(0, 1).float(), targets_BK.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return nll, count
    with _head_gives_nll(owner.get_output_embeddings(), targets_BK):
        return run(), count


def _unwrapped(model: Any) -> Any:
    """The causal LM inside DistributedDataParallel and the like."""
    while not hasattr(model, "get_output_embeddings"):
        model = model.module
    return model


def _changes_logits(config: Any) -> bool:
    return any(getattr(config, name, None) not in harmless for name, harmless in _AFTER_THE_HEAD.items())


@contextmanager
def _head_gives_nll(head: Any, targets_BK: torch.Tensor) -> Iterator[None]:
    """Within it, the head returns the summed nll of its input instead of logits.

    So everything still happens inside the model's own forward, as engines that shard or wrap it expect.
    """
    before, forward = head.__dict__.get("forward"), head.forward

    def nll(hidden_BKH: torch.Tensor) -> torch.Tensor:
        counted_BK = targets_BK != IGNORED
        hidden_LH = hidden_BKH.flatten(0, 1) if bool(counted_BK.all()) else hidden_BKH[counted_BK]
        trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
        rows = logit_rows(head.out_features)
        total: torch.Tensor = _HeadLoss.apply(hidden_LH, targets_BK[counted_BK], forward, rows, *trained)
        return total

    head.forward = nll
    try:
        yield
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before


class _HeadLoss(torch.autograd.Function):
    """Σ nll of `forward(hidden)`; gradients are made on the way, a chunk at a time, while its logits are there."""

    @staticmethod
    def forward(
        context: Any,
        hidden_LH: torch.Tensor,
        targets_L: torch.Tensor,
        forward: Callable[[torch.Tensor], torch.Tensor],
        rows: int,
        *trained: torch.Tensor,
    ) -> torch.Tensor:
        wanted = any(context.needs_input_grad)
        total = torch.zeros((), device=hidden_LH.device)
        grads = [torch.zeros_like(tensor) for tensor in (hidden_LH, *trained)] if wanted else []
        for start in range(0, len(hidden_LH), rows):
            chunk = slice(start, start + rows)
            hidden_CH = hidden_LH[chunk].detach().requires_grad_(wanted)
            with torch.set_grad_enabled(wanted):
                logits_CV = forward(hidden_CH)
            log_p_CV = logits_CV.detach().float().log_softmax(-1)
            targets_C1 = targets_L[chunk, None]
            total -= log_p_CV.gather(1, targets_C1).sum()
            if wanted:
                grad_CV = log_p_CV.exp_()  # of a token's nll by its logits: p, less 1 at the target
                grad_CV.scatter_add_(1, targets_C1, torch.full_like(targets_C1, -1, dtype=grad_CV.dtype))
                found = torch.autograd.grad(logits_CV, [hidden_CH, *trained], grad_CV.to(logits_CV.dtype))
                grads[0][chunk] = found[0]
                for whole, part in zip(grads[1:], found[1:], strict=True):
                    whole += part
            del logits_CV, log_p_CV
        context.save_for_backward(*grads)
        return total

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = gradients
        hidden, *trained = (grad * scale for grad in context.saved_tensors)
        return hidden, None, None, None, *trained
