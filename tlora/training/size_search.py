"""What the search for the size of nano-batches is told, may choose and says (controller.py)."""

import math
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Measure:
    """One nano-batch, as the controller sees it."""

    budget: int
    """The size it was composed for."""

    rows: int
    tokens: int
    """Useful ones."""

    seconds: float
    train: bool = True
    full: bool = True
    """Not cut short for want of work."""

    group: int = 0
    """Changes whenever a job comes or goes."""

    out_of_memory: bool = False


class Action(Enum):
    DOUBLE = "double"
    STEP_UP = "step up"
    STEP_DOWN = "step down"
    HALVE = "halve"
    PROBE = "probe"
    BACK = "back"
    AGAIN = "again"
    SETTLE = "settle"
    RESTART = "restart"
    HOLD = "hold"
    LIMIT = "limit"


@dataclass(frozen=True, slots=True)
class Decision:
    """A line of the trace."""

    nano_batch: int
    """After so many, all told."""

    action: Action
    measured: int
    """The size that was judged."""

    tokens_per_s: float | None
    budget: int
    """The size from now on."""

    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerSettings:
    sizes: tuple[int, ...]
    """Budgets to choose from, rising."""

    start: int
    """Where to begin: one of the sizes."""

    idle: int
    """Where to rest if no nano-batch is ever filled: one of the sizes, at least `start`."""

    limit: int
    """The largest size that memory allows."""

    warm_ups: int = 1
    """First nano-batches of a number of rows that do not count: a device compiles for them."""

    least: int = 3
    """Measures before a size is judged."""

    most: int = 12
    """Measures after which it is judged in any case."""

    deviations: float = 2.0
    """While searching, a difference counts beyond so many standard errors."""

    probe_deviations: float = 4.0
    """The same for a size beside a plateau, which is left for something clearly better only."""

    alarm_deviations: float = 5.0
    """The same for a change at the best size itself, which is looked for all the time."""

    worth: float = 0.01
    """A smaller gain is no reason for a larger nano-batch."""

    patience: int = 12
    """Nano-batches in a row that do not fill a size before it is given up."""

    probe_after: int = 50
    """Nano-batches before the first look beside a plateau; before each further one twice as many as
    there were before the last."""

    probe_share: float = 0.02
    """Of the time, that looking may cost."""

    def __post_init__(self) -> None:
        if list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise ValueError(f"sizes must rise from 1 or more, got {self.sizes}")
        if self.start not in self.sizes or self.idle not in self.sizes or self.idle < self.start:
            raise ValueError(f"start {self.start} and idle {self.idle} must rise among the sizes")
        if self.limit < self.start:
            raise ValueError(f"the limit {self.limit} is below the start {self.start}")


QUARTERS = (4, 5, 6, 7)


def ladder(low: int, high: int) -> tuple[int, ...]:
    """Four steps from each doubling of `low` to the next."""
    octaves = range(max(0, int(math.log2(high / low))) + 1)
    rungs = {low * part * 2**octave // 4 for octave in octaves for part in QUARTERS}
    return tuple(sorted(rung for rung in rungs if rung <= high))
