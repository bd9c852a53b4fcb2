"""transformers' Trainer, taking an optimizer step's rows as one batch that is cut into micro-batches here.

So which rows a step learns from, how many tokens the loss is divided by, and how many rows go through the model at once
are three separate things: the last can change in the middle of a run (out of memory) without touching the others.

Shape suffixes: R rows of a step, T tokens of a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from peft.optimizers import create_loraplus_optimizer
from torch import nn
from transformers import Trainer, default_data_collator

from loram import processes
from loram.data.tokens import IGNORED
from loram.errors import NoRoomError, RecipeError
from loram.progress import logger
from loram.recipe import TrainingSection, TrainSection
from loram.training.activations import offloaded
from loram.training.anchors import Anchors
from loram.training.loss import summed_nll
from loram.training.randomness import random_state, restore
from loram.training.steps import StepSampler

Batch = dict[str, torch.Tensor]


class _Shares(torch.utils.data.Dataset[Batch]):
    """Packed rows by number; `~number` is the row without a label, for a process whose share of a step is short."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Batch:
        if number >= 0:
            found: Batch = self._rows[number]
            return found | {"row": torch.tensor(number)}
        row = dict(self._rows[~number]) | {"row": torch.tensor(~number)}
        return row | {"labels": torch.full_like(row["labels"], IGNORED), "tokens": torch.zeros_like(row["tokens"])}


