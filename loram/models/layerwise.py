"""Running a model with one decoder layer in memory, forwards and backwards.

The model is built without weights; each layer gets its own from the checkpoint while every batch passes through it, and
gives them back. Everything between the layers (embedding scale, masks, rotary positions, final norm, soft caps) is
the model's own code: its `forward` runs as usual, only that layers other than the one at work let the hidden states
pass by. So whatever transformers class loads whole can run like this.

Backwards, the inputs of all layers are kept (on disk beyond a budget) and the layers visited in reverse, each computing
its forward again: the gradients are those of activation checkpointing at every layer. All batches share one pass over
the layers, so weights are read once per call, however many batches there are. Layers that `keep` has room for stay
once they were filled; the others' files are left to the system's cache.

Shape suffixes: B rows, T tokens, H hidden.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import nn

from loram.adapter.apply import attach_trained
from loram.checkpoint import CheckpointReader
from loram.errors import InputError, NoRoomError
from loram.memory.disk import free_disk
from loram.memory.spill import Spill
from loram.memory.units import size
from loram.models.discover import layers_prefix
from loram.models.loading import Precision, Slot, empty_model, place_buffers, slots
from loram.models.pruned import load_config
from loram.models.vocabulary import QuantizedMatrix
from loram.progress import bar
from loram.training.loss import summed_nll

Batch = Mapping[str, torch.Tensor]
# torch takes seeds below it.
_SEEDS = 1 << 64
# Called with a layer's number and module while it has its weights; the block surrounds the layer's work.
Observe = Callable[[int, nn.Module], contextlib.AbstractContextManager[Any]]


class _Reached(Exception):
    """Ends a forward at the layer at work; carries that layer's output."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value


