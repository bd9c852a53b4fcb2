"""The parts of a plan: sizes as text, what several devices share, operations, disk, and the search for what fits."""

from __future__ import annotations

import platform
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loram_stages.graph import evaluated

from loram.checkpoint.format import BLOCK_BYTES
from loram.errors import NoRoomError, RecipeError
from loram.memory import disk, host, measured
from loram.memory.advice import advise
from loram.memory.cards import card
from loram.memory.devices import per_device
from loram.memory.fit import ALLOWANCE_BYTES, fit, largest_count, require_disk, smallest_ratio
from loram.memory.flops import ceiling, dequantization_traffic, token_flops
from loram.memory.formats import FORMATS
from loram.memory.plan import align_setup, alternatives, components, own_key, pruned_widths, rows_per_step, train_setup
from loram.memory.polish import polish_memory, polish_setup
from loram.memory.resident import optimizer_bytes, trainables
from loram.memory.stored import sizes
from loram.memory.training import TrainingSetup, training_memory
from loram.memory.units import parse_size, size
from loram.models.architecture import UNITS
from loram.models.shape import Widths
from loram.models.sizes import inline_shape, item_bytes
from loram.pruning.geometry import plan_geometry
from loram.recipe import AlignSection, PruneSection, Recipe, TrainSection, load_recipe
from tests.conftest import ROOT, TINY
from tests.unit.test_training_memory import llama, setups, some_widths

QLORA = TrainingSetup(batch=2, length=64)


def seventy() -> Recipe:
    return load_recipe(ROOT / "recipes" / "llama-2-70b.yaml")


@pytest.mark.parametrize(
    ("text", "count"),
    [("20GiB", 20 << 30), ("24 GB", 24 * 10**9), ("512mib", 512 << 20), ("1.5KiB", 1536), ("7", 7), ("7B", 7)],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "20 gigs", "0", "0.1B", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="is no size"):
        parse_size(text)


def test_sizes_are_written() -> None:
    assert [size(n) for n in (0, 1023, 1024, 8 << 20, 3 << 29, 128 << 30, 2 << 40)] == [
        "0 B", "1023 B", "1.00 KiB", "8.00 MiB", "1.50 GiB", "128.0 GiB", "2.00 TiB",
    ]  # fmt: skip


def test_one_device_takes_the_whole_step_and_ddp_a_copy_of_the_gradients() -> None:
    shape = llama()
    whole = Widths.whole(shape.architecture)
    memory = training_memory(shape, whole, QLORA)
    assert per_device(shape, whole, QLORA).peak == memory.peak
    shared = per_device(shape, whole, QLORA, 4, "ddp")
    assert (shared.weights, shared.optimizer) == (memory.weights, memory.optimizer)
    assert (shared.buckets, shared.peak) == (memory.gradients, memory.peak + memory.gradients)


@settings(max_examples=30, deadline=None)
@given(setup=setups, widths=some_widths, devices=st.integers(2, 9))
def test_sharding_splits_what_is_resident_and_lines_add_up(setup: TrainingSetup, widths: Widths, devices: int) -> None:
    shape = llama()
    memory = training_memory(shape, widths, setup)
    for kind in ("fsdp", "ddp"):
        got = per_device(shape, widths, setup, devices, kind).to_dict()  # type: ignore[arg-type]
        assert all(value >= 0 for value in got.values())
        assert sum(value for name, value in got.items() if name != "peak") == got["peak"]
    sharded = per_device(shape, widths, setup, devices)
    for name in ("weights", "adapter", "gradients", "optimizer"):
        whole = getattr(memory, name)
        assert whole <= getattr(sharded, name) * devices < whole + devices
    assert per_device(shape, widths, setup, devices + 1).peak <= sharded.peak


