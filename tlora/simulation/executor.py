"""An executor whose groups advance as the cost model says.

Between changes every job of a group makes steps at a constant rate, so only changes are computed:
a group remembers when and where it last changed, and one heap knows who completes next. Moving
jobs costs what the profile measured: a joining or leaving job stops its whole group for that long.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tlora.control.breaches import FEWEST_STEPS, WINDOW_S, Breaches, most_due
from tlora.core.clock import ManualClock
from tlora.core.decision import Decision, Join, Move, Pause, Refuse, Resize, Start
from tlora.core.event import (
    Arrival,
    Completion,
    EarlyExit,
    Event,
    GpuFailure,
    GpuRepair,
    SlowdownBreach,
    Straggler,
)
from tlora.core.plan import Plan
from tlora.core.request import JobRequest
from tlora.costs.groups import Costs

NEARLY = 1e-6
"""Of a step: what rounding may leave of a job that is through."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A group between two changes of its jobs, GPUs, plan or speed."""

    group: str
    base: str
    gpus: tuple[int, ...]
    rates: dict[str, float]
    """Job -> steps per second while it trains."""

    start: float
    trains_from: float
    """Until then it stood still: loading, warming up, jobs attached or detached. Never after
    `end`."""

    end: float


class Watcher(Protocol):
    """Somebody who wants to know what groups did, such as metrics."""

    def on_stretch(self, stretch: Stretch) -> None:
        """When it is over; those of a group come in order."""
        ...


@dataclass(slots=True)
class _Group:
    base: str
    gpus: tuple[int, ...]
    plan: Plan
    jobs: dict[str, float]
    """Name -> weight."""

    since: float
    """`steps` are those of this time."""

    stalled_until: float
    rates: dict[str, float] = field(default_factory=dict[str, float])
    """Steps per second, once it is not stalled."""

    version: int = 0
    """Counts changes, so that what the heap holds of an older one is passed over."""

    began: float = 0.0
    trains_from: float = 0.0
    """Of the stretch under way."""

    seen_from: float = 0.0
    """When its rates have been measured."""


class _Suspect(NamedTuple):
    """A group with a job that would be beyond its bound if it were due all its GPUs."""

    version: int
    most_due: dict[str, float]
    """Job -> the GPUs that it may be due before it is beyond."""

    least: float
    """Of these."""


