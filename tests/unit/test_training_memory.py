"""The computed memory of a training step: exact where it says so, near a real step elsewhere, and sane everywhere."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loram.memory.training import DoraExtra, TrainingMemory, TrainingSetup, dora_extra, training_memory
from loram.models.architecture import Architecture, Cut, Projection
from loram.models.shape import ModelShape, Widths
from tests.benchmarks.memory_predicted import GQA, QWEN3, SMALL, TINY, Case, run

HEAD = 16


def llama(hidden: int = 64, vocabulary: int = 512, groups: int = 4, query: int = 2, neurons: int = 96) -> ModelShape:
    """The shape of a three-layer Llama."""

    def slab(extent: int) -> tuple[Cut, ...]:
        return (Cut("kv_group", 0, extent),)

    rows, width = groups * HEAD, groups * query * HEAD
    neuron = (Cut("neuron", 0, 1),)
    projections = (
        Projection("self_attn.q_proj", width, hidden, False, 0, slab(query * HEAD)),
        Projection("self_attn.k_proj", rows, hidden, False, 0, slab(HEAD)),
        Projection("self_attn.v_proj", rows, hidden, False, 0, slab(HEAD)),
        Projection("self_attn.o_proj", hidden, width, False, 1, slab(query * HEAD)),
        Projection("mlp.gate_proj", neurons, hidden, False, 0, neuron),
        Projection("mlp.up_proj", neurons, hidden, False, 0, neuron),
        Projection("mlp.down_proj", hidden, neurons, False, 1, neuron),
    )
    architecture = Architecture(
        "llama", 3, "model.layers", groups, neurons, query, "model.embed_tokens", "lm_head", projections
    )
    return ModelShape(architecture, hidden, vocabulary, HEAD, False, 2 * hidden, hidden)


def memory(setup: TrainingSetup, shape: ModelShape | None = None, widths: Widths | None = None) -> TrainingMemory:
    shape = shape or llama()
    return training_memory(shape, widths or Widths.whole(shape.architecture), setup)


FLOAT = replace(SMALL, compute_bytes=4)
CASES = [
    Case("checkpointed", {**GQA, "num_hidden_layers": 2}, replace(FLOAT, optimizer="adamw_bnb_8bit", lora_r=16)),
    Case(
        "qwen3", {**QWEN3, "num_hidden_layers": 2}, replace(FLOAT, activation_checkpointing=False, double_quant=False)
    ),
    Case("dora", {**GQA, "num_hidden_layers": 2}, replace(FLOAT, dora=True, lora_head=True)),
    Case("bf16", {**QWEN3, **TINY}, replace(SMALL, activation_checkpointing=False)),
    Case("tied, whole", {**GQA, "tie_word_embeddings": True}, replace(FLOAT, method="all", quantizer="none")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_real_step_takes_what_was_computed(case: Case) -> None:
    _, _, lines = run(case)
    assert [line for line in lines if not line.good] == []
    assert {line.name for line in lines if not line.limit} == {"weights", "adapter", "gradients", "optimizer"}


def test_a_doubled_vocabulary_doubles_its_lines_and_no_other() -> None:
    setup = TrainingSetup(batch=2, length=64)
    one, two = (memory(setup, llama(vocabulary=size)) for size in (4096, 8192))
    assert (two.embedding, two.head) == (2 * one.embedding, 2 * one.head)
    for name in ("quantized_linears", "norms", "biases", "adapter", "gradients", "optimizer", "activations"):
        assert getattr(one, name) == getattr(two, name)
    assert two.loss_activations == one.loss_activations  # logits are gone with the chunk they belong to
    per_token = 4096 * (2 + 4 + 4)  # bfloat16 logits, their float32 copy, and the logarithms of probabilities
    assert two.logits - one.logits == 2 * 63 * per_token


def test_4_bit_embeddings_take_an_eighth_of_float32() -> None:
    setup = TrainingSetup(batch=1, length=8, compute_bytes=4)
    plain, packed = memory(setup), memory(replace(setup, quantize_embeddings=True))
    elements = 512 * 64
    blocks = elements // 64
    constants = blocks + blocks // 256 * 4 + 4 + 16 * 4 + 256 * 4
    assert (plain.embedding, packed.embedding, packed.head) == (elements * 4, *(elements // 2 + constants,) * 2)
    assert packed.quantized_linears == plain.quantized_linears


def test_small_tensors_and_embeddings_keep_32_bit_state() -> None:
    setup = TrainingSetup(batch=1, length=8, compute_bytes=4, quantizer="none", method="all")
    full = memory(replace(setup, optimizer="paged_adamw_32bit"))
    eight = memory(replace(setup, optimizer="adamw_bnb_8bit"))
    norms, embedding = 7 * 64, 512 * 64
    rest = full.gradients // 4 - norms - embedding
    assert full.optimizer == 8 * full.gradients // 4
    assert eight.optimizer == 8 * (norms + embedding) + 2 * rest + 2 * 4 * rest // 256 + 2 * 256 * 4


def test_checkpointing_trades_activations_for_one_layer() -> None:
    setup = TrainingSetup(batch=2, length=128)
    kept, again = memory(replace(setup, activation_checkpointing=False)), memory(setup)
    assert again.activations < kept.activations / 3
    assert again.layer_activations >= again.activations / 3


def test_dora_adds_its_magnitudes_and_what_it_scales_and_no_dense_matrix() -> None:
    setup = TrainingSetup(batch=2, length=64, compute_bytes=4, activation_checkpointing=False)
    shape = llama()
    widths = Widths.whole(shape.architecture)
    extra = dora_extra(shape, widths, setup)
    projections = shape.projections(widths, 0)
    rows = 3 * sum(out for _, out, _ in projections)
    # A float32 magnitude a row with two moments, and a step counter of AdamW for each linear.
    assert extra.resident == 3 * rows * 4 + 3 * len(projections) * 4
    saved = memory(replace(setup, dora=True)).activations - memory(setup).activations
    assert saved == rows * (setup.tokens + 1) * 4  # what is scaled, and the norms
    assert extra == dora_extra(shape, widths, replace(setup, dora=True))
    whole = replace(setup, method="all", quantizer="none")
    assert dora_extra(shape, widths, whole) == DoraExtra(0, 0)


def test_what_cannot_be_is_refused() -> None:
    for wrong in (
        {"method": "all", "quantizer": "nf4"},
        {"method": "all", "quantizer": "none", "quantize_embeddings": True},
        {"labelled_positions": 9},
        {"lora_r": 0},
    ):
        with pytest.raises(ValueError, match=r"\w"):
            TrainingSetup(batch=1, length=8, **wrong)  # type: ignore[arg-type]


optimizers = st.sampled_from(["adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit"])
setups = st.one_of(
    st.builds(
        partial(TrainingSetup, lora_dropout=True),
        batch=st.integers(1, 3),
        length=st.integers(2, 80),
        compute_bytes=st.sampled_from([2, 4]),
        quantizer=st.sampled_from(["nf4", "none"]),
        double_quant=st.booleans(),
        lora_r=st.integers(1, 32),
        targets=st.sampled_from(["all", ("q_proj",), ("down_proj", "v_proj")]),
        lora_head=st.booleans(),
        dora=st.booleans(),
        activation_checkpointing=st.booleans(),
        optimizer=optimizers,
        packed=st.booleans(),
        accumulating=st.booleans(),
        quantize_embeddings=st.booleans(),
        device=st.sampled_from(["cpu", "cuda"]),
    ),
    st.builds(
        partial(TrainingSetup, quantizer="none"),
        method=st.sampled_from(["align", "all"]),
        batch=st.integers(1, 3),
        length=st.integers(2, 80),
        compute_bytes=st.sampled_from([2, 4]),
        weight_bytes=st.sampled_from([None, 4]),
        activation_checkpointing=st.booleans(),
        optimizer=optimizers,
        accumulating=st.booleans(),
    ),
)
some_widths = st.builds(
    lambda groups, neurons: Widths(llama().architecture, tuple(groups), tuple(neurons)),
    st.lists(st.integers(1, 4), min_size=3, max_size=3),
    st.lists(st.integers(1, 96), min_size=3, max_size=3),
)


@settings(max_examples=60, deadline=None)
@given(setup=setups, widths=some_widths)
def test_the_peak_holds_what_is_there_at_once(setup: TrainingSetup, widths: Widths) -> None:
    got = memory(setup, widths=widths)
    assert got.peak >= got.resident + got.gradients + got.optimizer_workspace
    assert got.peak >= got.resident + got.after_forward
    assert got.phases.loss >= got.resident + got.activations + got.logits
    assert got.phases.backward >= got.resident + got.layer_activations
    assert got.pageable <= got.optimizer
    assert got.dequantization <= got.peak - got.resident
    assert all(isinstance(value, int) and value >= 0 for value in got.to_dict().values())


@settings(max_examples=40, deadline=None)
@given(setup=setups, widths=some_widths)
def test_more_rows_tokens_or_rank_take_more(setup: TrainingSetup, widths: Widths) -> None:
    got = memory(setup, widths=widths)
    for larger in (
        replace(setup, batch=setup.batch + 1),
        replace(setup, length=setup.length + 1),
        replace(setup, lora_r=setup.lora_r + 1),
    ):
        more = memory(larger, widths=widths)
        assert more.peak >= got.peak
        assert more.activations >= got.activations
        assert more.resident >= got.resident


def test_sizes_need_no_torch() -> None:
    code = (
        "import sys, loram.memory.training; "
        "sys.exit(str([name for name in ('torch', 'transformers') if name in sys.modules] or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
