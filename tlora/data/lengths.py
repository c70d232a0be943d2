"""What happens to rows that are longer than a job allows.

`truncate` keeps exactly `max_length` tokens in one run, chosen for the trained ones. With `first`
and `last` the first and last token that carry loss:

* If the tokens from `first` to `last` and one token of context before them fit, all of them stay:
  the prompt is cut from the left, and only if `first` would be lost by that, the tokens after
  `last` from the right.
* If not, the first of the trained tokens stay, after as much context as there is, up to half of
  max_length: an answer is cut at its end rather than parted from its question.

So a cut row is always `max_length` long and has at least one target. A begin token is cut like any
other.
"""

import numpy as np

from tlora.core.errors import DataError
from tlora.core.job import OverLength
from tlora.core.sequence import IGNORED, TokenSequence


def fit(sequence: TokenSequence, max_length: int, policy: OverLength) -> TokenSequence | None:
    """The sequence within `max_length`; None where the policy leaves it out."""
    if len(sequence) <= max_length:
        return sequence
    match policy:
        case "drop":
            return None
        case "raise":
            raise over_length_error(len(sequence), max_length, sequence.origin)
        case "truncate":
            start = window_start(sequence.labels, max_length)
            kept = slice(start, start + max_length)
            return TokenSequence(sequence.input_ids[kept], sequence.labels[kept], sequence.origin)


def window_start(labels: np.ndarray, max_length: int) -> int:
    """Where the kept run of a longer row begins; the row has a target and max_length is at least
    2."""
    targets = np.flatnonzero(labels[1:] != IGNORED) + 1
    return int(window_starts(targets[0], targets[-1], len(labels), max_length))


def window_starts(
    first: np.ndarray | int, last: np.ndarray | int, length: np.ndarray | int, max_length: int
) -> np.ndarray:
    """The same of many rows, by their first and last target and their length."""
    whole = np.minimum(length - max_length, first - 1)
    cut = first - np.minimum(first, max_length // 2)
    return np.where(last - first + 2 <= max_length, whole, cut)


def over_length_error(length: int, max_length: int, origin: str) -> DataError:
    path, _, line = origin.rpartition(":")
    return DataError(
        f"the row has {length} tokens, more than max_length {max_length}; raise train.max_length, "
        "or set train.over_length to truncate or drop",
        path=path,
        line=int(line) if line.isdigit() else None,
    )
