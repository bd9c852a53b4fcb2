"""Hidden states in memory up to a budget, on disk beyond it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loram.errors import InputError, RecipeError
from loram.memory.spill import Spill
from loram.memory.units import parse_size, size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_goes_in_comes_out_wherever_it_was(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {n: (torch.randn(2, 3, 5) * 9).to(dtype) for n in range(6)}
    spill = Spill(2 * tensors[0].nbytes, tmp_path / "spill")
    for number, tensor in tensors.items():
        spill.put(number, tensor)
    assert spill.spilled == 4 * tensors[0].nbytes
    assert len(list((tmp_path / "spill").iterdir())) == 4
    assert all(torch.equal(spill.get(number), tensor) for number, tensor in tensors.items())
    assert torch.equal(spill.take(5), tensors[5])
    spill.put(0, tensors[3])  # replaced, and its room used again
    assert torch.equal(spill.take(0), tensors[3])
    with pytest.raises(KeyError):
        spill.get(0)
    spill.close()
    assert not (tmp_path / "spill").exists()


def test_a_view_does_not_keep_what_it_looks_at(tmp_path: Path) -> None:
    spill = Spill(1000, tmp_path)
    spill.put("a", torch.arange(10_000.0)[5:10])
    held = spill.get("a")
    assert held.untyped_storage().nbytes() == 20
    assert spill.spilled == 0


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--memory"):
        Spill(0, tmp_path / "file").put("a", torch.ones(3))


@pytest.mark.parametrize(
    ("text", "bytes_"), [("20GiB", 20 * 2**30), ("24 GB", 24 * 10**9), ("512mib", 2**29), ("7", 7), ("1.5KiB", 1536)]
)
def test_sizes_are_read_as_people_write_them(text: str, bytes_: int) -> None:
    assert parse_size(text) == bytes_


@pytest.mark.parametrize("text", ["", "GiB", "-3", "20 Gigs", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="is not a size"):
        parse_size(text)


def test_sizes_are_written_with_a_unit() -> None:
    assert [size(n) for n in (5, 2048, 3 * 2**30, 2**41)] == ["5 B", "2.00 KiB", "3.00 GiB", "2.00 TiB"]
