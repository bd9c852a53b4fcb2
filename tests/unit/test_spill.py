"""Hidden states in memory up to a budget, on disk beyond it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loram.errors import InputError
from loram.memory.spill import Spill


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


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    Spill(0, tmp_path / "spill").put("a", torch.ones(3))
    assert len(list((tmp_path / "spill").iterdir())) == 1
    Spill(100, tmp_path / "spill")
    assert list((tmp_path / "spill").iterdir()) == []
