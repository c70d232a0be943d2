"""Tokens/s by nano-batch size, made up or recorded, for trying rules that choose the size.

A rule is driven through the same work on a landscape, with seeded noise, and judged by the time it
took over that of somebody who knew the best size all along (regret). The first nano-batch of every
size takes longer, as on a device that compiles for it; the one who knows does not pay for that.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Protocol

from tlora.training.controller import Controller
from tlora.training.size_search import ControllerSettings, Decision, Measure, ladder

LOW, HIGH = 512, 16384
SIZES = ladder(LOW, HIGH)
START, USUAL = 2048, 8192
WARM_UP = 3.0
"""Times as long as the others, for the first nano-batch of a size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Landscape:
    name: str
    rate: Callable[[int, float], float]
    """Tokens/s by size and by the share of the work that is done."""

    sizes: Sequence[int] = SIZES
    limit: int = HIGH
    """Sizes above run out of memory; the rule is told `told_limit`."""

    told_limit: int | None = None
    noise: float = 0.0
    """Standard deviation of the logarithm of a nano-batch's time."""

    stumbles: float = 0.0
    """Share of nano-batches that take three times as long."""

    changes: Sequence[float] = ()
    """Shares of the work at which the group changes."""

    warm_up: float = WARM_UP

    def best_rate(self, done: float) -> float:
        return max(self.rate(size, done) for size in self.sizes if size <= self.limit)


def interpolated(points: dict[int, float]) -> Callable[[int, float], float]:
    """Straight lines between the logarithms of recorded rates."""
    sizes = sorted(points)

    def rate(size: int, _done: float) -> float:
        at = min(max(bisect_right(sizes, size), 1), len(sizes) - 1)
        low, high = sizes[at - 1], sizes[at]
        share = math.log(size / low) / math.log(high / low)
        return points[low] * (points[high] / points[low]) ** share

    return rate


def peaked(peak: int, width: float, top: float = 20_000.0) -> Callable[[int, float], float]:
    """Falls to both sides by the square of the distance in doublings."""
    return lambda size, _done: top * math.exp(-((math.log2(size / peak) / width) ** 2))


def launch_bound(knee: int, top: float = 20_000.0) -> Callable[[int, float], float]:
    """A nano-batch takes at least as long as its launches."""
    return lambda size, _done: top * size / (size**4 + knee**4) ** 0.25


def moved(
    first: Callable[[int, float], float], then: Callable[[int, float], float], at: float
) -> Callable[[int, float], float]:
    return lambda size, done: (first if done < at else then)(size, done)


def slowing(
    rate: Callable[[int, float], float], share: float, within: float = 0.03
) -> Callable[[int, float], float]:
    """A device that is faster by so much at first, as long as it is cool."""
    return lambda size, done: rate(size, done) * (1 + share * math.exp(-done / within))


RECORDED = {
    "8B frozen, eager": {
        512: 6998,
        1024: 13761,
        2048: 18772,
        4096: 18774,
        8192: 18759,
        16384: 18642,
    },
    "8B frozen, compiled": {512: 14536, 2048: 18597, 4096: 18844, 8192: 19062, 16384: 18941},
    "8B with adapters, eager": {
        512: 3345,
        1024: 5901,
        2048: 12644,
        4096: 15320,
        8192: 15750,
        16384: 15804,
    },
    "1B frozen, eager": {512: 11166, 2048: 45331, 8192: 68048},
    "1B with adapters, eager": {512: 7316, 2048: 27274, 8192: 55447},
    "8B fused": {1024: 15384, 2048: 17078, 4096: 17771, 8192: 17520},
    "1B fused": {
        512: 50878,
        1024: 66428,
        2048: 80832,
        4096: 89991,
        8192: 91151,
        16384: 92539,
    },
}
"""One H200, torch 2.11, bfloat16, sequences of 512: tokens/s by tokens per step; fused ones from
h200_tuned_size.jsonl."""


def recorded(name: str, noise: float = 0.01) -> Landscape:
    points = {size: float(rate) for size, rate in RECORDED[name].items()}
    high = max(points)
    return Landscape(
        name=f"{name}, noise {noise:.0%}",
        rate=interpolated(points),
        sizes=tuple(size for size in SIZES if min(points) <= size <= high),
        limit=high,
        noise=noise,
    )


