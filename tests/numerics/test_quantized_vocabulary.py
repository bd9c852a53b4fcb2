"""Embedding and head in 4 bits: against bitsandbytes on the whole matrix, and through training and recovery."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional as bnb
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from loram.memory import resident
from loram.models.loading import Precision, load_model
from loram.models.vocabulary import QuantizedMatrix
from tests.conftest import make_model
from tests.faults.test_training import losses, rows, section
from tests.numerics.test_layerwise import packed_batches, whole


@settings(max_examples=30, deadline=None)
@given(
    rows_=st.integers(1, 70), columns=st.sampled_from([64, 128, 192, 576]), double_quant=st.booleans(),
    quantizer=st.sampled_from(["nf4", "fp4"]), data=st.data(),
)  # fmt: skip
def test_rows_are_those_of_the_whole_matrix_dequantized(
    rows_: int, columns: int, double_quant: bool, quantizer: str, data: st.DataObject
) -> None:
    weight = torch.randn((rows_, columns), generator=torch.Generator().manual_seed(rows_)) * 0.1
    packed, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=double_quant, quant_type=quantizer)
    expected = bnb.dequantize_4bit(packed, state)
    matrix = QuantizedMatrix(weight, quantizer, double_quant)
    index = torch.tensor(data.draw(st.lists(st.integers(0, rows_ - 1), min_size=1, max_size=9)))
    torch.testing.assert_close(matrix.rows(index), expected[index], rtol=1e-6, atol=1e-8)
    start = data.draw(st.integers(0, rows_ - 1))
    torch.testing.assert_close(matrix.rows(slice(start, rows_)), expected[start:], rtol=1e-6, atol=1e-8)


def test_a_width_that_is_no_multiple_of_a_block_is_padded() -> None:
    weight = torch.randn(11, 50, generator=torch.Generator().manual_seed(0))
    found = QuantizedMatrix(weight, "nf4", True).rows(slice(None))
    assert found.shape == weight.shape
    assert float((found - weight).norm() / weight.norm()) < 0.12


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_computes_with_the_dequantized_matrices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    """Losses and gradients equal a model whose embedding and head hold the dequantized values; many chunks."""
    monkeypatch.setattr(resident, "CHUNK_BYTES", 64 * 4 * 50)  # 272 rows: six chunks
    base = make_model(tmp_path / "base", tie_word_embeddings=tied)
    model = load_model(base, Precision(torch.float32, "nf4", quantize_embeddings=True))
    reference: Any = load_model(base, Precision(torch.float32, "nf4"))
    with torch.no_grad():
        for module in [reference.get_input_embeddings(), *([] if tied else [reference.get_output_embeddings()])]:
            module.weight.copy_(QuantizedMatrix(module.weight, "nf4", True).rows(slice(None)))
    batch = packed_batches()[0]
    gradients = []
    for one in (model, reference):
        one.model.norm.weight.requires_grad_()
        gradients.append((whole(one, [batch], 1.0)[0], one.model.norm.weight.grad))
    assert gradients[0][0] == pytest.approx(gradients[1][0], rel=1e-6)
    torch.testing.assert_close(gradients[0][1], gradients[1][1], rtol=1e-5, atol=1e-6)
    assert len({id(m.matrix) for m in (model.get_input_embeddings(), model.get_output_embeddings())}) == 2 - tied


def test_an_embedding_that_scales_still_scales(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", model_type="gemma3_text", tie_word_embeddings=True)
    ids = torch.tensor([[5, 9, 5]])
    plain = load_model(base, torch.float32).get_input_embeddings()
    packed = load_model(base, Precision(torch.float32, "nf4", quantize_embeddings=True)).get_input_embeddings()
    expected = functional.embedding(ids, QuantizedMatrix(plain.weight, "nf4", True).rows(slice(None))) * 8.0
    torch.testing.assert_close(packed(ids), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_training_on_it_learns_and_its_adapter_is_whole(tmp_path: Path, tied: bool) -> None:
    from loram.adapter.attach import attach
    from loram.adapter.folder import Adapter
    from loram.models.discover import discover
    from loram.models.pruned import load_config
    from loram.training import loop

    base = make_model(tmp_path / "base", tie_word_embeddings=tied)
    options = section(max_steps=6, learning_rate=0.02, lora_lm_head=not tied, quantize_embeddings=True)
    model = load_model(base, Precision(torch.float32, "nf4", quantize_embeddings=True))
    adapted = attach(model, discover(load_config(base)), options)
    loop.train(adapted.train(), rows(), options, tmp_path, torch.float32)
    history = losses(tmp_path)
    assert history[-1] < history[0]
    adapted.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    with Adapter(tmp_path / "adapter") as adapter:
        adapter.require_trained()
        assert not adapter.saved
        assert ("lm_head" in adapter.modules) == (not tied)
        if not tied:
            assert bool(adapter.factors("lm_head")[1].any())