def test_what_fsdp_gathers_is_two_layers_and_the_vocabulary() -> None:
    shape = llama()
    plain = TrainingSetup(batch=1, length=8, quantizer="none", method="all")
    layer = shape.architecture.layer_parameters({"kv_group": 4, "neuron": 96}) + shape.layer_norms
    matrices = 2 * shape.vocabulary * shape.hidden
    got = per_device(shape, Widths.whole(shape.architecture), plain, 8).gathered
    assert got == 2 * 2 * (layer + layer) + 2 * 2 * matrices + 2 * shape.final_norm  # bf16 weights and gradients


def test_what_fsdp_gathers_of_factors_is_the_factors() -> None:
    shape = llama()
    plain = TrainingSetup(batch=1, length=8, quantizer="none", method="all")
    geometry = replace(plan_geometry(shape.architecture, 0.5, 1, 1), factored=frozenset(UNITS))
    some = geometry.widths(shape.architecture)  # factors in the layer in the middle only
    every = replace(some, ranks=(some.ranks[1],) * 3)
    whole = per_device(shape, Widths.whole(shape.architecture), plain, 8).gathered
    assert per_device(shape, some, plain, 8).gathered == whole
    saved = Widths.whole(shape.architecture).parameters() - every.parameters()
    assert per_device(shape, every, plain, 8).gathered == whole - 2 * 2 * 2 * saved // 3


def test_operations_of_a_token() -> None:
    shape = llama()
    whole = Widths.whole(shape.architecture)
    projections = 3 * shape.architecture.layer_parameters({"kv_group": 4, "neuron": 96})
    attention = 2 * 64 * 3 * (4 * 2 * 16)  # 2·T·width in each of three layers
    head = 2 * 512 * 64 * 63 // 64
    adapter = sum(
        3 * 8 * (projection.out_features + projection.in_features) for projection in shape.architecture.projections
    )
    got = token_flops(shape, whole, QLORA)
    assert got.forward == 2 * projections + attention + head
    assert got.backward == 2 * projections + 2 * attention + head
    assert got.recomputation == 2 * projections + attention
    assert got.adapter == 8 * adapter
    kept = token_flops(shape, whole, replace(QLORA, activation_checkpointing=False))
    assert (kept.recomputation, kept.adapter) == (0, 6 * adapter)
    full = token_flops(shape, whole, replace(QLORA, quantizer="none", method="all"))
    assert full.step == 8 * projections + 4 * attention + 3 * head
    align = token_flops(shape, whole, replace(QLORA, quantizer="none", method="align"))
    assert full.step - align.step == head
    answers = token_flops(shape, whole, replace(QLORA, labelled_positions=16))
    assert got.forward - answers.forward == head - 2 * 512 * 64 // 4


def test_dequantization_moves_each_weight_once_a_pass() -> None:
    shape = llama()
    whole = Widths.whole(shape.architecture)
    weights = [(p.out_features, p.in_features) for p in shape.architecture.projections]
    once = 3 * sum(FORMATS["nf4"].nbytes(o, i, True) + 2 * o * i for o, i in weights)
    assert dequantization_traffic(shape, whole, QLORA) == 3 * once
    assert dequantization_traffic(shape, whole, replace(QLORA, activation_checkpointing=False)) == 2 * once
    assert dequantization_traffic(shape, whole, replace(QLORA, quantizer="none")) == 0
    head = FORMATS["nf4"].nbytes(512, 64, True) + 2 * 512 * 64
    assert dequantization_traffic(shape, whole, replace(QLORA, quantize_embeddings=True)) == 3 * once + 2 * head
    one = card("rtx-4090")
    got = ceiling(shape, whole, QLORA, one)
    assert got.compute == pytest.approx(165.2e12 / token_flops(shape, whole, QLORA).step)
    assert got.with_dequantization == pytest.approx(got.compute * (1 - got.dequantization_share))
    assert ceiling(shape, whole, replace(QLORA, batch=16), one).dequantization_share < got.dequantization_share


