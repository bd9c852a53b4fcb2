"""The GPU script's logic at tiny shapes on the CPU: what it builds, trains and predicts fits together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from loram.memory.training import TrainingSetup
from loram.models.discover import discover
from loram.models.shape import Widths
from loram.models.tables import known_shape
from tests.conftest import TINY
from tests.gpu import memory

SETUP = TrainingSetup(batch=1, length=16, lora_head=True, device="cpu")


@pytest.mark.parametrize("quantize_embeddings", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_built_in_place_trained_and_its_weights_predicted(tied: bool, quantize_embeddings: bool) -> None:
    config: dict[str, Any] = TINY | {"num_hidden_layers": 8, "intermediate_size": 128, "tie_word_embeddings": tied}
    config["hidden_size"] = 72  # no multiple of a block of the 4-bit format
    setup = replace(SETUP, quantize_embeddings=quantize_embeddings, lora_head=not tied)
    result = memory.measure("tiny", config, 0.5, setup, torch.device("cpu"))
    assert result.measured_weights == result.predicted_weights
    shape = known_shape(config)
    assert shape is not None
    assert result.parameters < shape.parameters()
    assert result.losses[-1] < result.losses[0]


def test_the_headline_is_the_published_model() -> None:
    name, config, ratio, setup = memory.cases()[-1]
    shape = known_shape(config)
    assert shape is not None
    assert "70B" in name
    assert shape.parameters(memory.cut(shape, ratio)) == 16_272_924_672
    assert (setup.batch, setup.length, setup.lora_r, setup.quantizer) == (1, 512, 8, "nf4")


def test_cut_widths_are_those_of_the_geometry() -> None:
    config = TINY | {"num_hidden_layers": 8}
    shape = known_shape(config)
    assert shape is not None
    widths = memory.cut(shape, 0.5)
    assert widths.kv_groups == (2, 2, 2, 2, 1, 1, 2, 2)
    assert widths.neurons == (48, 48, 48, 48, 24, 24, 48, 48)
    assert memory.cut(shape, 0.0) == Widths.whole(discover_of(config))


def discover_of(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return discover(AutoConfig.for_model(**config))
