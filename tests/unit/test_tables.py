"""The table of known model types says what tracing says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from loram.errors import UnsupportedModelError
from loram.models.discover import traced_shape
from loram.models.shape import ModelShape
from loram.models.tables import known_shape
from loram.recipe import load_recipe
from tests.conftest import ROOT

TYPES = [
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "granite", "smollm3",
]  # fmt: skip

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 272,
    "pad_token_id": 0,
}
# Each differs from transformers' defaults in something else; together they turn every switch both ways.
GEOMETRIES: dict[str, dict[str, Any]] = {
    "as many KV heads": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "own head_dim, all biases": {
        "head_dim": 24, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
    },
    "one KV head, many layers": {"num_key_value_heads": 1, "num_hidden_layers": 41, "attention_bias": True},
    "FFN biases only": {"mlp_bias": True, "num_attention_heads": 8, "pad_token_id": None},
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Skeletons are too small to share: on a busy machine two threads wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def traced(config: dict[str, Any]) -> ModelShape:
    return traced_shape(AutoConfig.for_model(**config))


@pytest.mark.parametrize("model_type", TYPES)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    assert known_shape({"model_type": model_type}) == traced({"model_type": model_type})


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=list(GEOMETRIES))
@pytest.mark.parametrize("model_type", TYPES)
def test_table_equals_tracing(model_type: str, geometry: dict[str, Any]) -> None:
    config = {"model_type": model_type, **SMALL, **geometry}
    assert known_shape(config) == traced(config)


WINDOWS: list[dict[str, Any]] = [
    {"sliding_window": 8},
    {"sliding_window": None},
    {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
    {"sliding_window": 8, "sliding_window_pattern": 3},
]


@pytest.mark.parametrize("window", WINDOWS, ids=[", ".join(window) for window in WINDOWS])
@pytest.mark.parametrize("model_type", TYPES)
def test_windows_are_those_of_the_model(model_type: str, window: dict[str, Any]) -> None:
    config = {"model_type": model_type, **SMALL, "num_hidden_layers": 4, **window}
    if model_type in ("gemma2", "gemma3_text") and window["sliding_window"] is None:
        assert known_shape(config).windows == ()  # type: ignore[union-attr]  # transformers builds no such model
        return
    if model_type == "mistral":
        config.pop("layer_types", None)  # it has none, and warns
    shape = known_shape(config)
    if shape is None:
        assert (model_type, window.get("use_sliding_window")) == ("smollm3", True)
        return
    assert shape == traced(config)
    if model_type in ("mistral", "phi3"):
        assert shape.windows == ((8,) * 4 if window["sliding_window"] else ())


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    groups, heads_per_group = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    heads = groups * heads_per_group
    config: dict[str, Any] = {
        **SMALL,
        "model_type": draw(st.sampled_from(TYPES)),
        "num_key_value_heads": groups,
        "num_attention_heads": heads,
        "hidden_size": heads * 2 * draw(st.integers(2, 9)),
        "intermediate_size": draw(st.integers(1, 99)),
        "num_hidden_layers": draw(st.integers(2, 6)),
        "vocab_size": draw(st.integers(10, 500)),
    }
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        config |= draw(st.sampled_from([{}, {key: True}, {key: False}]))
    return config | draw(st.sampled_from([{}, {"head_dim": 8}, {"head_dim": 40}]))


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(config=configs())
def test_table_equals_tracing_anywhere(config: dict[str, Any]) -> None:
    assert known_shape(config) == traced(config)


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=list(GEOMETRIES))
@pytest.mark.parametrize("model_type", TYPES)
def test_config_json_as_transformers_writes_it(model_type: str, geometry: dict[str, Any]) -> None:
    raw = {"model_type": model_type, **SMALL, **geometry}
    config = AutoConfig.for_model(**raw)
    expected = known_shape(raw)  # which is what tracing says: the test above
    assert expected is not None
    assert known_shape(json.loads(json.dumps(config.to_dict(), default=str))) == expected
    assert known_shape(json.loads(config.to_json_string())) == expected, "only what differs from the defaults"


@pytest.mark.parametrize("model_type", [t for t in TYPES if t not in {"mistral", "gemma", "gemma2", "gemma3_text"}])
def test_null_kv_heads_are_the_query_heads(model_type: str) -> None:
    config = {"model_type": model_type, **SMALL, "num_key_value_heads": None}
    shape = known_shape(config)
    assert shape is not None
    assert shape.architecture.kv_groups == 4
    assert shape == traced(config)


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_null_head_dim_follows_from_the_hidden_size(model_type: str) -> None:
    config = {"model_type": model_type, **SMALL, "head_dim": None}
    shape = known_shape(config)
    assert shape is not None
    assert shape.head_dim == 16
    assert shape == traced(config)


def test_rope_factors_for_every_dimension_of_a_head_do_not_matter() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = {"model_type": "phi3", **SMALL, "rope_parameters": rope}
    assert known_shape(config) == traced(config)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    *((model_type, {"num_key_value_heads": 3}) for model_type in ("llama", "qwen3", "phi3")),
    *((model_type, {"head_dim": None}) for model_type in TYPES if model_type not in {"llama", "mistral"}),
    *((model_type, {"num_key_value_heads": None}) for model_type in ("mistral", "gemma", "gemma2", "gemma3_text")),
    *((model_type, {"hidden_size": 66}) for model_type in ("llama", "gemma2", "gemma3_text")),
    ("llama", {"num_attention_heads": 4, "num_key_value_heads": 8}),
    ("llama", {"head_dim": 15}),
    ("llama", {"hidden_size": "64"}),
    ("llama", {"tie_word_embeddings": None}),
    ("llama", {"attention_bias": None}),
    ("llama", {"pad_token_id": 272}),
    ("mistral", {"num_experts": 4}),
    ("phi3", {"pad_token_id": 32000}),
    ("smollm3", {"num_hidden_layers": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "change"), REFUSED)
def test_what_tracing_refuses_is_not_known(model_type: str, change: dict[str, Any]) -> None:
    config = {"model_type": model_type, **SMALL}
    assert known_shape(config) is not None
    assert known_shape(config | change) is None
    with pytest.raises((UnsupportedModelError, StrictDataclassError)):
        traced(config | change)


def test_left_to_tracing() -> None:
    assert known_shape({**SMALL}) is None
    assert known_shape({**SMALL, "model_type": "olmo2"}) is None
    assert known_shape({**SMALL, "model_type": "gemma3_text", "text_config": {**SMALL}}) is None
    layers = {"1": {"intermediate_size": 10}}
    assert known_shape({**SMALL, "model_type": "llama", "per_layer_config": layers}) is None
    assert known_shape({**SMALL, "model_type": "llama", "num_hidden_layers": 0}) is None
    assert known_shape({**SMALL, "model_type": "llama", "vocab_size": True}) is None


def test_the_mark_of_a_pruned_model_is_ignored() -> None:
    config = {"model_type": "llama", **SMALL}
    assert known_shape({**config, "loram": {"kv_groups": [1, 1, 1]}}) == known_shape(config) is not None


def test_a_type_without_a_table_is_traced() -> None:
    config = {"model_type": "starcoder2", **SMALL}
    assert known_shape(config) is None
    # LayerNorms: two vectors each, two norms a layer and one at the end.
    shape = traced(config)
    assert (shape.layer_norms, shape.final_norm) == (4 * 64, 2 * 64)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama-2-70b", 68_976_648_192), ("llama-3.1-70b", 70_553_706_496), ("llama-2-13b", 13_015_864_320)],
)
def test_published_totals(name: str, parameters: int) -> None:
    shape = known_shape(load_recipe(ROOT / "recipes" / f"{name}.yaml").model.config)
    assert shape is not None
    assert shape.parameters() == parameters


def test_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from loram.models.tables import known_shape;"
        "assert known_shape({'model_type': 'llama'}) is not None;"
        "print(sorted({'torch', 'transformers', 'loram.models.tables'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['loram.models.tables']"
