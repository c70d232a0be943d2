"""Which devices and jobs are slower than they should be, from the steps that were seen.

A profile may be off by the same factor on every device, and is if it was assumed. So rates are
compared with predictions first, and these ratios with that of the best device: what is left is how
much slower a device is than its neighbours. A window begins anew whenever a device's jobs, weights
or nano-batches change.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tlora.control.breaches import FEWEST_STEPS, WINDOW_S, Breaches
from tlora.core.event import Event, Straggler
from tlora.core.plan import Plan
from tlora.core.request import JobRequest
from tlora.costs.groups import Costs

SLOW, WELL = 0.6, 0.85
"""A device is told of below the one, and taken back above the other. Predictions of groups that
differ are off by a fifth and more (docs/fidelity.md), and nobody should be moved for that."""


@dataclass(frozen=True, slots=True)
class Running:
    """What a device does now."""

    requests: tuple[JobRequest, ...]
    weights: tuple[float, ...]
    bucket: int
    steps: tuple[float, ...]
    """Done so far, of each."""


@dataclass(frozen=True, slots=True)
class _Window:
    key: tuple[object, ...]
    since: float
    steps: tuple[float, ...]


class RateWatch:
    def __init__(
        self,
        costs: Costs,
        *,
        fair_gpus: Callable[[], Mapping[str, float]] = dict,
        window_s: float = WINDOW_S,
    ) -> None:
        """`fair_gpus`: what each job is due now; without it nothing is said of jobs."""
        self.costs = costs
        self.window_s = window_s
        self._fair_gpus = fair_gpus
        self._windows: dict[int, _Window] = {}
        self._ratios: dict[int, float] = {}
        """Of each device, from its last whole window."""

        self._slow: set[int] = set()
        self._jobs = Breaches(costs)

    def check(self, now: float, running: Mapping[int, Running]) -> list[Event]:
        """To be asked every now and then."""
        rates: dict[int, tuple[float, ...]] = {}
        for device in [each for each in self._windows if each not in running]:
            self._forget(device)
        for device, group in running.items():
            key = (group.bucket, group.weights, tuple(each.name for each in group.requests))
            window = self._windows.get(device)
            if window is None or window.key != key:
                self._forget(device)
                self._windows[device] = _Window(key, now, group.steps)
                continue
            made = [new - old for new, old in zip(group.steps, window.steps, strict=True)]
            if now - window.since < self.window_s or sum(made) < FEWEST_STEPS:
                continue
            rates[device] = tuple(each / (now - window.since) for each in made)
            self._ratios[device] = self._ratio(group, rates[device])
            self._windows[device] = _Window(key, now, group.steps)
        if not rates:
            return []
        best = max(self._ratios.values())
        return [*self._stragglers(now, best), *self._breaches(now, best, running, rates)]

    def _forget(self, device: int) -> None:
        self._windows.pop(device, None)
        self._ratios.pop(device, None)

    def _ratio(self, group: Running, rates: tuple[float, ...]) -> float:
        """Work done against work predicted, in GPUs' worth."""
        plan = Plan(bucket=group.bucket)
        tier = self.costs.cluster.tier((0,))
        predicted = self.costs.predict(group.requests, group.weights, plan, tier).worth
        solo = [self.costs.figures(each).solo_step_s for each in group.requests]
        return sum(rate * step for rate, step in zip(rates, solo, strict=True)) / predicted

    def _stragglers(self, now: float, best: float) -> list[Event]:
        events: list[Event] = []
        for device, ratio in self._ratios.items():
            speed = ratio / best
            if speed < SLOW and device not in self._slow:
                self._slow.add(device)
                events.append(Straggler(now, device, round(max(speed, 0.01), 2)))
            elif speed > WELL and device in self._slow:
                self._slow.remove(device)
                events.append(Straggler(now, device, 1.0))
        return events

    def _breaches(
        self,
        now: float,
        best: float,
        running: Mapping[int, Running],
        rates: Mapping[int, tuple[float, ...]],
    ) -> list[Event]:
        fair = self._fair_gpus()
        events: list[Event] = []
        for device, each in rates.items():
            requests = running[device].requests
            found = self._jobs.find(now, requests, each, fair, best)
            self._jobs.told(found, requests)
            events += found
        return events