def test_a_recipe_becomes_setups() -> None:
    recipe = seventy()
    shape = inline_shape(recipe.model.config)
    setup = train_setup(recipe.train, shape.architecture)
    assert setup == TrainingSetup(
        batch=4, length=512, quantize_embeddings=True, lora_dropout=True, lora_head=True, accumulating=True
    )
    assert align_setup(recipe.align).method == "align"
    assert align_setup(AlignSection(train_lm_head=True)).method == "all"
    other = TrainSection(optim="adamw_8bit", dtype="float32", target_modules=["q_proj"])
    got = train_setup(other, shape.architecture)
    assert (got.optimizer, got.compute_bytes, got.targets) == ("adamw_bnb_8bit", 4, ("q_proj",))
    assert train_setup(TrainSection(optim="lion_32bit"), shape.architecture).optimizer == "adamw_torch"
    with pytest.raises(RecipeError, match="did you mean 'q_proj'"):
        train_setup(TrainSection(target_modules=["q_prj"]), shape.architecture)


def test_the_alternatives_differ_in_model_and_bits_alone() -> None:
    recipe = seventy()
    shape = inline_shape(recipe.model.config)
    ways = {way.key: way for way in alternatives(recipe, shape, pruned_widths(shape.architecture, recipe.prune))}
    assert list(ways) == ["full", "lora", "qlora", "loram", "qloram"]
    assert ways["qloram"].setup == ways["qlora"].setup
    assert ways["loram"].setup == ways["lora"].setup
    assert own_key(recipe) == "qloram"
    lines = {key: components(training_memory(shape, way.widths, way.setup)) for key, way in ways.items()}
    assert lines["lora"]["linears"] == 2 * sizes(shape, ways["lora"].widths).parameters - 2 * (
        2 * 32000 * 8192 + shape.layer_norms * 80 + shape.final_norm
    )
    assert lines["loram"]["adapter"] == lines["qloram"]["adapter"] < lines["qlora"]["adapter"]
    plain = recipe.model_copy(update={"train": TrainSection(quantizer="none")})
    assert own_key(plain) == "loram"
    assert [way.setup.quantizer for way in alternatives(plain, shape, ways["loram"].widths)] == [
        "none", "none", "nf4", "none", "nf4",
    ]  # fmt: skip


@given(st.integers(0, 400), st.integers(0, 60), st.integers(1, 400))
def test_the_largest_count_is_found(limit: int, least: int, span: int) -> None:
    found = largest_count(lambda n: n <= limit, least, least + span)
    assert found == (None if least > limit else min(limit, least + span))


@given(st.integers(0, 1100))
def test_the_smallest_ratio_is_found(limit: int) -> None:
    assert smallest_ratio(lambda ratio: ratio * 1000 >= limit - 1e-6) == (None if limit > 999 else limit / 1000)


def test_where_no_layer_can_be_cut_only_the_whole_model_is_left() -> None:
    shape, prune = llama(), PruneSection(criterion="random", keep_first_layers=2, keep_last_layers=1)
    for available, ratio in ((10**12, 0.0), (1, None)):
        assert fit(shape, Widths.whole(shape.architecture), QLORA, available, prune).smallest_ratio == ratio


@pytest.mark.parametrize(
    ("memory", "ratio", "quantizer", "anchors"),
    [("200GB", 0, "none", 0), ("80GB", 0, "int8", 0), ("48GB", 0, "nf4", 14), ("24GB", None, "nf4", 14)],
)
def test_what_is_recommended_fits(memory: str, ratio: int | None, quantizer: str, anchors: int) -> None:
    recipe = seventy()
    shape = inline_shape(recipe.model.config)
    available = parse_size(memory)
    advice = advise(shape, recipe, available)
    chosen = recipe.changed(advice.overrides)
    setup = train_setup(chosen.train, shape.architecture)

    def needed(ratio: float) -> int:
        return per_device(shape, pruned_widths(shape.architecture, chosen.prune, ratio), setup).peak + ALLOWANCE_BYTES

    assert needed(chosen.prune.ratio) <= available
    assert (chosen.train.quantizer, chosen.train.anchors) == (quantizer, anchors)
    if ratio is None:
        assert needed(chosen.prune.ratio - 0.001) > available
    else:
        assert chosen.prune.ratio == ratio