def cooling(name: str) -> Landscape:
    """As recorded, after a beginning that is 5 % faster."""
    usual = recorded(name, 0.003)
    return replace(usual, name=f"{name}, slows by 5%, noise 0.3%", rate=slowing(usual.rate, 0.05))


def landscapes() -> list[Landscape]:
    flat = launch_bound(1, 18_000.0)
    return [
        Landscape(name="flat, no noise", rate=flat),
        *(Landscape(name=f"flat, noise {n:.0%}", rate=flat, noise=n) for n in (0.01, 0.03, 0.1)),
        *(
            Landscape(name=f"peak at 5k, noise {n:.0%}", rate=peaked(5000, 2.5), noise=n)
            for n in (0.0, 0.01, 0.03, 0.1)
        ),
        Landscape(name="peak at 2k, narrow, noise 1%", rate=peaked(2048, 1.6), noise=0.01),
        Landscape(name="peak at 600, noise 1%", rate=peaked(600, 3.5), noise=0.01),
        Landscape(name="rises to the end, noise 1%", rate=launch_bound(6000), noise=0.01),
        Landscape(name="stumbles, noise 2%", rate=launch_bound(2500), noise=0.02, stumbles=0.04),
        Landscape(
            name="the peak moves from 8k to 2k, noise 1%",
            rate=moved(peaked(8192, 2.5), peaked(2048, 2.5), 0.5),
            noise=0.01,
        ),
        Landscape(
            name="the peak moves as the group changes, noise 1%",
            rate=moved(peaked(2048, 2.5), peaked(8192, 2.5, 26_000.0), 0.5),
            noise=0.01,
            changes=(0.5,),
        ),
        Landscape(
            name="ten changes of group, nothing moves, noise 1%",
            rate=launch_bound(2500),
            noise=0.01,
            changes=tuple(at / 11 for at in range(1, 11)),
        ),
        Landscape(
            name="memory ends at 5k, known, noise 1%",
            rate=launch_bound(6000),
            limit=5120,
            told_limit=5120,
            noise=0.01,
        ),
        Landscape(
            name="memory ends at 5k, not known, noise 1%",
            rate=launch_bound(6000),
            limit=5120,
            noise=0.01,
        ),
        *(recorded(name) for name in RECORDED),
        recorded("1B with adapters, eager", 0.05),
        *(cooling(name) for name in ("8B fused", "1B fused")),
    ]


class Rule(Protocol):
    @property
    def budget(self) -> int: ...

    def observe(self, measure: Measure) -> Sequence[Decision]: ...


@dataclass
class Drive:
    """What a rule did on a landscape."""

    landscape: Landscape
    seconds: float = 0.0
    ideal_seconds: float = 0.0
    """Of one who knew."""

    budgets: list[int] = field(default_factory=list[int])
    """One for each nano-batch."""

    done: list[float] = field(default_factory=list[float])
    """Share of the work before each."""

    measures: list[Measure] = field(default_factory=list[Measure])
    decisions: list[Decision] = field(default_factory=list[Decision])
    out_of_memory: int = 0

    @property
    def regret(self) -> float:
        return self.seconds / self.ideal_seconds - 1

    @property
    def changes(self) -> int:
        return changes(self.budgets)

    def late_changes(self, since: float = 0.5) -> int:
        """After so much of the work."""
        late = [b for b, at in zip(self.budgets, self.done, strict=True) if at >= since]
        return changes(late)

    def loss_at_the_end(self, share: float = 0.2) -> float:
        """By what share the sizes of the last part are slower than the best one, by time, noise
        aside."""
        late = [(b, at) for b, at in zip(self.budgets, self.done, strict=True) if at >= 1 - share]
        rate, best = self.landscape.rate, self.landscape.best_rate
        took = sum(budget / rate(budget, at) for budget, at in late)
        ideal = sum(budget / best(at) for budget, at in late)
        return took / ideal - 1


def changes(budgets: Sequence[int]) -> int:
    return sum(one != other for one, other in pairwise(budgets))


OUT_OF_MEMORY_SECONDS = 1.0


