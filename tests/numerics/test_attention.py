"""Attention document by document is what transformers computes with a mask, and never builds one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_overlay,
)

from loram.memory.tracker import LiveBytes
from loram.models import attention
from loram.models.attention import Documents, attend_by_document, documents_or_mask
from loram.models.discover import discover
from loram.models.loading import load_model
from loram.models.pruned import CONFIG_KEY, model_class
from loram.models.shape import Widths
from tests.conftest import TINY, make_model

LENGTHS = (5, 9, 1, 17)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "one head a group": {"num_key_value_heads": 4},
    "qwen3": {"model_type": "qwen3"},
    "qwen2 with biases": {"model_type": "qwen2"},
    "phi3, fused": {"model_type": "phi3"},
    "mistral, wide window": {"model_type": "mistral", "sliding_window": 17},
    "mistral, narrow window": {"model_type": "mistral", "sliding_window": 16},
    "gemma3, both kinds": {"model_type": "gemma3_text", "sliding_window": 4, "num_hidden_layers": 6},
    "gemma2, eager": {"model_type": "gemma2", "sliding_window": 4},
    "granite": {"model_type": "granite", "attention_multiplier": 0.3},
    "smollm3": {"model_type": "smollm3", "pad_token_id": 0},
}


def pair(**config: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same model twice in float64: as transformers runs it, and by document."""
    torch.manual_seed(0)
    made = AutoConfig.for_model(**{**TINY, **config})
    plain = AutoModelForCausalLM.from_config(made).double().eval()
    other = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TINY, **config})).double().eval()
    other.load_state_dict(plain.state_dict())
    attend_by_document(other)
    return plain, other


def packed(rows: int = 2) -> dict[str, torch.Tensor]:
    """Rows of documents of `LENGTHS`, in another order in each row."""
    orders = [LENGTHS[row:] + LENGTHS[:row] for row in range(rows)]
    places = torch.stack([torch.cat([torch.arange(length) for length in order]) for order in orders])
    ids = torch.randint(3, 272, places.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "position_ids": places}


@pytest.mark.parametrize("config", FAMILIES.values(), ids=list(FAMILIES))
@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recomputed"])
def test_outputs_and_gradients_are_those_of_a_masked_forward(config: dict[str, Any], recomputed: bool) -> None:
    plain, other = pair(**config)
    batch = packed()
    for model in (plain, other):
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        (model(**batch, use_cache=False).logits.tanh().sum()).backward()
    expected = dict(plain.named_parameters())
    with torch.no_grad():
        torch.testing.assert_close(
            other(**batch, use_cache=False).logits, plain(**batch, use_cache=False).logits, rtol=1e-9, atol=1e-9
        )
    for name, parameter in other.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=list(FAMILIES))
def test_no_mask_is_made_unless_a_document_exceeds_a_window(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = pair(**config)
    seen: list[bool] = []
    forward = attention.attention_by_document

    def spy(module: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(isinstance(args[3], Documents))
        return forward(module, *args, **kwargs)

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention._NAME, spy)
    model(**packed(), use_cache=False)
    window = config.get("sliding_window", 0)
    if config.get("model_type") == "gemma2":
        assert not seen, "a soft cap needs eager attention"
    elif config.get("model_type") == "gemma3_text":
        assert seen == [False] * 5 + [True]
    else:
        assert seen == [not window or window >= max(LENGTHS)] * 2


@st.composite
def packings(draw: st.DrawFn) -> list[list[int]]:
    """Lengths of the documents of some rows of one length."""
    length = draw(st.integers(2, 40))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        row: list[int] = []
        while sum(row) < length:
            row.append(draw(st.integers(1, length - sum(row))))
        rows.append(row)
    return rows


@settings(deadline=None)
@given(packings(), st.integers(1, 50))
def test_documents_are_found_or_the_mask_is_transformers(rows: list[list[int]], window: int) -> None:
    length = sum(rows[0])
    numbers = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows])
    rule = and_masks(sliding_window_overlay(window), causal_mask_function, packed_sequence_mask_function(numbers))
    options: dict[str, Any] = {"mask_function": rule, "allow_is_causal_skip": False, "local_size": window}
    found = documents_or_mask(len(rows), length, length, **options)
    dense = sdpa_mask(len(rows), length, length, **options)
    assert dense is not None
    if not isinstance(found, Documents):
        assert found is not None
        assert torch.equal(found, dense)
        assert window < max(map(max, rows))
        return
    rebuilt = torch.block_diag(*(torch.ones(n, n).tril() for n in found.lengths)).bool()
    blocks = [slice(row * length, (row + 1) * length) for row in range(len(rows))]
    assert torch.equal(torch.stack([rebuilt[block, block] for block in blocks])[:, None], dense)
    assert found.bounds.tolist() == [0, *torch.tensor(found.lengths).cumsum(0).tolist()]
    assert found.bounds.dtype == torch.int32
    assert window == 1 or window >= max(map(max, rows))  # seeing oneself alone is a document a token