@pytest.mark.parametrize("memory", ["200GB", "80GB", "48GB", "24GB", "4GB", "1GB"])
@pytest.mark.parametrize(
    ("settings", "anchored"),
    [
        (["recover.correction=emloc"], False),
        (["train.init_lora_weights=pissa"], False),
        (["train.init_lora_weights=pissa", "prune.ratio=0", "prune.method=low_rank"], False),
        (["train.init_lora_weights=loftq"], False),
        (["train.use_dora=true"], True),
        (["prune.ratio=0", "prune.calibration=null"], True),
        (["polish.start=fresh", "polish.max_steps=5", "train.lora_lm_head=false"], True),
        (["train.quantizer=hqq3", "train.quantize_embeddings=false"], True),
        (["train.quantizer=none", "train.quantize_embeddings=false"], True),
        (["train.lora_lm_head=true", "train.lora_embedding=true", "train.quantize_embeddings=false"], True),
        (["evaluate.variants=[pruned, adapter]"], True),
    ],
)
def test_what_is_recommended_is_a_recipe_that_fits(memory: str, settings: list[str], anchored: bool) -> None:
    recipe, available = seventy().changed(settings), parse_size(memory)
    shape = inline_shape(recipe.model.config)
    advice = advise(shape, recipe, available)
    assert bool(advice.overrides) == (memory != "1GB")
    chosen = recipe.changed(advice.overrides)
    if memory in ("48GB", "24GB"):
        assert (chosen.train.anchors > 0) == anchored
        assert ("rules anchors out" in advice.reason) != anchored
        assert chosen.train.quantizer == "nf4"
    if memory == "24GB":
        assert (chosen.align.max_steps == 0) == anchored, "without anchors alignment is worth its tokens"
    if memory == "4GB":
        assert chosen.polish.start == "fresh"
        assert chosen.polish.learning_rate == recipe.train.learning_rate
        assert rows_per_step(chosen.polish) == rows_per_step(recipe.train)
        needed = polish_memory(shape, polish_setup(chosen, shape.architecture), rows_per_step(chosen.polish)).device
        assert needed + ALLOWANCE_BYTES <= available
        assert evaluated(chosen)
    elif memory != "1GB":
        assert chosen.polish.start == "recovered"
        widths = pruned_widths(shape.architecture, chosen.prune)
        setup = train_setup(chosen.train, shape.architecture)
        assert per_device(shape, widths, setup).peak + ALLOWANCE_BYTES <= available


def test_rows_go_one_at_a_time_before_a_model_goes_layer_by_layer() -> None:
    recipe = seventy().changed(["train.max_length=4096"])
    shape = inline_shape(recipe.model.config)
    chosen = recipe.changed(advise(shape, recipe, parse_size("24GB")).overrides)
    assert (chosen.polish.start, chosen.train.per_device_train_batch_size) == ("recovered", 1)
    assert rows_per_step(chosen.train) == rows_per_step(recipe.train)


def test_layer_by_layer_trains_as_train_would_have() -> None:
    watched = ["learning_rate=0.0001", "eval_steps=7", "early_stopping_patience=2"]
    recipe = seventy().changed(["train.eval_datasets.held=rows.jsonl", *(f"train.{each}" for each in watched)])
    polish = recipe.changed(advise(inline_shape(recipe.model.config), recipe, parse_size("4GB")).overrides).polish
    assert (polish.start, polish.max_steps) == ("fresh", recipe.train.max_steps)
    for name in ("learning_rate", "eval_steps", "early_stopping_patience", "eval_datasets"):
        assert getattr(polish, name) == getattr(recipe.train, name)