class LayerwiseModel:
    """A causal LM whose decoder layers are in memory one at a time (two while the next one is read ahead).

    Args:
        folder: model folder, pruned or not.
        precision: dtype and quantization of the weights while they are in memory.
        memory: bytes of host memory for weights, hidden states and work; hidden states beyond it go to `scratch`.
        scratch: folder for them.
        adapter: PEFT adapter folder to apply; its own weights stay in memory.
        trains: which parameters get gradients in `backward`, by full name; none by default.
        keep: bytes of the device's memory for frozen weights that stay there from one call to the next.

    With an adapter and bfloat16, autocast is on, as where adapters are trained.

    Raises:
        CheckpointError: a tensor is missing or of another shape than the config says.
        NoRoomError: the largest layer (or the embedding, or the head) alone exceeds `memory`.
    """

    def __init__(
        self,
        folder: Path,
        precision: Precision,
        memory: int,
        scratch: Path,
        adapter: Path | None = None,
        trains: Callable[[str], bool] = lambda name: False,
        keep: int = 0,
    ) -> None:
        self._reader = CheckpointReader(folder)
        self._precision = precision
        self._scratch = scratch
        self._trains = trains
        self._room = keep
        self._kept: dict[int | str, list[_Held]] = {}
        self._autocast = adapter is not None and precision.dtype == torch.bfloat16
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = empty_model(load_config(folder), precision)
        if adapter is not None:
            attach_trained(self.model, adapter, self.device)
        self.model.eval()
        self._layers = list(self.model.get_submodule(layers_prefix(self.model)).children())
        self._embedding = self.model.get_input_embeddings()
        self._at = 0
        self._hidden: torch.Tensor | None = None
        # Called forwards with the number of a batch before it goes through the embedding, a layer or the head.
        self.before_batch: Callable[[int], None] = lambda number: None
        # Called forwards with layer, batch and hidden states after a layer; what it returns goes on.
        self.after_layer: Callable[[int, int, torch.Tensor], torch.Tensor] = lambda layer, number, hidden: hidden
        for number, layer in enumerate(self._layers):
            layer.forward = partial(self._station, number, layer.forward)
        head = self.model.get_output_embeddings()
        self._vocabulary = set(self._embedding.modules()) | set(head.modules())
        self._groups = self._grouped_slots()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(parameter.device.type != "meta" and trains(name))
        place_buffers(self.model, self._reader, self.device)
        heaviest = max(map(self._bytes, self._groups))
        if heaviest > memory:
            raise NoRoomError(
                f"{folder}: one layer at a time still needs {size(heaviest)}; --memory allows {size(memory)}.",
                fix="Allow more memory, or use a dtype of 16 bits.",
            )
        twice = 2 * max(self._bytes(layer) for layer in range(len(self._layers)))
        self._ahead = twice <= memory // 2
        self._spill = Spill(max(0, memory - max(heaviest, twice if self._ahead else 0)) // 2, scratch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._spill.close()
        self._reader.close()

    @property
    def spilled(self) -> int:
        """Bytes of hidden states that went to disk so far."""
        return self._spill.spilled

    @property
    def bytes_read(self) -> int:
        """Of weights, so far."""
        return self._reader.bytes_read

    # -- what it computes ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, batches: Sequence[Batch], observe: Observe | None = None, description: str = "layers") -> None:
        """Sends the batches through embedding and layers; `observe` sees each layer at work."""
        self._forward(batches, observe, keep=False, description=description)
        for number in range(len(batches)):
            self._spill.drop((len(self._layers), number))

    @torch.no_grad()
    def nll(self, batches: Sequence[Batch], description: str = "layers") -> list[tuple[float, int]]:
        """Negative log-likelihood of the labelled tokens of each batch, in nats, and their number."""
        self._forward(batches, None, keep=False, description=description)
        results = []
        with self._loaded("tail"):
            for number, batch in enumerate(batches):
                self.before_batch(number)
                hidden = self._spill.take((len(self._layers), number)).to(self.device)
                total, count = summed_nll(partial(self._tail, hidden), self._here(batch), self.model)
                results.append((float(total.detach()), count))
        return results

    def backward(
        self, batches: Sequence[Batch], scale: float, observe: Observe | None = None, description: str = "layers"
    ) -> list[tuple[float, int]]:
        """Adds the gradients of `scale · Σ nll` over all batches to the parameters chosen with `trains`.

        Gradients of a layer's own weights are in their `.grad` when the block of `observe` ends, and gone after it;
        those of an adapter stay. Of a tied matrix the two uses are apart: as head in the tail, as embedding at the end.

        Returns:
            nll and labelled tokens of each batch.
        """
        layers = len(self._layers)
        with torch.no_grad():
            self._forward(batches, None, keep=True, description=f"{description} forward")
        results = []
        with torch.enable_grad(), self._loaded("tail"), self._watch(observe, layers, self.model):
            for number, batch in enumerate(batches):
                hidden = self._spill.take((layers, number)).to(self.device).requires_grad_()
                total, count = summed_nll(partial(self._tail, hidden), self._here(batch), self.model)
                (total * scale).backward()
                self._spill.put((layers, number), _gradient(hidden))
                results.append((float(total.detach()), count))
        with torch.enable_grad(), bar(f"{description} backward", layers, "layers") as advance:
            for layer in self._visit(reversed(range(layers))):
                with self._watch(observe, layer, self._layers[layer]):
                    for number, batch in enumerate(batches):
                        hidden = self._spill.take((layer, number)).to(self.device).requires_grad_()
                        gradient = self._spill.take((layer + 1, number)).to(self.device)
                        self._layer(layer, number, batch, hidden).backward(gradient)
                        self._spill.put((layer, number), _gradient(hidden))
                advance(1)
        self._backward_embedding(batches, observe)
        return results

    # -- one step of it -----------------------------------------------------------------------------------------------

    def _forward(self, batches: Sequence[Batch], observe: Observe | None, keep: bool, description: str) -> None:
        self._require_disk(batches, keep)
        with self._loaded("embedding"):
            for number, batch in enumerate(batches):
                self.before_batch(number)
                self._spill.put((0, number), self._embed(batch))
        with bar(description, len(self._layers), "layers") as advance:
            for layer in self._visit(range(len(self._layers))):
                with self._watch(observe, layer, self._layers[layer]):
                    for number, batch in enumerate(batches):
                        self.before_batch(number)
                        fetch = self._spill.get if keep else self._spill.take
                        hidden = fetch((layer, number)).to(self.device)
                        hidden = self._layer(layer, number, batch, hidden)
                        self._spill.put((layer + 1, number), self.after_layer(layer, number, hidden))
                advance(1)

    def _require_disk(self, batches: Sequence[Batch], keep: bool) -> None:
        """Refuses hidden states that neither memory nor disk will hold (NoRoomError)."""
        tokens = sum(batch["input_ids"].numel() for batch in batches)
        layers = len(self._layers) + 1 if keep else 1
        hidden_size = self.model.config.get_text_config().hidden_size
        states = tokens * layers * hidden_size * self._precision.dtype.itemsize
        free = free_disk(self._scratch)
        if states > self._spill.budget + free:
            raise NoRoomError(
                f"Hidden states of {tokens:,} tokens take {size(states)}: {size(self._spill.budget)} of memory are for "
                f"them, and {size(free)} are free in {self._scratch}.",
                fix="Take fewer or shorter rows, free some disk, or allow more memory with --memory.",
            )

    def _embed(self, batch: Batch) -> torch.Tensor:
        """Hidden states that enter the first layer."""
        self._at, self._hidden = 0, None
        return self._until_reached(input_ids=batch["input_ids"].to(self.device), batch=batch)

    def _layer(self, layer: int, number: int, batch: Batch, hidden_BTH: torch.Tensor) -> torch.Tensor:
        self._at, self._hidden = layer, hidden_BTH
        with self._same_dropout(layer, number):
            return self._until_reached(inputs_embeds=hidden_BTH.detach(), batch=batch)

    def _until_reached(self, batch: Batch, **inputs: torch.Tensor) -> torch.Tensor:
        try:
            with self._precisely():
                self.model(**inputs, position_ids=batch["position_ids"].to(self.device), use_cache=False)
        except _Reached as reached:
            return reached.value
        raise InputError("The model's forward did not come to its decoder layers.")

    def _tail(self, hidden_BTH: torch.Tensor, **arguments: Any) -> Any:
        """Final norm and head on the last layer's output; takes the arguments of a whole forward."""
        self._at, self._hidden = len(self._layers), hidden_BTH
        arguments.pop("input_ids")
        with self._precisely():
            return SimpleNamespace(logits=self.model(inputs_embeds=hidden_BTH.detach(), **arguments).logits)

    def _precisely(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast)

    def _station(
        self, number: int, forward: Callable[..., Any], passing: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Stands in for layer `number`'s forward."""
        if number == self._at:
            if self._hidden is None:
                raise _Reached(passing)
            out = forward(self._hidden, *args, **kwargs)
            raise _Reached(out[0] if isinstance(out, tuple) else out)
        last = number == len(self._layers) - 1
        return self._hidden if last and self._hidden is not None else passing

    def _backward_embedding(self, batches: Sequence[Batch], observe: Observe | None) -> None:
        """Of what the embedding trains, if anything."""
        if not any(self._trains(slot.full_name) for slot in self._groups["embedding"]) and not any(
            parameter.requires_grad for parameter in self._embedding.parameters()
        ):
            for number in range(len(batches)):
                self._spill.drop((0, number))
            return
        with torch.enable_grad(), self._loaded("embedding"), self._watch(observe, -1, self._embedding):
            for number, batch in enumerate(batches):
                self._embed(batch).backward(self._spill.take((0, number)).to(self.device))

    @contextlib.contextmanager
    def _same_dropout(self, layer: int, number: int) -> Iterator[None]:
        """In training, the same dropout masks whenever a batch passes a layer, so that recomputing is exact."""
        if not self.model.training:
            yield
            return
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(((self.seed * 1_000_003 + layer) * 1_000_003 + number) % _SEEDS)
            yield

    seed = 0
    """Of dropout in training mode; another one for each optimizer step."""

    # -- weights ------------------------------------------------------------------------------------------------------

    def _grouped_slots(self) -> dict[int | str, list[Slot]]:
        """Every parameter to be filled, by layer number, `embedding` or `tail` (all the rest)."""
        embedding = set(self._embedding.modules())
        layer_of = {module: i for i, layer in enumerate(self._layers) for module in layer.modules()}
        groups: dict[int | str, list[Slot]] = {i: [] for i in range(len(self._layers))}
        groups |= {"embedding": [], "tail": []}
        for slot in slots(self.model, self._reader):
            groups[layer_of.get(slot.module, "embedding" if slot.module in embedding else "tail")].append(slot)
        return groups

    def _bytes(self, group: int | str) -> int:
        """Of a group's weights while they are read, before anything is quantized."""
        infos = [self._reader.info(slot.source) for slot in self._groups[group]]
        return sum(math.prod(info.shape) for info in infos) * self._precision.dtype.itemsize

    def _fetch(self, group: int | str) -> list[torch.Tensor]:
        """A group's tensors as stored. Only file reads: torch's threads would slow down the layer at work."""
        return [self._reader.read(slot.source) for slot in self._groups[group]]

    def _fill(self, group: int | str, stored: list[torch.Tensor]) -> None:
        """Puts the weights of a group on the device, in the precision they compute in."""
        for slot in self._groups[group]:
            weight = stored.pop(0).to(self.device, self._precision.dtype)
            if self._precision.quantize_embeddings and slot.module in self._vocabulary and weight.dim() == 2:
                # held dequantized: the same numbers, while they are used
                matrix = QuantizedMatrix(weight, self._precision.quantizer, self._precision.double_quant)
                weight = matrix.rows(slice(None))
            slot.fill(weight, requires_grad=self._trains(slot.full_name))

    @contextlib.contextmanager
    def _loaded(self, group: int | str, stored: list[torch.Tensor] | None = None) -> Iterator[None]:
        modules = [slot.module for slot in self._groups[group]]
        before = _held(modules)
        if group in self._kept:
            _put_back(self._kept[group])
        else:
            self._fill(group, stored or self._fetch(group))
            self._keep(group, modules)
        try:
            yield
        finally:
            _put_back(before)

    def _keep(self, group: int | str, modules: list[nn.Module]) -> None:
        """Remembers the weights of a group that was filled, where there is room and none of them train."""
        if any(self._trains(slot.full_name) for slot in self._groups[group]):
            return
        filled = _held(modules)
        tensors = [t for _, parameters, buffers in filled for t in (*parameters.values(), *buffers.values())]
        taken = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        if taken <= self._room:
            self._room -= taken
            self._kept[group] = filled

    def _visit(self, order: Iterator[int] | range) -> Iterator[int]:
        """Each layer in turn with its weights; where memory allows, the next one is read meanwhile."""
        numbers = list(order)
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(1, "loram-layer")) if self._ahead else None

            def reading(layer: int) -> Future[list[torch.Tensor]] | None:
                return None if pool is None or layer in self._kept else pool.submit(self._fetch, layer)

            coming = reading(numbers[0])
            for layer, following in zip(numbers, [*numbers[1:], None], strict=True):
                stored = None if coming is None else coming.result()
                coming = None if following is None else reading(following)
                with self._loaded(layer, stored):
                    yield layer

    def _watch(self, observe: Observe | None, number: int, module: nn.Module) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if observe is None else observe(number, module)

    def _here(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self.device) for name, tensor in batch.items()}


def _gradient(hidden: torch.Tensor) -> torch.Tensor:
    assert hidden.grad is not None
    return hidden.grad


# A module with what it holds by itself: parameters and buffers.
_Held = tuple[nn.Module, dict[str, nn.Parameter | None], dict[str, torch.Tensor | None]]


def _held(modules: list[nn.Module]) -> list[_Held]:
    return [(module, dict(module._parameters), dict(module._buffers)) for module in dict.fromkeys(modules)]


def _put_back(held: list[_Held]) -> None:
    for module, parameters, buffers in held:
        module._parameters, module._buffers = dict(parameters), dict(buffers)
