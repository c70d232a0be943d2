"""A job's view of tokenised preference pairs: which of them, and cut to which length.

A pair is too long if one of its sides is. Both sides begin at the same token of their prompt,
whichever of them had to be cut: otherwise two answers to different questions would be compared. So
the prompt is cut from the left by as much as the side that needs it most asks for, and each answer
at its end, by the rules of `lengths.py`.
"""

import numpy as np

from tlora.core.job import OverLength
from tlora.core.sequence import IGNORED, TokenPair, TokenSequence
from tlora.data.cache import TokenCache
from tlora.data.lengths import over_length_error, window_start


class PairDataset:
    """Pairs of a cache by number from 0, each side within max_length. Read when asked for."""

    def __init__(
        self, cache: TokenCache, index: np.ndarray, *, max_length: int, over_length: OverLength
    ) -> None:
        """`index` names pairs of the cache; those too long are cut, left out or refused."""
        self._cache = cache
        self._max_length = max_length
        sides = cache.lengths.reshape(-1, 2)[index]
        too_long = sides.max(axis=1, initial=0) > max_length
        if over_length == "raise" and too_long.any():
            pair = int(index[too_long][0])
            longest = int(sides[too_long][0].max())
            raise over_length_error(longest, max_length, cache.origin(2 * pair))
        self.num_dropped = int(too_long.sum()) if over_length == "drop" else 0
        """Pairs of the index that were left out for their length."""

        kept = ~too_long if over_length == "drop" else np.ones(len(index), dtype=bool)
        self.index: np.ndarray = index[kept]
        """Pairs of the cache, in the order of this dataset."""

        self.num_truncated = int(too_long[kept].sum())
        self._sides = sides[kept].copy()
        self._targets = cache.targets.reshape(-1, 2)[self.index].sum(axis=1, dtype=np.int64)
        for i in np.flatnonzero(too_long[kept]):
            pair = self[int(i)]
            self._sides[i] = [len(sequence) for sequence in pair.sequences]
            self._targets[i] = pair.num_targets
        self.lengths: np.ndarray = self._sides.sum(axis=1)
        """Tokens of each pair after cutting, both sides, int64."""

        self.sequence_lengths: np.ndarray = self._sides.reshape(-1)
        """Tokens of what is a sequence to the model."""

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> TokenPair:
        first = 2 * int(self.index[i])
        return fit_pair(
            TokenPair(self._cache.row(first), self._cache.row(first + 1)), self._max_length
        )

    def empty_answers(self) -> np.ndarray:
        """Pairs of the cache that are here and of which a side is empty."""
        return np.intersect1d(self.index, self._cache.empty_units(), assume_unique=True)

    def num_targets(self) -> np.ndarray:
        """Tokens of each pair that count, after cutting, int64."""
        return self._targets


def fit_pair(pair: TokenPair, max_length: int) -> TokenPair:
    """The pair with both sides within `max_length`, cut alike."""
    if all(len(sequence) <= max_length for sequence in pair.sequences):
        return pair
    starts = [
        window_start(sequence.labels, max_length) if len(sequence) > max_length else 0
        for sequence in pair.sequences
    ]
    # One token stays before what is trained on, on both sides.
    start = min(max(starts), *(_first_target(sequence) - 1 for sequence in pair.sequences))
    chosen, rejected = (
        TokenSequence(
            sequence.input_ids[start : start + max_length],
            sequence.labels[start : start + max_length],
            sequence.origin,
        )
        for sequence in pair.sequences
    )
    return TokenPair(chosen, rejected)


def _first_target(sequence: TokenSequence) -> int:
    return int(np.flatnonzero(sequence.labels[1:] != IGNORED)[0]) + 1
