"""How fast nano-batches of each size were, and what of a difference is noise.

Rates are compared as logarithms, so that a difference is a share. The noise of one measure is read
from how far repeated measures of one size lie apart, each from the one before it: a slow drift or a
single stumble hardly moves it.
"""

import math
import statistics
from collections import deque
from enum import Enum

WINDOW = 24
"""Measures of a size that count, the latest ones."""

DIFFERENCES = 64
"""Between successive measures, of all sizes together, from which the noise is read."""

NORMAL = 0.6745 * math.sqrt(2)
"""Median of the distance between two normal values, for a deviation of one."""

MEDIAN = 1.25
"""A median strays so much further than a mean."""


class Verdict(Enum):
    BETTER = "better"
    WORSE = "worse"
    ALIKE = "alike"
    OPEN = "open"
    """More measures would tell."""


class Rates:
    def __init__(self) -> None:
        self._logs: dict[int, deque[float]] = {}
        self._differences: deque[float] = deque(maxlen=DIFFERENCES)

    def add(self, size: int, tokens_per_s: float) -> None:
        logs = self._logs.setdefault(size, deque(maxlen=WINDOW))
        value = math.log(tokens_per_s)
        if logs:
            self._differences.append(abs(value - logs[-1]))
        logs.append(value)

    def count(self, size: int) -> int:
        return len(self._logs.get(size, ()))

    def level(self, size: int) -> float:
        """Logarithm of its tokens/s."""
        return statistics.median(self._logs[size])

    def highest(self, size: int) -> float:
        """Logarithm of its best measure."""
        return max(self._logs[size])

    def tokens_per_s(self, size: int) -> float | None:
        return math.exp(self.level(size)) if self.count(size) else None

    @property
    def sizes(self) -> list[int]:
        return [size for size, logs in self._logs.items() if logs]

    @property
    def noise(self) -> float:
        """Standard deviation of one measure, as a share; infinite while nothing was repeated."""
        if not self._differences:
            return math.inf
        return statistics.median(self._differences) / NORMAL

    def margin(self, count: int, other: int, *, deviations: float) -> float:
        """A difference between medians of so many measures is real beyond this. An estimate from
        few differences may be far too small, and gets more room."""
        room = 1 + 2 / max(1, len(self._differences))
        return deviations * room * MEDIAN * self.noise * math.sqrt(1 / count + 1 / other)

    def compare(
        self, size: int, other: int, *, worth: float, most: int, deviations: float, bold: bool
    ) -> Verdict:
        """`size` against `other`. A difference below `worth` is none. After `most` measures what is
        not clear counts as alike or, if `bold`, as it looks."""
        gain = self.level(size) - self.level(other)
        margin = self.margin(self.count(size), self.count(other), deviations=deviations)
        settled = margin <= worth or self.count(size) >= most
        if abs(gain) <= margin and not settled:
            return Verdict.OPEN
        if abs(gain) <= worth or (abs(gain) <= margin and not bold):
            return Verdict.ALIKE
        return Verdict.BETTER if gain > 0 else Verdict.WORSE

    def shift(self, size: int, *, recent: int, least: int, deviations: float) -> float:
        """By what share the latest measures of a size differ from those before, beyond the noise;
        0 if they do not, or if there are not the least before."""
        logs = list(self._logs.get(size, ()))
        if len(logs) < recent + least:
            return 0.0
        before, now = logs[:-recent], logs[-recent:]
        change = statistics.median(now) - statistics.median(before)
        margin = self.margin(len(now), len(before), deviations=deviations)
        return change if abs(change) > margin else 0.0

    def keep(self, size: int, latest: int) -> None:
        """Forget all but the latest measures of one size."""
        logs = self._logs.get(size, deque[float]())
        self._logs = {size: deque(list(logs)[len(logs) - latest :], maxlen=WINDOW)}

    def trim(self, size: int, latest: int) -> None:
        """Forget all but its latest measures, and nothing of others."""
        logs = list(self._logs[size])
        self._logs[size] = deque(logs[len(logs) - latest :], maxlen=WINDOW)

    def forget(self, size: int) -> None:
        self._logs.pop(size, None)
