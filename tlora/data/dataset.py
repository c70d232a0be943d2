"""A job's view of tokenised rows: which of them, and cut to which length."""

from dataclasses import dataclass

import numpy as np

from tlora.core.errors import DataError
from tlora.core.job import OverLength
from tlora.core.sequence import TokenSequence
from tlora.data.cache import TokenCache
from tlora.data.cursor import WORD, order
from tlora.data.lengths import fit, over_length_error


class TokenDataset:
    """Rows of a cache by number from 0, each within max_length. Rows are read when they are asked
    for."""

    def __init__(
        self, cache: TokenCache, index: np.ndarray, *, max_length: int, over_length: OverLength
    ) -> None:
        """`index` names rows of the cache; those too long are cut, left out or refused."""
        self._cache = cache
        self._max_length = max_length
        self._over_length: OverLength = over_length
        too_long = cache.lengths[index] > max_length
        if over_length == "raise" and too_long.any():
            row = int(index[too_long][0])
            raise over_length_error(int(cache.lengths[row]), max_length, cache.origin(row))
        self.num_dropped = int(too_long.sum()) if over_length == "drop" else 0
        """Rows of the index that were left out for their length."""

        self.index: np.ndarray = index[~too_long] if over_length == "drop" else index
        """Rows of the cache, in the order of this dataset."""

        self.lengths: np.ndarray = np.minimum(cache.lengths[self.index], max_length)
        """Tokens of each row after cutting, int64."""

        self.sequence_lengths = self.lengths
        """Tokens of what is a sequence to the model."""

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> TokenSequence:
        sequence = fit(self._cache.row(int(self.index[i])), self._max_length, self._over_length)
        assert sequence is not None, "rows to be dropped are not in the index"
        return sequence

    @property
    def num_truncated(self) -> int:
        return int((self._cache.lengths[self.index] > self._max_length).sum())

    def empty_answers(self) -> np.ndarray:
        """Rows of the cache that are here and have one."""
        return np.intersect1d(self.index, self._cache.empty_units(), assume_unique=True)

    def num_targets(self) -> np.ndarray:
        """Tokens of each row that carry loss, after cutting, int64; only rows that are cut are
        read."""
        targets = np.array(self._cache.targets[self.index], dtype=np.int64)
        is_cut = self._cache.lengths[self.index] > self._max_length
        targets[is_cut] = self._cache.targets_within(self.index[is_cut], self._max_length)
        return targets


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Rows to train on and rows held out; together all rows, none in both, each in the file's
    order."""

    train: np.ndarray
    evaluation: np.ndarray


def split_rows(num_rows: int, share: float | int, seed: int) -> Split:
    """Holds out a fraction (at least one row) or a number of rows, chosen by the seed alone."""
    count = share if isinstance(share, int) else max(1, round(num_rows * share)) if share else 0
    if count >= num_rows:
        raise DataError(
            f"eval.split {share} would hold out {count} of {num_rows} rows and leave none to train"
        )
    # The last epoch number there is: no epoch of training shares this order.
    chosen = order(seed, WORD, num_rows)
    return Split(train=np.sort(chosen[count:]), evaluation=np.sort(chosen[:count]))