def drive(rule: Rule, landscape: Landscape, *, nano_batches: int = 300, seed: int = 0) -> Drive:
    """As much work as fills so many nano-batches of the usual size. What ran out of memory is lost,
    with a second. Noise hits the one who knows, too."""
    draw = Random(f"{landscape.name} {seed}")
    work = nano_batches * USUAL
    run = Drive(landscape)
    seen: set[int] = set()
    tokens = 0
    while tokens < work:
        size, done = rule.budget, tokens / work
        group = sum(at <= done for at in landscape.changes)
        run.budgets.append(size)
        run.done.append(done)
        if size > landscape.limit:
            measure = Measure(size, size, 0, 0.0, group=group, out_of_memory=True)
            run.out_of_memory += 1
            run.seconds += OUT_OF_MEMORY_SECONDS
        else:
            luck = math.exp(draw.gauss(0, landscape.noise))
            luck *= 3.0 if draw.random() < landscape.stumbles else 1.0
            seconds = luck * size / landscape.rate(size, done)
            seconds *= 1.0 if size in seen else landscape.warm_up
            seen.add(size)
            measure = Measure(size, size, size, round(seconds, 6), group=group)
            run.seconds += seconds
            run.ideal_seconds += luck * size / landscape.best_rate(done)
            tokens += size
        run.measures.append(measure)
        run.decisions += rule.observe(measure)
    return run


def settings_for(landscape: Landscape, *, start: int = START) -> ControllerSettings:
    return ControllerSettings(
        sizes=tuple(landscape.sizes),
        start=start,
        idle=4096,
        limit=landscape.told_limit or max(landscape.sizes),
    )


def ours(landscape: Landscape) -> Controller:
    return Controller(settings_for(landscape))


class Informed:
    """Knows every rate, but not when they change: it takes the size that is the cheapest for all
    the work that is left if the rates stay what they were at its latest nano-batch, a first
    nano-batch included. No rule does better, but for luck. With `neighbours` it also has to try the
    next size to each side wherever it comes to another: what a rule does at the least that does
    not know the rates and wants to be sure that nothing beside its size is better."""

    def __init__(
        self, landscape: Landscape, *, neighbours: bool = False, nano_batches: int = 300
    ) -> None:
        self.budget = START
        self._landscape = landscape
        self._sizes = [size for size in landscape.sizes if size <= landscape.limit]
        self._neighbours = neighbours
        self._work = self._left = nano_batches * USUAL
        self._seen: set[int] = set()
        self._best = 0
        self._trials: list[int] = []

    def observe(self, measure: Measure) -> Sequence[Decision]:
        at = 1 - self._left / self._work
        self._left -= measure.tokens
        self._seen.add(measure.budget)
        best = min(self._sizes, key=lambda size: self._seconds(size, at))
        if best != self._best:
            self._best = best
            i_best = self._sizes.index(best)
            beside = self._sizes[max(0, i_best - 1) : i_best + 2] if self._neighbours else []
            # The first nano-batch of a size tells nothing: it warms up.
            self._trials = [size for size in beside if size != best for _ in range(2)] + [best]
        self.budget = self._trials.pop() if self._trials else best
        return ()

    def _seconds(self, size: int, at: float) -> float:
        cold = 0.0 if size in self._seen else (self._landscape.warm_up - 1) * size
        return (self._left + cold) / self._landscape.rate(size, at)


class PublishedRule:
    """As published: N nano-batches to a batch; N += 4 if the batch took less than the one before by
    tau, else N = max(1, N / 2). It knows no noise and no memory; here it is spared sizes beyond the
    limit it is told."""

    def __init__(self, landscape: Landscape, *, tau: float = 0.0) -> None:
        self._sizes = [
            size for size in landscape.sizes if size <= (landscape.told_limit or landscape.limit)
        ]
        self._batch = max(self._sizes)
        self._tau = tau
        self._count = self._left = max(1, self._batch // START)
        self._seconds = 0.0
        self._before: float | None = None

    @property
    def budget(self) -> int:
        each = self._batch / self._count
        return max((size for size in self._sizes if size <= each), default=self._sizes[0])

    def observe(self, measure: Measure) -> Sequence[Decision]:
        # For equal work: what the sizes leave of a batch is made up for in time.
        self._seconds += measure.seconds * self._batch / self._count / max(1, measure.tokens)
        self._left -= 1
        if self._left:
            return ()
        before, self._before = self._before, self._seconds
        if before is not None:
            faster = self._seconds <= before - self._tau * before
            self._count = self._count + 4 if faster else max(1, self._count // 2)
        self._left, self._seconds = self._count, 0.0
        return ()