class SimulatedExecutor:
    """`costs` are the truth here; a policy may be given others."""

    def __init__(
        self,
        *,
        clock: ManualClock,
        costs: Costs,
        arrivals: Iterable[JobRequest],
        world: Sequence[Event] = (),
        exits: Mapping[str, tuple[float, str]] | None = None,
        watcher: Watcher | None = None,
        fair_gpus: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """`world`: failures, repairs and stragglers, known here in advance. `exits`: job -> the
        step at which it will end early, and why. `fair_gpus`: what each job is due now; without it
        no breach of a bound is told of."""
        self.clock = clock
        self.costs = costs
        self.regroup_s = 0.0
        """Seconds that groups stood still for moves, pauses and resizes, and to take in again jobs
        that had run before."""

        self._watcher = watcher
        self._exits = dict(exits or {})
        coming: list[Event] = [Arrival(each.arrival_s, each) for each in arrivals]
        coming += world
        # Sorting is stable: what happens at the same time keeps its order.
        self._coming = sorted(coming, key=lambda event: event.time)
        self._next = 0
        self._requests: dict[str, JobRequest] = {}
        self._steps: dict[str, float] = {}
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, str] = {}
        self._speed: dict[int, float] = {}
        self._unsettled: dict[str, None] = {}
        """Groups that have changed, in the order of the first change."""

        self._ends: list[tuple[float, int, str, str, int]] = []
        self._count = itertools.count()
        self._lost: set[str] = set()
        self._fair_gpus = fair_gpus
        self._breaches = Breaches(costs)
        self._suspects: dict[str, _Suspect] = {}
        self._beyond: list[str] = []
        """Of these, the groups in which one is due more than it may be."""

        self._beyond_by: Mapping[str, float] | None = None
        """What was due when that was found; None once a group has changed since."""

    @property
    def idle(self) -> bool:
        return not self._groups and self._next == len(self._coming)

    def wait(self, until: float) -> Sequence[Event]:
        self._lost.clear()
        end = self._next_end()
        coming = self._coming[self._next].time if self._next < len(self._coming) else None
        breach = self._next_breach()
        times = [each for each in (end, coming, breach) if each is not None]
        if not times or min(times) > until:
            self.clock.move_to(until)
            return ()
        now = max(min(times), self.clock.now())
        self.clock.move_to(now)
        events: list[Event] = []
        while (end := self._next_end()) is not None and end <= now:
            _, _, job, _, _ = heapq.heappop(self._ends)
            events.append(self._ended(job))
        while self._next < len(self._coming) and self._coming[self._next].time <= now:
            event = self._coming[self._next]
            self._next += 1
            self._happen(event)
            events.append(event)
        if breach is not None and breach <= now:
            events += self._tell_breaches(now)
        return events

    def progress(self) -> dict[str, float]:
        now = self.clock.now()
        for group in self._groups.values():
            self._bring_up_to(now, group)
        steps = self._steps
        return {job: steps[job] for job in [*self._group_of, *self._lost]}

    def apply(self, decision: Decision) -> None:
        now = self.clock.now()
        match decision:
            case Start():
                ready = now + self.costs.start_s(decision.base)
                group = _Group(decision.base, decision.gpus, decision.plan, {}, now, ready)
                self._groups[decision.group] = group
                if any(self._steps[job] for job in decision.jobs):
                    self.regroup_s += ready - now
                for job, weight in zip(decision.jobs, decision.weights, strict=True):
                    group.jobs[job] = weight
                    self._group_of[job] = decision.group
                self._changed(decision.group)
            case Join():
                if self._steps[decision.job]:
                    self.regroup_s += self.costs.join_s(self._requests[decision.job].base)
                self._attach(decision.job, decision.group, decision.weight)
            case Move():
                self.regroup_s += self.costs.move_s(self._requests[decision.job].base)
                self._detach(decision.job)
                self._attach(decision.job, decision.target, decision.weight)
            case Pause():
                self.regroup_s += self.costs.leave_s(self._requests[decision.job].base)
                self._detach(decision.job)
            case Resize():
                group = self._groups[decision.group]
                self._catch_up(group)
                grows = bool(set(decision.gpus) - set(group.gpus))
                seconds = self.costs.resize_s(group.base, grows=grows)
                self.regroup_s += seconds
                self._stall(group, seconds)
                self._end_stretch(decision.group, group)
                group.gpus, group.plan = decision.gpus, decision.plan
                group.jobs = dict(zip(group.jobs, decision.weights, strict=True))
                self._changed(decision.group)
            case Refuse():
                self._forget(decision.job)

    def close(self) -> None:
        pass

    def _next_breach(self) -> float | None:
        """When the first of those that are beyond their bounds is seen to be: at the end of a
        window in which nothing changed."""
        now, found = self.clock.now(), math.inf
        for name in self._find_beyond():
            at = self._groups[name].seen_from
            if at < now:
                at += WINDOW_S * math.ceil((now - at) / WINDOW_S)
            if at < found and self._broken(name, at):
                found = at
        return None if found == math.inf else found

    def _tell_breaches(self, now: float) -> list[SlowdownBreach]:
        events: list[SlowdownBreach] = []
        for name in self._find_beyond():
            if self._groups[name].seen_from <= now:
                broken = self._broken(name, now)
                self._breaches.told(broken, self._members(name))
                events += broken
        return events

    def _find_beyond(self) -> list[str]:
        """Worked out again only where dues or groups have changed."""
        fair = self._fair_gpus()
        if fair is not self._beyond_by:
            self._suspects = {
                name: suspect
                for name, suspect in self._suspects.items()
                if name in self._groups and self._groups[name].version == suspect.version
            }
            highest = max(fair.values(), default=0.0)
            self._beyond = [
                name
                for name, suspect in self._suspects.items()
                if suspect.least < highest
                and any(fair.get(job, 0.0) > most for job, most in suspect.most_due.items())
            ]
            self._beyond_by = fair
        return self._beyond

    def _broken(self, name: str, at: float) -> list[SlowdownBreach]:
        rates = self._groups[name].rates.values()
        return self._breaches.find(at, self._members(name), rates, self._fair_gpus())

    def _members(self, name: str) -> list[JobRequest]:
        return [self._requests[job] for job in self._groups[name].rates]

    def _happen(self, event: Event) -> None:
        match event:
            case Arrival(request=request):
                self._requests[request.name] = request
                self._steps[request.name] = 0.0
            case GpuFailure(gpus=gpus):
                for name in [n for n, each in self._groups.items() if set(gpus) & set(each.gpus)]:
                    group = self._groups.pop(name)
                    self._catch_up(group)
                    self._end_stretch(name, group)
                    for job in group.jobs:
                        # What is lost since the last checkpoint is less than a batch.
                        self._steps[job] = float(int(self._steps[job] + NEARLY))
                        del self._group_of[job]
                        self._lost.add(job)
            case GpuRepair(gpus=gpus):
                for gpu in gpus:
                    self._set_speed(gpu, 1.0)
            case Straggler(gpu=gpu, speed=speed):
                self._set_speed(gpu, speed)
            case _:
                pass

    def _set_speed(self, gpu: int, speed: float) -> None:
        self._speed[gpu] = speed
        for name, group in self._groups.items():
            if gpu in group.gpus:
                self._catch_up(group)
                self._changed(name)

    def _ended(self, job: str) -> Event:
        now = self.clock.now()
        early = self._exits.get(job)
        self._detach(job)
        self._forget(job)
        return EarlyExit(now, job, early[1]) if early else Completion(now, job)

    def _forget(self, job: str) -> None:
        for each in (self._requests, self._steps, self._exits):
            each.pop(job, None)
        self.costs.forget(job)

    def _attach(self, job: str, name: str, weight: float) -> None:
        group = self._groups[name]
        self._catch_up(group)
        self._stall(group, self.costs.join_s(self._requests[job].base))
        group.jobs[job] = weight
        self._group_of[job] = name
        self._changed(name)

    def _detach(self, job: str) -> None:
        name = self._group_of.pop(job)
        group = self._groups[name]
        self._catch_up(group)
        del group.jobs[job]
        if not group.jobs:
            self._end_stretch(name, group)
            del self._groups[name]
            return
        self._stall(group, self.costs.leave_s(self._requests[job].base))
        self._changed(name)

    def _stall(self, group: _Group, seconds: float) -> None:
        group.stalled_until = max(group.stalled_until, self.clock.now()) + seconds

    def _catch_up(self, group: _Group) -> None:
        """Brings the steps of its jobs up to now."""
        self._bring_up_to(self.clock.now(), group)

    def _bring_up_to(self, now: float, group: _Group) -> None:
        since = group.since
        if group.stalled_until > since:
            since = group.stalled_until
        seconds = now - since
        if seconds > 0:
            steps, jobs = self._steps, group.jobs
            for job, rate in group.rates.items():
                if job in jobs:
                    steps[job] += rate * seconds
        group.since = now

    def _changed(self, name: str) -> None:
        """What it did so far is over. Its new rates are worked out before time goes on, once for
        all changes of this moment."""
        group = self._groups[name]
        self._end_stretch(name, group)
        group.version += 1
        self._unsettled[name] = None

    def _settle(self) -> None:
        for name in self._unsettled:
            if name in self._groups:
                self._set_rates(name, self._groups[name])
        self._unsettled.clear()

    def _set_rates(self, name: str, group: _Group) -> None:
        """New rates, and when the first of its jobs will be through."""
        requests = [self._requests[job] for job in group.jobs]
        found = self.costs.predict(
            requests,
            list(group.jobs.values()),
            group.plan,
            self.costs.cluster.tier(group.gpus),
            speed=min(self._speed.get(gpu, 1.0) for gpu in group.gpus),
        )
        group.rates = dict(zip(group.jobs, found.steps_per_s, strict=True))
        start = max(group.since, group.stalled_until)
        group.began, group.trains_from = group.since, start
        group.seen_from = start + max(WINDOW_S, FEWEST_STEPS / sum(found.steps_per_s))
        most = {
            request.name: most_due(request, rate, self.costs.figures(request).solo_step_s)
            for request, rate in zip(requests, found.steps_per_s, strict=True)
        }
        suspected = {each.name: most[each.name] for each in requests if most[each.name] < each.gpus}
        if suspected:
            self._suspects[name] = _Suspect(group.version, suspected, min(suspected.values()))
            self._beyond_by = None
        at, job = min(
            (start + max(0.0, self._last_step(job) - self._steps[job]) / rate, job)
            for job, rate in group.rates.items()
        )
        heapq.heappush(self._ends, (at, next(self._count), job, name, group.version))

    def _end_stretch(self, name: str, group: _Group) -> None:
        """Of the rates that it had so far."""
        now = self.clock.now()
        self._beyond_by = None
        if self._watcher is not None and group.rates and now > group.began:
            trains_from = min(group.trains_from, now)
            self._watcher.on_stretch(
                Stretch(name, group.base, group.gpus, group.rates, group.began, trains_from, now)
            )
        group.began = now

    def _last_step(self, job: str) -> float:
        total = float(self._requests[job].total_steps)
        return min(total, self._exits[job][0]) if job in self._exits else total

    def _next_end(self) -> float | None:
        self._settle()
        while self._ends:
            at, _, _, name, version = self._ends[0]
            group = self._groups.get(name)
            if group is not None and group.version == version:
                return at
            heapq.heappop(self._ends)
        return None
