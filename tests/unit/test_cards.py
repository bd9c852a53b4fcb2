"""Cards by name."""

from __future__ import annotations

import dataclasses

import pytest

from loram.errors import RecipeError
from loram.memory.cards import CARDS, Card, card

NAMES = [
    "rtx-3090", "rtx-4090", "rtx-5090", "rtx-a6000", "rtx-6000-ada", "a10", "l4", "l40s", "a100-40gb", "a100-80gb",
    "h100-sxm", "h200", "b200",
]  # fmt: skip


def test_the_cards() -> None:
    assert list(CARDS) == NAMES
    assert [card(name) for name in NAMES] == list(CARDS.values())


def test_numbers_are_bytes_and_operations() -> None:
    one = card("a100-80gb")
    assert one == Card("A100 80GB", 80 * 2**30, 2039e9, 312e12, one.source)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.bf16_flops = 624e12  # type: ignore[misc]


@pytest.mark.parametrize("name", NAMES)
def test_no_unit_is_off_by_a_thousand(name: str) -> None:
    one = card(name)
    assert 24 <= one.memory_bytes / 2**30 <= 192
    assert 300e9 <= one.bandwidth_bytes_per_s <= 8e12
    assert 71e12 <= one.bf16_flops <= 2.25e15
    assert one.source.startswith("NVIDIA ")


def test_an_unknown_card_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"'rtx-4080' \(did you mean 'rtx-\d090'\?\)") as caught:
        card("rtx-4080")
    assert all(name in caught.value.fix for name in NAMES)
    with pytest.raises(RecipeError, match=r"Unknown card 'abacus'\."):
        card("abacus")
