"""Several sets as one, each as often as its weight says."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np

from loram.data.tokens import Integers, Tokens, TokenSet


def epoch_examples(count: int, weight: float, seed: int) -> Integers:
    """Which of a set's `count` examples an epoch has, with repetitions: int64.

    The whole part of `weight` is how often every example comes; of the rest, so large a share of the examples (rounded
    half up) comes once more, drawn with `seed`. 2 is twice each; 0.5 a drawn half; 1.25 each once and a quarter
    twice. A set is never left out: at least one example comes.
    """
    times = math.floor(weight)
    extra = math.floor((weight - times) * count + 0.5)
    if times == 0 and count:
        extra = max(extra, 1)
    drawn = sorted(random.Random(seed).sample(range(count), extra))
    return np.concatenate([np.tile(np.arange(count, dtype=np.int64), times), np.array(drawn, np.int64)])


class Mixture:
    """The examples of one epoch of several sets, one set after the other; the shuffled packed rows interleave them.

    Args:
        parts: each set with its weight and the seed of what is drawn from it.
    """

    def __init__(self, parts: Sequence[tuple[TokenSet, float, int]]) -> None:
        self._sets = [tokens for tokens, _, _ in parts]
        chosen = [epoch_examples(len(tokens), weight, seed) for tokens, weight, seed in parts]
        self._chosen = np.concatenate(chosen)
        self._ends = np.cumsum([len(of_set) for of_set in chosen])
        lengths = [tokens.lengths[of_set] for tokens, of_set in zip(self._sets, chosen, strict=True)]
        self.lengths: Integers = np.concatenate(lengths)
        """Tokens of each example."""
        self.shares = [len(of_set) for of_set in chosen]
        """Examples of each set in an epoch."""

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, number: int) -> Tokens:
        return self._sets[int(np.searchsorted(self._ends, number, side="right"))][int(self._chosen[number])]