class StepTrainer(Trainer):
    """The Trainer with our steps and our loss.

    Args:
        steps: which rows each optimizer step takes.
        micro_batch: rows that go through the model at once; `auto_find_batch_size` may lower it.
        section: recipe settings.
        after_step: gets `loss`, `grad_norm` and `learning_rate` of each optimizer step.
        anchors: of the rows, if the model is anchored while it trains.
        options: the Trainer's own.
    """

    # The loss is divided by the labelled tokens of the whole step, so nothing is left to scale.
    loss_is_scaled_for_ga = True
    # The base class is untyped.
    optimizer: Any
    control: Any

    def __init__(
        self,
        *,
        steps: StepSampler,
        micro_batch: int,
        section: TrainingSection,
        after_step: Callable[[dict[str, float]], None],
        anchors: Anchors | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.model_accepts_loss_kwargs = True  # makes it count those tokens for us
        self.steps = steps
        self.micro_batch = micro_batch
        self.counts: dict[str, int] = {}
        self.began = time.perf_counter()
        self._at_once = micro_batch  # of the micro-batch at work; an epoch's last step may have fewer
        self._section = section
        self._after_step = after_step
        self._anchors = anchors

    def get_train_dataloader(self) -> Any:
        """Whole optimizer steps, or this process's share of each."""
        loader = torch.utils.data.DataLoader(
            _Shares(self.train_dataset),
            batch_sampler=self.steps,
            collate_fn=default_data_collator,
            pin_memory=self.args.dataloader_pin_memory,
        )
        # accelerate would deal whole steps out to the processes.
        alone = {"num_processes": 1, "process_index": 0, "put_on_device": True}
        return prepare_data_loader(loader, self.accelerator.device, **alone)

    def get_batch_samples(self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device) -> Any:
        """A step's time begins with getting its rows."""
        self.began = time.perf_counter()
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Gradients of the rows of an optimizer step; returns its loss.

        Raises:
            NoRoomError: out of memory, with nothing left to lower or leave to lower it.
        """
        tokens_R: list[int] = inputs["tokens"].tolist()
        state = random_state() if self._section.auto_find_batch_size else None
        while True:
            try:
                return self._accumulate(model, inputs, tokens_R, num_items_in_batch)
            except RuntimeError as error:
                if not should_reduce_batch_size(error):
                    raise
                reason = str(error)
            # Here the exception is gone, and with its frames the tensors that they held.
            self._lower_micro_batch(reason)
            model.zero_grad()
            restore(state)

    def _accumulate(
        self, model: nn.Module, inputs: Batch, tokens_R: list[int], num_items: torch.Tensor | int | None
    ) -> torch.Tensor:
        losses = []
        ends = len(tokens_R)
        for micro in self._micro_batches(inputs, tokens_R):
            ends -= self._at_once
            # Several processes exchange gradients once a step, with its last micro-batch.
            self.accelerator.gradient_state._set_sync_gradients(ends == 0)
            with self._anchored(micro), nullcontext() if ends == 0 else self.accelerator.no_sync(model):
                losses.append(super().training_step(model, micro, num_items))
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def _anchored(self, micro: Batch) -> AbstractContextManager[None]:
        if self._anchors is None:
            return nullcontext()
        return self._anchors.at(micro["row"].tolist(), micro["input_ids"].shape[1])

    def _micro_batches(self, inputs: Batch, tokens_R: list[int]) -> Iterator[Batch]:
        """A step's rows, `micro_batch` at a time and as long as the longest of them; counts begin anew."""
        self.counts = {
            "tokens": sum(tokens_R),
            "padding_tokens": 0,
            "loss_tokens": 0,
            "rows": sum(tokens > 0 for tokens in tokens_R),
        }
        for start in range(0, len(tokens_R), self.micro_batch):
            end = min(start + self.micro_batch, len(tokens_R))
            longest = max(1, *tokens_R[start:end])  # behind it, all is padding
            self.counts["padding_tokens"] += longest * (end - start) - sum(tokens_R[start:end])
            self._at_once = end - start
            yield {
                name: tensor[start:end, :longest] if tensor.dim() == 2 else tensor[start:end]
                for name, tensor in inputs.items()
            }

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """A micro-batch's share of the step's loss, in nats per labelled token of the step."""
        with offloaded(self._section):
            nll, count = summed_nll(model, inputs)
        self.counts["loss_tokens"] += count
        labelled = torch.as_tensor(count if num_items_in_batch is None else num_items_in_batch, device=nll.device)
        loss = nll / labelled.clamp(min=1)  # a step without a label has nothing to learn, and a loss of 0
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        return loss

    def _lower_micro_batch(self, reason: str) -> None:
        step, rows = self.state.global_step + 1, self._at_once
        if not self._section.auto_find_batch_size or rows == 1 or processes.count() > 1:
            fix = "Lower max_length or raise prune.ratio; `loram plan` says what fits."
            if rows > 1:
                fix = "Set auto_find_batch_size=true, or lower per_device_train_batch_size and raise accumulation."
            raise NoRoomError(f"Out of memory at step {step} with {rows} rows at once: {reason}", fix=fix)
        self.micro_batch = rows // 2
        logger.warning(
            "out of memory at step %d with %d rows at once: going on with %d, and the same rows a step",
            step, rows, self.micro_batch,
        )  # fmt: skip
        clear_device_cache(garbage_collection=True)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The recipe's optimizer, with PEFT's groups of learning rates for LoRA+.

        Raises:
            RecipeError: LoRA+ with an optimizer that makes its own groups.
        """
        ratio = self._section.loraplus_lr_ratio if isinstance(self._section, TrainSection) else None
        if ratio is None or self.optimizer is not None:
            return super().create_optimizer(model)
        kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        own_groups = {"params", "model", "optimizer_dict"} & options.keys()
        if own_groups or not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise RecipeError(
                f"loraplus_lr_ratio: optimizer '{self._section.optim}' makes its own groups of parameters.",
                fix="Use one of the AdamW family, or leave loraplus_lr_ratio out.",
            )
        decay = self.args.weight_decay
        self.optimizer = create_loraplus_optimizer(
            self.model, kind, loraplus_lr_ratio=ratio, loraplus_weight_decay=decay, **options
        )
        return self.optimizer

    def _run_epoch(self, **options: Any) -> None:
        """Takes no step in a run that was resumed at its end, or that an evaluation made up for ends."""
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(**options)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Each step's values go to `after_step`; the Trainer's own summary and growing list of them are left out."""
        self.control.should_log = False
        if "loss" in logs:
            self._after_step(logs)

    def report(self, values: dict[str, Any]) -> None:
        """Hands values to what `report_to` names."""
        self.control = self.callback_handler.on_log(
            self.args, self.state, self.control, values | {"epoch": self.state.epoch}
        )
