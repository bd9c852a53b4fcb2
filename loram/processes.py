"""Several processes of one training run, as torchrun and accelerate start them: who writes, and who waits for whom.

The first process alone has the artifact store's draft and writes; the others run the same code into a folder that is
thrown away. What one process does before all must be done by all before any goes on: `first`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from loram.memory.devices import Sharding


def count() -> int:
    """Processes of this run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def sharing() -> tuple[int, Sharding]:
    """How many processes share a model, and how, for the memory of one: DeepSpeed's shards are counted as whole."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        return 1, "ddp"
    return count(), "fsdp" if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" else "ddp"


def on_this_machine() -> int:
    """Processes of this run that have the host's memory together."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rank() -> int:
    """Of this process among them, from 0."""
    return int(os.environ.get("RANK", "0"))


def is_writer() -> bool:
    """Whether this process writes artifacts, checkpoints and messages."""
    return rank() == 0


def join() -> None:
    """Meets the other processes and takes this one's device; nothing where there is only one."""
    if count() > 1:
        import torch
        from accelerate import PartialState

        PartialState(cpu=not torch.cuda.is_available())


def wait() -> None:
    """Waits until every process is here."""
    if count() > 1:
        from accelerate import PartialState

        PartialState().wait_for_everyone()


@contextmanager
def first() -> Iterator[None]:
    """The block runs in the first process, then in the others."""
    if not is_writer():
        wait()
    yield
    if is_writer():
        wait()


def totals(values: dict[str, int]) -> dict[str, int]:
    """The sums of some numbers over all processes."""
    if count() == 1:
        return values
    import torch
    from accelerate import PartialState
    from accelerate.utils import reduce

    numbers = torch.tensor(list(values.values()), dtype=torch.int64, device=PartialState().device)
    return dict(zip(values, reduce(numbers, "sum").tolist(), strict=True))


def any_of(flag: bool) -> bool:
    """Whether it is so in any process."""
    return totals({"flag": int(flag)})["flag"] > 0


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """What of a model's parameters trains, by name, whole on the CPU where it is sharded; every process has to call."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            whole = parameter.detach()
            found[name] = whole.full_tensor().cpu() if hasattr(whole, "full_tensor") else whole
    return found
