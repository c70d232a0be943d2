"""Measuring arms side by side, and the statistics of what was measured.

A round runs every arm once, in order, and the first one again at its end: a machine that gets
slower while a round runs shows in the two times of that arm, whose mean is what counts for it.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tlora.runtime.benchmark.workload import Done


@dataclass(frozen=True, slots=True)
class Run:
    """One pass of an arm over the whole work."""

    seconds: float
    done: Done


Arm = Callable[[], Run]


@dataclass(frozen=True, slots=True)
class Rounds:
    """Seconds of every arm in every measured round."""

    seconds: dict[str, list[float]]
    drifts_pct: list[float]
    """Per round: by how much the first arm was slower at the end than at the start."""

    def median(self, arm: str) -> float:
        return statistics.median(self.seconds[arm])

    def spread_pct(self, arm: str) -> float:
        return spread_pct(self.seconds[arm])

    @property
    def noise_pct(self) -> float | None:
        """The largest spread of any arm; None after a single round, which shows none."""
        spreads = [spread_pct(samples) for samples in self.seconds.values()]
        return max(spreads) if len(self.drifts_pct) > 1 else None

    @property
    def drift_pct(self) -> float:
        return statistics.median(self.drifts_pct)


def spread_pct(samples: Sequence[float]) -> float:
    """From the fastest to the slowest, in percent of the median."""
    return (max(samples) - min(samples)) / statistics.median(samples) * 100


def run_rounds(
    arms: Mapping[str, Arm],
    *,
    repeats: int,
    expected: Mapping[str, Done],
    say: Callable[[str], None],
) -> Rounds:
    """Arms are warm already. Raises if one of them does not do the work expected of it."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    drifts: list[float] = []
    first = next(iter(arms))

    def measured(name: str) -> float:
        run = arms[name]()
        check_work(name, run.done, expected[name])
        return run.seconds

    for number in range(1, repeats + 1):
        for name in arms:
            say(f"round {number} of {repeats}: {name}")
            seconds[name].append(measured(name))
        before, after = seconds[first][-1], measured(first)
        seconds[first][-1] = (before + after) / 2
        drifts.append((after / before - 1) * 100)
    return Rounds(seconds, drifts)


def check_work(name: str, done: Done, expected: Done) -> None:
    if done != expected:
        raise AssertionError(f"'{name}' did {done}, the others {expected}: no comparison")
