"""Where a job stands in its data, and which rows come next.

A cursor says everything: with the seed and the number of rows it gives all batches to come, so it
is all a checkpoint has to keep. The order of an epoch is the rank of raw words of the Philox
counter generator keyed by (seed, epoch). NumPy promises the words of a bit generator for a seed,
and what sorting means, across versions; it does not promise what `Generator.permutation` makes of
them.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

WORD = (1 << 64) - 1
CACHED_ORDERS = 64
"""Orders kept for the jobs now running; a forgotten one is only computed again."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The next row to train on: `position` in the order of `epoch`, both from 0."""

    epoch: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.position < 0:
            raise ValueError(f"a cursor cannot be negative, got {self}")


class Batch(NamedTuple):
    """The rows of one optimiser step, and where to go on after it."""

    indices: np.ndarray
    cursor: Cursor


@lru_cache(maxsize=CACHED_ORDERS)
def order(seed: int, epoch: int, n: int) -> np.ndarray:
    """The order of n rows in an epoch, read-only."""
    words = np.random.Philox(key=np.array([seed & WORD, epoch & WORD], dtype=np.uint64)).random_raw(
        n
    )
    indices = np.argsort(words, kind="stable")
    indices.flags.writeable = False
    return indices


def next_batch(cursor: Cursor, n: int, batch_size: int, seed: int) -> Batch:
    """The next rows; a batch never crosses an epoch, so an epoch's last one may be smaller."""
    if cursor.position >= n:
        raise ValueError(f"{cursor} lies beyond the {n} rows; it belongs to another dataset")
    end = min(cursor.position + batch_size, n)
    indices = order(seed, cursor.epoch, n)[cursor.position : end]
    return Batch(indices, Cursor(cursor.epoch, end) if end < n else Cursor(cursor.epoch + 1, 0))


def steps_per_epoch(n: int, batch_size: int) -> int:
    return -(-n // batch_size)


def total_steps(n: int, batch_size: int, epochs: float, max_steps: int | None) -> int:
    """Steps of the whole job; a part of an epoch is rounded up to whole steps."""
    if max_steps is not None:
        return max_steps
    # As the number was typed: in floats, 0.1 epochs of 30 steps are a little more than 3.
    return math.ceil(steps_per_epoch(n, batch_size) * Fraction(str(epochs)))
