"""The shard reader and writer against the reference implementation."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from loram.checkpoint import Block, CheckpointReader, CheckpointWriter, TensorSpec
from loram.checkpoint.overlap import in_order
from loram.errors import InputError
from tests.conftest import make_model


def spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, tensor.dtype, tuple(tensor.shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64])
def test_what_is_written_is_what_the_reference_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "b": (torch.randn(3, 5) * 10).to(dtype),
        "a": (torch.randn(7) * 10).to(dtype),
        "empty": torch.zeros(0, 4, dtype=dtype),
    }
    layout = {"model.safetensors": [spec(name, tensor) for name, tensor in tensors.items()]}
    with CheckpointWriter(tmp_path, layout) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    data = (tmp_path / "model.safetensors").read_bytes()
    assert writer.digests == {"model.safetensors": hashlib.sha256(data).hexdigest()}
    assert not (tmp_path / "model.safetensors.index.json").exists()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.integers(1, 20), columns=st.integers(1, 20), axis=st.sampled_from([0, 1]), data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_reading_some_rows_or_columns_is_indexing(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    columns: int,
    axis: int,
    data: st.DataObject,
    dtype: torch.dtype,
) -> None:
    folder = tmp_path_factory.mktemp("slices")
    weight = torch.randn(rows, columns).to(dtype)
    save_file({"w": weight, "other": torch.ones(3)}, folder / "model.safetensors")
    size = weight.shape[axis]
    index = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1)))
    with CheckpointReader(folder) as reader:
        assert torch.equal(reader.read("w", index, axis), weight.index_select(axis, torch.tensor(index)))
        assert torch.equal(reader.read("w"), weight)


def test_blocks_are_rows_of_bounded_size_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loram.checkpoint.reader.BLOCK_BYTES", 4 * 120 * 7)
    weight = torch.arange(50 * 120, dtype=torch.float32).view(50, 120)
    save_file({"w": weight, "one": torch.tensor(3.0)}, tmp_path / "model.safetensors")
    rows = [0, 1, 2, 9, 30, 31, 49]
    with CheckpointReader(tmp_path) as reader:
        assert [len(part().data) for part in reader.parts("w")] == [7] * 7 + [1]
        assert torch.equal(torch.cat([part().data for part in reader.parts("w")]), weight)
        assert torch.equal(reader.read("w", [0, 7, 119], 1), weight[:, [0, 7, 119]])
        assert torch.equal(reader.read("w", rows), weight[rows])
        assert torch.equal(reader.read("one"), torch.tensor(3.0))


def test_holes_of_a_sparse_file_are_seen_and_stay_holes(tmp_path: Path) -> None:
    layout = {"model.safetensors": [TensorSpec(name, torch.bfloat16, (4096, 1024)) for name in ("a", "b", "c")]}
    values = torch.randn(4096, 1024).bfloat16()
    for folder in ("source", "copy"):
        with (
            CheckpointWriter(tmp_path / folder, layout) as writer,
            CheckpointReader(tmp_path / "source") if folder == "copy" else contextlib.nullcontext() as source,
        ):
            for name in "abc":
                hole = [Block(torch.zeros((), dtype=torch.bfloat16).expand(4096, 1024), hole=True)]
                writer.write(
                    name, (part() for part in source.parts(name)) if source else values if name == "b" else hole
                )
        path = tmp_path / folder / "model.safetensors"
        assert path.stat().st_size > 3 * values.nbytes
        assert path.stat().st_blocks * 512 < 1.5 * values.nbytes
        assert writer.digests["model.safetensors"] == hashlib.sha256(path.read_bytes()).hexdigest()
        with CheckpointReader(tmp_path / folder) as reader:
            assert [all(part().hole for part in reader.parts(name)) for name in "abc"] == [True, False, True]
            assert torch.equal(reader.read("b"), values)
            assert not reader.read("c").any()


def test_a_full_disk_is_said_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("loram.checkpoint.writer.write_at", full)
    with (
        pytest.raises(InputError, match=r"model\.safetensors: No space left"),
        CheckpointWriter(tmp_path, {"model.safetensors": [spec("x", torch.ones(2))]}) as writer,
    ):
        writer.write("x", torch.ones(2))


def test_jobs_side_by_side_keep_their_order_and_pass_errors_on() -> None:
    def jobs() -> Iterator[Callable[[], int]]:
        for number in range(20):
            yield lambda number=number: number if number < 15 else 1 // 0  # type: ignore[misc]

    stream = in_order(jobs(), 3)
    assert list(itertools.islice(stream, 15)) == list(range(15))
    with pytest.raises(ZeroDivisionError):
        next(stream)
    before = threading.active_count()
    with contextlib.closing(in_order((lambda: 0 for _ in itertools.count()), 2)) as endless:
        assert next(endless) == 0
    assert threading.active_count() == before


def test_shards_keep_their_names_and_order(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", shard="60KB")
    with CheckpointReader(base) as reader:
        assert len(reader.shards) > 2
        layout = {s: [TensorSpec(i.name, i.dtype, i.shape) for i in infos] for s, infos in reader.shards.items()}
        with CheckpointWriter(tmp_path / "copy", layout) as writer:
            for one in writer.specs:
                writer.write(one.name, reader.read(one.name))
        with CheckpointReader(tmp_path / "copy") as copy:
            assert copy.shards.keys() == reader.shards.keys()
            assert copy.identity() == reader.identity()


def test_identity_tells_models_apart(tmp_path: Path) -> None:
    folders = [make_model(tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1))]
    folders.append(make_model(tmp_path / "wider", intermediate_size=40))
    identities = []
    for folder in folders:
        with CheckpointReader(folder) as reader:
            identities.append(reader.identity())
    assert identities[0] == identities[1]
    assert identities[0]["structure"] == identities[2]["structure"]
    assert identities[0]["content"] != identities[2]["content"]
    assert identities[0]["structure"] != identities[3]["structure"]


def test_the_writer_refuses_what_is_not_in_its_layout(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="expected"),
        CheckpointWriter(tmp_path, {"a": [spec("x", torch.ones(2))]}) as writer,
    ):
        writer.write("x", torch.ones(3))
    with pytest.raises(ValueError, match="only 0 of 1"), CheckpointWriter(tmp_path, {"a": [spec("x", torch.ones(2))]}):
        pass
