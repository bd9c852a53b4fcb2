"""The measurement itself, on cases that can be counted by hand."""

from __future__ import annotations

import torch
from torch import nn

from loram.memory.tracker import AllocatedBytes, LiveBytes, saved_bytes, tensor_bytes

SIDE = 64
MATRIX = SIDE * SIDE * 4


def test_what_is_made_counts_and_what_is_dropped_no_longer_does() -> None:
    a = torch.randn(SIDE, SIDE)
    with LiveBytes() as live:
        b = a @ a
        assert live.current == MATRIX
        c = b @ a
        assert live.current == 2 * MATRIX
        del b
        assert live.current == MATRIX
        c = c @ a  # the old product lives until the new one is there
        assert live.current == MATRIX
    assert live.peak == 2 * MATRIX


def test_views_and_operations_in_place_are_no_new_bytes() -> None:
    a = torch.randn(SIDE, SIDE)
    with LiveBytes() as live:
        view = a.t()[1:].unsqueeze(0)
        assert live.current == 0
        b = a + 1
        parts = [b[:3], b.view(-1), b.mul_(2), view]
        assert live.current == MATRIX
        del b
        assert live.current == MATRIX  # a view keeps its storage
        parts.clear()
        assert live.current == 0


def test_peak_can_start_anew() -> None:
    with LiveBytes() as live:
        torch.randn(SIDE, SIDE)
        assert live.peak == MATRIX
        live.reset_peak()
        assert live.peak == 0


def test_backward_is_covered() -> None:
    weight = nn.Parameter(torch.randn(SIDE, SIDE))
    x = torch.randn(SIDE, SIDE)
    with LiveBytes() as live:
        loss = (x @ weight).sigmoid().sum()
        assert live.current == MATRIX + 4  # the sigmoid's output, and the sum
        loss.backward()
        assert live.current == MATRIX + 4  # the gradient now
        weight.grad = None
        assert live.current == 4
    assert live.peak == 2 * MATRIX + 8  # what was saved and its input's gradient; the sum and its gradient


def test_the_note_names_operations() -> None:
    seen: list[tuple[str, int]] = []
    x = torch.randn(SIDE, SIDE)
    with LiveBytes(lambda name, current: seen.append((name, current))):
        torch.relu(x)
    assert seen == [("aten.relu.default", MATRIX)]


def test_kernels_in_python_are_looked_into() -> None:
    import bitsandbytes

    with LiveBytes() as live:
        weight = torch.randn(SIDE, SIDE)
        live.reset_peak()
        packed, state = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4")
        x = torch.randn(1, SIDE)
        before = live.current
        live.reset_peak()
        bitsandbytes.matmul_4bit(x, packed, quant_state=state)
    assert live.peak >= before + MATRIX  # the matrix was unpacked


def test_saved_storages_count_once_and_parameters_do_not() -> None:
    model = nn.Sequential(nn.Linear(SIDE, SIDE, bias=False), nn.Sigmoid())
    x = torch.randn(SIDE, SIDE)
    with saved_bytes(model, x) as saved:
        y = model(x)  # the sigmoid saves its output
        _ = y * y  # which the product saves again, twice
    assert saved.total == MATRIX
    assert saved.shapes == [((SIDE, SIDE), torch.float32)]


def test_the_allocator_sees_the_same() -> None:
    a = torch.randn(SIDE, SIDE)
    a @ a
    with AllocatedBytes() as allocated:
        b = a @ a
        c = b @ a
        del b
    assert (allocated.peak, allocated.current) == (2 * MATRIX, MATRIX)
    assert tensor_bytes([c, c.t(), c[1:]]) == MATRIX