def test_padding_caches_and_two_way_masks_are_left_to_transformers() -> None:
    plain, other = pair()
    ids = packed()["input_ids"]
    holes = torch.ones_like(ids)
    holes[0, :7] = 0
    with torch.no_grad():
        for options in ({"attention_mask": holes}, {}, {"attention_mask": torch.ones_like(ids)}):
            torch.testing.assert_close(other(ids, **options).logits, plain(ids, **options).logits, rtol=1e-9, atol=1e-9)
        generated = [
            model.generate(ids, attention_mask=holes, max_new_tokens=6, do_sample=False, pad_token_id=0)
            for model in (plain, other)
        ]
    assert torch.equal(*generated)

    def both_ways(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query // 4 == key // 4) & (batch >= 0)

    found = documents_or_mask(1, 8, 8, mask_function=both_ways, allow_is_causal_skip=False)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found[0, 0], torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)).bool())


def test_memory_of_long_rows_has_no_square_in_it(tmp_path: Path) -> None:
    make_model(tmp_path, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    model = load_model(tmp_path, torch.float32)
    tokens, document = 4096, 64
    places = (torch.arange(tokens) % document)[None]
    peaks = []
    for length in (tokens // 2, tokens):
        with LiveBytes() as live:
            model(torch.ones_like(places[:, :length]), position_ids=places[:, :length], logits_to_keep=1)
        peaks.append(live.peak)
    assert peaks[1] < 2.1 * peaks[0]
    assert peaks[1] < tokens**2, "less than a mask of one byte a pair"


def test_pruned_layers_attend_so_too(tmp_path: Path) -> None:
    config = AutoConfig.for_model(**TINY)
    architecture = discover(config)
    setattr(config, CONFIG_KEY, Widths(architecture, (2, 1), (48, 7)).to_config())
    model_class(config)(config).save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32)
    configs = {id(m.config): m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
    assert len(configs) > 1
    assert set(configs.values()) == {attention._NAME}
    model.save_pretrained(tmp_path / "again")
    assert attention._NAME not in (tmp_path / "again" / "config.json").read_text()


def test_the_cuda_kernel_is_called_as_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, other = pair()
    calls: list[torch.Tensor] = []

    def varlen_attn(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, bounds_k: torch.Tensor,
        max_q: int, max_k: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool,
    ) -> torch.Tensor:  # fmt: skip
        """What torch documents: [N, heads, D], causal within (-1, 0), documents between bounds; in plain products."""
        assert window_size == (-1, 0)
        assert enable_gqa
        assert bounds is bounds_k
        assert max_q == max_k == int(bounds.diff().max())
        calls.append(bounds)
        out = torch.empty_like(query)
        group = query.shape[1] // key.shape[1]
        for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            for head in range(query.shape[1]):
                scores = query[start:end, head] @ key[start:end, head // group].T * scale
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
                out[start:end, head] = scores.softmax(-1) @ value[start:end, head // group]
        return out

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "_one_kernel", lambda *_: True)
    batch = packed()
    with torch.no_grad():
        got, expected = other(**batch, use_cache=False).logits, plain(**batch, use_cache=False).logits
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    assert [bounds.tolist() for bounds in calls] == [[0, 5, 14, 15, 32, 41, 42, 59, 64]] * 2