@pytest.mark.parametrize("devices", [1, 4])
def test_what_is_found_fits_and_the_next_does_not(devices: int) -> None:
    recipe = seventy()
    shape = inline_shape(recipe.model.config)
    setup = train_setup(recipe.train, shape.architecture)
    widths = pruned_widths(shape.architecture, recipe.prune)
    available = parse_size("11GiB") if devices == 1 else parse_size("7.5GiB")
    got = fit(shape, widths, setup, available, recipe.prune, devices)

    def fits(widths: Widths, setup: TrainingSetup) -> bool:
        return per_device(shape, widths, setup, devices).peak + ALLOWANCE_BYTES <= available

    assert not got.fits
    ratio, batch, length = got.smallest_ratio, got.largest_batch, got.largest_length
    assert ratio is not None
    assert batch is not None
    assert length is not None
    for value, good in ((ratio, True), (round(ratio - 0.001, 3), False)):
        assert fits(pruned_widths(shape.architecture, recipe.prune, value), setup) is good
    assert fits(widths, replace(setup, batch=batch))
    assert not fits(widths, replace(setup, batch=batch + 1))
    assert fits(widths, replace(setup, length=length))
    assert not fits(widths, replace(setup, length=length + 1))
    with pytest.raises(NoRoomError) as caught:
        got.require("train", "the device")
    for words in (size(got.needed), size(available), got.largest_component, f"prune.ratio={ratio:g} or more"):
        assert words in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_cpu_needs_no_room_for_a_context() -> None:
    shape = llama()
    whole = Widths.whole(shape.architecture)
    setup = replace(QLORA, device="cpu", compute_bytes=4)
    got = fit(shape, whole, setup, 10**12, PruneSection(criterion="random"))
    assert (got.needed, got.allowance) == (training_memory(shape, whole, setup).peak, 0)
    got.require("train", "this machine")


@pytest.mark.parametrize(
    ("steps", "every", "count"), [(-1, 200, 3), (1600, 200, 3), (400, 200, 1), (401, 200, 2), (3, 200, 1), (9, 1, 3)]
)
def test_checkpoints_that_are_there_at_once(steps: int, every: int, count: int) -> None:
    assert disk.checkpoints(TrainSection(max_steps=steps, save_steps=every)) == count


def test_disk_of_the_stages() -> None:
    recipe = seventy()
    shape = inline_shape(recipe.model.config)
    widths = pruned_widths(shape.architecture, recipe.prune)
    got = disk.stage_disk(recipe, shape, widths, 2)
    small = 2 * shape.parameters(widths)
    trained = shape.parameters(widths) - 2 * 32000 * 8192
    assert got["prune"].running == small == got["align"].kept
    steps = 4 * (3 + 7 * 80 - 2 + 2 * 80)  # the optimizer's step counters: 9 tensors a layer and the final norm
    assert got["align"].running == small + 3 * (small + 4 * trained) + 3 * steps
    assert got["merge"].kept == 2 * shape.parameters()
    assert got["recover"].kept > got["train"].kept
    tied = inline_shape({**TINY, "tie_word_embeddings": True})
    untied = disk.stage_disk(recipe, tied, Widths.whole(tied.architecture), 2)["merge"]
    assert untied.kept == 2 * (tied.parameters() + 272 * 64)
    skipped = recipe.model_copy(update={"align": AlignSection()})
    assert "align" not in disk.stage_disk(skipped, shape, widths, 2)
    anchored = recipe.changed(["train.anchors=2", "train.max_steps=9"])
    assert "anchor" in disk.stage_disk(anchored, shape, widths, 2)
    assert "anchor" not in disk.stage_disk(
        anchored.changed(["train.tokens_per_step=1000", "train.gradient_accumulation_steps=1"]), shape, widths, 2
    )
    polished = disk.stage_disk(recipe.changed(["polish.max_steps=1"]), shape, widths, 2)["polish"]
    setup = polish_setup(recipe, shape.architecture)
    hidden = polish_memory(shape, setup, rows_per_step(recipe.polish)).hidden
    assert hidden > disk.HIDDEN_STATES_BYTES
    assert polished.running == 2 * polished.kept + hidden - disk.HIDDEN_STATES_BYTES + (
        optimizer_bytes(trainables(shape, Widths.whole(shape.architecture), setup), setup)
    )


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def usage(path: Path) -> Any:
        asked.append(path)
        return namedtuple("usage", "free")(1000)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    require_disk(tmp_path / "not" / "there", 1000, "prune")
    assert asked == [tmp_path]
    with pytest.raises(NoRoomError, match="prune: writes up to 1001 B"):
        require_disk(tmp_path, 1001, "prune")


