"""Measuring arms side by side, and the statistics of what was measured.

A round runs every arm once, in order, and the first one again at its end: a machine that gets
slower while a round runs shows in the two times of that arm, whose mean is what counts for it.
Arms are warmed up right before their first run, so that there are figures early; once the time is
over, rounds end with what was measured.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tlora.model.memory import is_out_of_memory
from tlora.runtime.benchmark.workload import Done


@dataclass(frozen=True, slots=True)
class Run:
    """One pass of an arm over the whole work."""

    seconds: float
    done: Done


Arm = Callable[[], Run]

Prepare = Callable[[], Arm]
"""Makes an arm and warms it up. May raise LeftOut."""


class LeftOut(Exception):
    """This arm does not run here: why, or nothing if there is nothing to say."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Seconds of every arm in every measured round; an arm that never ran is not there."""

    seconds: dict[str, list[float]]
    drifts_pct: list[float]
    """Per round: by how much the first arm was slower at the end than at the start."""

    notes: list[str] = field(default_factory=list[str])
    """What was left out, and why."""

    on_time: bool = True
    out_of_memory: list[str] = field(default_factory=list[str])
    """Arms that ran out of it, and have no times."""

    @property
    def complete(self) -> bool:
        """Neither time nor memory ran out."""
        return self.on_time and not self.out_of_memory

    def followed_by(self, later: "Rounds") -> "Rounds":
        """With the arms of rounds that were run afterwards, in which some may have had more
        memory."""
        return Rounds(
            {**self.seconds, **later.seconds},
            self.drifts_pct,
            [*self.notes, *later.notes],
            self.on_time and later.on_time,
            [name for name in self.out_of_memory if name not in later.seconds],
        )

    def median(self, arm: str) -> float:
        return statistics.median(self.seconds[arm])

    def spread_pct(self, arm: str) -> float:
        return spread_pct(self.seconds[arm])

    @property
    def repeats(self) -> int:
        """The least of any arm that ran."""
        return min(map(len, self.seconds.values()))

    @property
    def noise_pct(self) -> float | None:
        """The largest spread of any arm; None after a single round, which shows none."""
        spreads = [spread_pct(samples) for samples in self.seconds.values() if len(samples) > 1]
        return max(spreads) if spreads else None

    @property
    def drift_pct(self) -> float | None:
        return statistics.median(self.drifts_pct) if self.drifts_pct else None


def spread_pct(samples: Sequence[float]) -> float:
    """From the fastest to the slowest, in percent of the median."""
    return (max(samples) - min(samples)) / statistics.median(samples) * 100


def run_rounds(
    arms: Mapping[str, Prepare],
    *,
    repeats: int,
    expected: Mapping[str, Done],
    say: Callable[[str], None],
    until: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> Rounds:
    """No arm is begun that would not end by `until`, the first one's run at the end of the round
    included, as far as is known from the round before; but the first arm runs once, whatever the
    time. Raises if an arm does not do the work expected of it."""
    ready: dict[str, Arm] = {}
    seconds: dict[str, list[float]] = {}
    drifts: list[float] = []
    notes: list[str] = []
    taken: dict[str, float] = {}
    first = next(iter(arms))
    out_of_memory: list[str] = []

    def measured(name: str) -> float:
        started = clock()
        run = ready[name]()
        check_work(name, run.done, expected[name])
        taken[name] = clock() - started
        return run.seconds

    def in_time(name: str) -> bool:
        needed = taken.get(name, 0.0) + (taken.get(first, 0.0) if name != first else 0.0)
        return not seconds or clock() + needed < until

    def run_arm(name: str) -> bool:
        """Whether there was time for it."""
        if not in_time(name):
            return False
        if name not in ready:
            say(f"warming up: {name}")
            ready[name] = arms[name]()
            if not in_time(name):
                return False
        say(f"round {number} of {repeats}: {name}")
        spent = measured(name)
        seconds.setdefault(name, []).append(spent)
        return True

    waiting = list(arms)
    on_time = True
    for number in range(1, repeats + 1):
        before = sum(map(len, seconds.values()))
        for name in list(waiting):
            try:
                on_time = run_arm(name)
            except LeftOut as reason:
                waiting.remove(name)
                notes += [f"{name}: {reason}"] if str(reason) else []
            except Exception as error:
                if name == first or not is_out_of_memory(error):
                    raise
                waiting.remove(name)
                ready.pop(name, None)
                out_of_memory.append(name)
                notes.append(f"{name}: out of memory in round {number}")
            if not on_time:
                break
        # The first arm alone, in a round that was broken off, has nothing to be compared with.
        if on_time or sum(map(len, seconds.values())) > before + 1:
            once, again = seconds[first][-1], measured(first)
            seconds[first][-1] = (once + again) / 2
            drifts.append((again / once - 1) * 100)
        if not on_time:
            notes += out_of_time(waiting, seconds, repeats)
            break
    return Rounds(seconds, drifts, notes, on_time, out_of_memory)


def out_of_time(
    waiting: Sequence[str], seconds: Mapping[str, Sequence[float]], repeats: int
) -> list[str]:
    missing = [name for name in waiting if name not in seconds]
    least = min(len(seconds[name]) for name in waiting if name in seconds)
    found = [f"time was over: {least} of {repeats} rounds"] if least < repeats else []
    return [*found, *(f"{name}: left out, time was over" for name in missing)]


def check_work(name: str, done: Done, expected: Done) -> None:
    if done != expected:
        raise AssertionError(f"'{name}' did {done}, the others {expected}: no comparison")
