"""How fast jobs go and where their losses head, from counts alone: values in, values out."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

WINDOW_SECONDS = 20.0
MARK_SECONDS = 1.0
ENOUGH = 3
"""Fewer counts than this inside the window say little: the whole time is looked at instead."""

SPARKS = "▁▂▃▄▅▆▇█"
FALLING, LEVEL, RISING = "↘", "→", "↗"
LEVEL_SHARE = 0.01
"""A change of the loss by less than this share is none."""

Name = tuple[str, str]
"""What is counted, and whose."""


@dataclass(frozen=True, slots=True)
class Mark:
    seconds: float
    counts: Mapping[Name, int]


class Pace:
    """Growth of some counts, per second, over the last while."""

    def __init__(self, seconds: float, counts: Mapping[Name, int]) -> None:
        self._start = Mark(seconds, dict(counts))
        self._marks = deque([self._start])

    def know(self, counts: Mapping[Name, int]) -> None:
        """Of something that begins now, or begins again, from these."""
        self._start = Mark(self._start.seconds, {**self._start.counts, **counts})
        self._marks = deque(Mark(each.seconds, {**each.counts, **counts}) for each in self._marks)

    def mark(self, seconds: float, count: Callable[[], Mapping[Name, int]]) -> None:
        """May be called as often as one likes; counts once a second."""
        if seconds - self._marks[-1].seconds < MARK_SECONDS:
            return
        self._marks.append(Mark(seconds, dict(count())))
        while len(self._marks) > 1 and self._marks[1].seconds <= seconds - WINDOW_SECONDS:
            self._marks.popleft()

    def rate(self, name: Name, seconds: float, count: int) -> float:
        """Per second; 0 before anything was counted."""
        recent = self._marks[0]
        since = recent if count - recent.counts[name] >= ENOUGH else self._start
        return (count - since.counts[name]) / max(seconds - since.seconds, 1e-9)


class Trend:
    """A job's losses from the first step on, in bounded space: neighbours are averaged."""

    def __init__(self, size: int = 64) -> None:
        self.values: list[float] = []
        self._size = size
        self._each = 1
        self._pending: list[float] = []
        self._drawn: tuple[list[float], int, str] = ([], 0, "")

    def add(self, value: float) -> None:
        if not math.isfinite(value):
            return
        self._pending.append(value)
        if len(self._pending) < self._each:
            return
        values = [*self.values, mean(self._pending)]
        self._pending = []
        if len(values) >= self._size:
            values = [mean(values[at : at + 2]) for at in range(0, len(values) - 1, 2)]
            self._each *= 2
        self.values = values

    def arrow(self) -> str:
        """The last quarter of the losses, eight at most, against as many before them."""
        count = min(8, max(2, len(self.values) // 4))
        if len(self.values) < 2 * count:
            return " "
        before, after = mean(self.values[-2 * count : -count]), mean(self.values[-count:])
        if abs(after - before) <= LEVEL_SHARE * abs(before):
            return LEVEL
        return FALLING if after < before else RISING

    def sparkline(self, width: int) -> str:
        """From the first loss to the last; as many characters as there are values, at most
        `width`."""
        values = self.values
        if self._drawn[0] is not values or self._drawn[1] != width:
            self._drawn = (values, width, sparkline(values, width))
        return self._drawn[2]


def sparkline(values: list[float], width: int) -> str:
    count = min(width, len(values))
    if count < 2:
        return ""
    edges = [len(values) * at // count for at in range(count + 1)]
    means = [mean(values[edges[at] : edges[at + 1]]) for at in range(count)]
    low, high = min(means), max(means)
    if high - low <= LEVEL_SHARE * abs(high):
        return SPARKS[3] * count
    top = len(SPARKS) - 1
    return "".join(SPARKS[round((value - low) / (high - low) * top)] for value in means)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