def test_host_memory_of_the_stages() -> None:
    assert host._BLOCK_BYTES == BLOCK_BYTES
    recipe = seventy()
    shape = inline_shape(recipe.model.config)
    got = host.stage_memory(recipe, shape)
    assert got["prune"] < got["recover"] == got["merge"] < 600 * 2**20 < got["evaluate"]
    prune = PruneSection(criterion="activation", ratio=0.5, calibration={"path": "stdlib:text"})  # type: ignore[arg-type]
    scored = host.stage_memory(recipe.model_copy(update={"prune": prune}), shape)
    layer = shape.architecture.layer_parameters({"kv_group": 8, "neuron": 28672}) + shape.layer_norms
    assert scored["score"] == host.MEASURED_PROCESS_BYTES + 2 * layer * 4 + disk.HIDDEN_STATES_BYTES
    factored = prune.model_copy(update={"method": "low_rank"})
    moments = 3 * 8192**2 + 28672**2  # of what q, k and v read, of what gate and up read, and o; and down
    work = 3 * 28672**2 + 3 * 8192 * 28672
    made = host.stage_memory(recipe.model_copy(update={"prune": factored}), shape)
    assert made["prune"] == scored["score"] + 8 * (moments + work)
    loss = factored.model_copy(update={"criterion": "adapter_gradient"})
    assert host.moment_bytes(shape.architecture, loss) == 8 * (
        moments + work + 2 * 28672**2 + 3 * 8192**2 + 2 * 1024**2
    )
    assert host.moment_bytes(shape.architecture, prune) == 0


def test_free_memory_minds_the_containers_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 300\n")
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    used.write_text("700\n")
    monkeypatch.setattr(measured, "_CGROUPS", ((limit, used, "inactive_file"),))
    monkeypatch.setattr(measured, "_host_available", lambda: 10_000)
    for text, free in (("1000\n", 600), ("max\n", 10_000)):
        limit.write_text(text)
        assert measured.free_memory() == free
    monkeypatch.setattr(measured, "_host_available", lambda: None)
    assert measured.free_memory() is None


def test_a_model_type_outside_the_table_is_traced() -> None:
    numbers = {**TINY, "pad_token_id": 0}
    unknown = inline_shape({**numbers, "model_type": "seed_oss", "attention_bias": False, "attention_out_bias": False})
    known = inline_shape(numbers)
    assert unknown.parameters() == known.parameters()
    assert (unknown.architecture.kv_groups, unknown.hidden) == (known.architecture.kv_groups, known.hidden)


def test_bytes_of_a_stored_parameter() -> None:
    named = [{"dtype": "float32"}, {"torch_dtype": "torch.bfloat16"}, {"dtype": "float16"}, {}, {"dtype": None}]
    assert [item_bytes(config, default=3) for config in named] == [4, 2, 2, 3, 3]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_a_new_peak_is_without_what_was_freed_before() -> None:
    pieces = [bytearray(b"1") * 100_000 for _ in range(3000)]
    above = [bytearray(b"1") * 100_000 for _ in range(10)]  # so the heap's top stays where it is
    measured.reset_peak()
    held = measured.peak_bytes()["host_peak_bytes"]
    del pieces
    measured.reset_peak()
    assert measured.peak_bytes()["host_peak_bytes"] < held - 200_000_000
    assert len(above) == 10
