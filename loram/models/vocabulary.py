"""Embedding and head in the 4-bit format of the linears: one matrix, looked up by rows and multiplied by chunks.

bitsandbytes would dequantize a whole head at once (2 GB for 128,256 × 8,192 in 16 bits), has no embedding with
double quantization, and cannot tie the two. Here a matrix is stored once, in bitsandbytes' own format and with its
kernels, and only the rows at work are ever dequantized.

Shape suffixes: V rows (vocabulary), H columns (hidden), N rows looked up.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from loram.memory.formats import NESTED_BLOCK
from loram.memory.resident import chunk_rows, padded
from loram.models.quantizers import Blockwise4, frozen_linear


class QuantizedMatrix(nn.Module):
    """A frozen matrix w_VH in NF4 or FP4.

    Rows are padded with zeros to a multiple of 64 columns, so that no block of constants spans two rows.
    """

    def __init__(self, weight_VH: torch.Tensor, quantizer: str, double_quant: bool) -> None:
        super().__init__()
        self.rows_, self.columns = weight_VH.shape
        self.dtype = weight_VH.dtype
        self.quantizer = Blockwise4(quantizer, double_quant)
        tensors = self.quantizer.pack(functional.pad(weight_VH.detach(), (0, padded(self.columns) - self.columns)))
        tensors["packed"] = tensors.pop("weight").view(self.rows_, -1)
        tensors["absmax"] = tensors["absmax"].view(self.rows_, -1)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    def rows(self, index_N: torch.Tensor | slice) -> torch.Tensor:
        """Dequantized rows [N, H] in the dtype of the matrix that was quantized."""
        packed = self.get_buffer("packed")[index_N].contiguous()
        absmax = self.get_buffer("absmax")[index_N].contiguous()
        if self.quantizer.double_quant:
            absmax = self._constants(absmax, index_N)
        values = self.quantizer.values(packed.view(-1, 1), absmax.view(-1), self.get_buffer("code"), self.dtype)
        return values.view(len(packed), -1)[:, : self.columns]

    def _constants(self, absmax_NC: torch.Tensor, index_N: torch.Tensor | slice) -> torch.Tensor:
        """Float32 constants of the first level from their 8-bit form."""
        per_row = absmax_NC.shape[1]
        device = absmax_NC.device
        rows_N = torch.arange(self.rows_, device=device)[index_N]
        place_NC = rows_N[:, None] * per_row + torch.arange(per_row, device=device)
        scale_NC = self.get_buffer("absmax2")[place_NC // NESTED_BLOCK]
        return self.get_buffer("code2")[absmax_NC.int()] * scale_NC + self.get_buffer("offset")


class QuantizedEmbedding(nn.Module):
    """Looks ids up in a quantized matrix with the model's own embedding module (some scale what they find)."""

    def __init__(self, own: nn.Embedding, matrix: QuantizedMatrix) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = own.num_embeddings, own.embedding_dim
        self.matrix = matrix
        self._lookup = copy.copy(own)
        self._lookup._parameters = {"weight": None}
        self._lookup.padding_idx = None  # matters to gradients only, and need not be among the rows at work

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of `ids`; only their rows are dequantized."""
        used, where = torch.unique(ids, return_inverse=True)
        found: torch.Tensor = torch.func.functional_call(self._lookup, {"weight": self.matrix.rows(used)}, (where,))
        return found


class QuantizedHead(nn.Linear):
    """x·Wᵀ with a quantized W, a chunk of rows at a time."""

    def __init__(self, own: nn.Linear, matrix: QuantizedMatrix) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = own.in_features, own.out_features
        self.matrix = matrix
        self.register_parameter("bias", own.bias)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The packed bytes: tells the device, and that it is quantized."""
        return self.matrix.get_buffer("packed")

    def blocks(self, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
        """The weight a few rows at a time, dequantized."""
        matrix = self.matrix
        step = chunk_rows(matrix.columns, matrix.dtype.itemsize)
        for start in range(0, matrix.rows_, step):
            chunk = slice(start, min(start + step, matrix.rows_))
            yield chunk, matrix.rows(chunk).to(dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Logits [..., V]."""
        return frozen_linear(input, self)


def quantize_vocabulary(model: Any, quantizer: str, double_quant: bool) -> None:
    """Replaces embedding and head of a loaded model by their 4-bit forms; a tied matrix is stored once."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding.weight is head.weight
    matrix = QuantizedMatrix(embedding.weight, quantizer, double_quant)
    model.set_input_embeddings(QuantizedEmbedding(embedding, matrix))
    other = matrix if tied else QuantizedMatrix(head.weight, quantizer, double_quant)
    model.set_output_embeddings(QuantizedHead(head, other))
