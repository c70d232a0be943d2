"""Which size of nano-batches a search tries next, from the levels of those it has measured.

It goes on as long as that pays, by doublings and halvings, until it has measured a size to each
side of the best one. Between those a parabola, in doublings and logarithms of tokens/s, says where
the peak is and whether a trial there is worth anything. On the way up, where a size costs the more
to try the larger it is, the parabola also shortens a step that it expects to lose.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tlora.training.rates import Verdict

DRIFT = 0.05
"""A difference that may be a device's pace, which changes while sizes are compared: an H200 in its
first minute of an 8B model fell by 3 % within 60 nano-batches (h200_tuned_size.jsonl)."""


@dataclass(frozen=True, slots=True)
class Parabola:
    """Over the distance from one size, in doublings."""

    size: int
    slope: float
    curve: float

    def gain(self, size: int) -> float:
        distance = math.log2(size / self.size)
        return (self.slope + self.curve * distance) * distance

    @property
    def reach(self) -> float:
        """Doublings up to where it has fallen back to its level here."""
        return -self.slope / self.curve if self.curve < 0 else math.inf


def parabola(levels: Mapping[int, float], size: int, one: int, other: int) -> Parabola:
    """Through three sizes, seen from the first."""
    x, y = math.log2(one / size), math.log2(other / size)
    to_one, to_other = (levels[one] - levels[size]) / x, (levels[other] - levels[size]) / y
    curve = (to_one - to_other) / (x - y)
    return Parabola(size, to_one - curve * x, curve)


def next_size(
    verdict: Verdict,
    *,
    best: int,
    levels: Mapping[int, float],
    allowed: Sequence[int],
    worth: float,
) -> int | None:
    """After a verdict on the latest trial; None where the search ends. `levels` are logarithms of
    tokens/s by size, of this search alone, the best one's among them; `allowed` rises."""
    below = sorted(size for size in levels if size < best)
    above = sorted(size for size in levels if size > best)
    larger = [size for size in allowed if size > best]
    half = max((size for size in allowed if size <= best // 2), default=None)
    if verdict is Verdict.BETTER and not above and larger:
        reach = best * 2 ** _doublings(best, below, levels)
        return max((size for size in larger if size <= reach), default=larger[0])
    if not (below and above):
        if verdict is Verdict.ALIKE:
            return None
        if not below and half is not None:
            return half
        return larger[0] if larger and not above else None
    expected = parabola(levels, best, below[-1], above[0])
    inside = [size for size in allowed if below[-1] < size < above[0]]
    peak = max(inside, key=expected.gain, default=best)
    return peak if expected.gain(peak) > worth else None


def _doublings(best: int, below: Sequence[int], levels: Mapping[int, float]) -> float:
    """How far up: as far again as it was worth; from the third size on a doubling, or to where a
    parabola falls back to the best. Not so after a gain that may be a device's pace: on a plateau
    only a long step shows anything."""
    if len(below) < 2:
        return min(1.0, math.log2(best / below[-1])) if below else 1.0
    if levels[best] - levels[below[-1]] <= DRIFT:
        return 1.0
    return min(1.0, max(0.0, parabola(levels, best, below[-1], below[-2]).reach))
