"""All that a policy may look at: the cluster, the jobs that are not done, the groups.

The loop owns it and is the only one to change it: by `advance` (time and progress), by
`happen` (events) and by `apply` (decisions, which it checks). Everything in it follows from the
recorded events, progress and decisions, so a replay has the same state at every decision.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tlora.core.cluster import Cluster
from tlora.core.decision import Decision, Join, Move, Pause, Refuse, Resize, Start
from tlora.core.event import (
    Arrival,
    Completion,
    EarlyExit,
    Event,
    GpuFailure,
    GpuRepair,
    JobFailure,
    SlowdownBreach,
    Straggler,
    Tick,
)
from tlora.core.line import Line
from tlora.core.plan import Plan
from tlora.core.request import JobRequest

Outcome = Literal["completed", "exited", "failed", "refused"]


@dataclass(slots=True)
class JobState:
    """A job that is waiting or running."""

    request: JobRequest
    steps_done: float = 0.0
    """May lie between whole steps, where part of a batch is through."""

    group: str | None = None
    """None: it waits."""

    since_s: float = 0.0
    """When it last began to wait, or was last placed in or moved to a group."""

    waited_s: float = 0.0
    """In all, since it arrived, without a group. Kept up to date while the job is runnable, and
    when it ends."""

    counted_s: float = 0.0
    """Up to when `waited_s` is counted, while it waits."""

    fair_s: float = 0.0
    """What it was due: the integral of its fair GPUs / its own GPUs over its time here. A job that
    got just its due would have made fair_s of solo training."""

    moves: int = 0
    """How often it was taken out of a group by a decision: moves and pauses."""

    number: int = 0
    """How many arrived before it."""

    @property
    def name(self) -> str:
        return self.request.name

    @property
    def remaining_steps(self) -> float:
        return max(0.0, self.request.total_steps - self.steps_done)


@dataclass(slots=True)
class GroupState:
    name: str
    base: str
    gpus: tuple[int, ...]
    plan: Plan
    jobs: dict[str, float]
    """Name -> weight, in the order of joining."""

    since_s: float
    changed_s: float
    """When a decision last changed its jobs, GPUs or plan."""

    changes: int = 0
    """Of its jobs: how often one came or went."""


class Dues(NamedTuple):
    """The fair GPUs of some jobs, and what they depend on."""

    jobs: list[JobState]
    up_gpus: int
    shares: dict[str, float]
    gpus: dict[str, float]


@dataclass(slots=True)
class State:
    cluster: Cluster
    shares: dict[str, float] = field(default_factory=dict[str, float])
    """Tenant -> its part of the cluster; a tenant that is not named has 1. Empty: tenants do not
    matter, all jobs are due alike."""

    max_runnable: int | None = None
    """Jobs beyond so many are not looked at until others end: those that wait come in in order of
    arrival, or as `line` has them."""

    line: Line | None = None
    """Of all that wait, where the longest relative wait comes first (`overtake`)."""

    now: float = 0.0
    jobs: dict[str, JobState] = field(default_factory=dict[str, JobState])
    """Those not done, in order of arrival."""

    groups: dict[str, GroupState] = field(default_factory=dict[str, GroupState])
    free: set[int] = field(default_factory=set[int])
    """GPUs that are up and in no group."""

    down: set[int] = field(default_factory=set[int])
    speed: dict[int, float] = field(default_factory=dict[int, float])
    """GPU -> the part of its usual speed at which it was seen to run, where that is not 1."""

    served: dict[str, float] = field(default_factory=dict[str, float])
    """Tenant -> GPU-seconds that its running jobs' groups held, by their weights."""

    due: dict[str, float] = field(default_factory=dict[str, float])
    """Tenant -> GPU-seconds that were its fair due."""

    outcomes: dict[str, Outcome] = field(default_factory=dict[str, Outcome])
    next_group: int = 0
    """A policy names new groups g<next_group> and above; numbers are not used twice."""

    arrived: int = 0
    revision: int = 0
    """Counts events and decisions. While it is the same, only time and progress have changed, and
    what was worked out from anything else still holds."""

    kept_dues: Dues | None = field(default=None, repr=False, compare=False)
    """What fairness.py worked out last; of no meaning to others."""

    _outside: list[str] = field(default_factory=list[str], repr=False, compare=False)
    _runnable: tuple[int, list[JobState]] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.groups:
            self.free = set(range(len(self.cluster))) - self.down

    @property
    def up_gpus(self) -> int:
        return len(self.cluster) - len(self.down)

    @property
    def is_damaged(self) -> bool:
        """GPUs are lost or slow: some jobs may have to wait until they are back."""
        return bool(self.down or self.speed)

    def runnable(self) -> list[JobState]:
        """Those that count, in order of arrival: all that run, and waiting ones up to the limit.
        Not to be changed: it is kept while nothing happens."""
        kept = self._runnable
        if kept is None or kept[0] != self.revision:
            kept = self._runnable = (self.revision, self._find_runnable())
        return kept[1]

    def outside(self) -> list[JobState]:
        """Of those that are beyond the limit, some that should come in next, first ones first;
        nobody without a line."""
        self.runnable()
        if self.line is None:
            return []
        return [self.jobs[name] for name in self.line.by_wait(self._outside, self.now)]

    def overtake(self) -> None:
        """From now on jobs come in by their relative waits, where there is a limit."""
        if self.max_runnable is not None and self.line is None:
            self.line = Line()
            for job in self.jobs.values():
                if job.group is None:
                    self._queue(job)
            self.revision += 1

    def _queue(self, job: JobState) -> None:
        if self.line is not None:
            request = job.request
            tokens = max(1.0, job.remaining_steps) * request.load.batch_tokens
            self.line.add(
                request.name,
                began=job.counted_s - job.waited_s,
                number=job.number,
                size=tokens / request.gpus,
            )

    def _find_runnable(self) -> list[JobState]:
        self._outside = []
        if self.max_runnable is None or len(self.jobs) <= self.max_runnable:
            return list(self.jobs.values())
        running = sum(len(group.jobs) for group in self.groups.values())
        room = self.max_runnable - running
        if self.line is not None:
            inside, self._outside = self.line.split(room, self.now)
            names = [name for group in self.groups.values() for name in group.jobs]
            return sorted([self.jobs[name] for name in [*names, *inside]], key=_number)
        kept: list[JobState] = []
        for job in self.jobs.values():
            if job.group is not None:
                kept.append(job)
                running -= 1
            elif room > 0:
                kept.append(job)
                room -= 1
            # Whoever runs was once among the first, so a long queue is not walked to its end.
            if not running and room <= 0:
                break
        return kept

    def waiting(self) -> list[JobState]:
        """Those of the runnable jobs that have no group."""
        return [job for job in self.runnable() if job.group is None]

    def advance(
        self, now: float, progress: Mapping[str, float], fair_gpus: Mapping[str, float]
    ) -> None:
        """To `now`, with the steps that running jobs have made, and what each runnable one was due
        since. Jobs that are not runnable are not touched: what they wait is counted when they come
        in, at what they are due then."""
        seconds = now - self.now
        assert seconds >= 0, f"time went back from {self.now} to {now}"
        here = self.jobs
        for name, steps in progress.items():
            if name in here:
                here[name].steps_done = steps
        if seconds:
            jobs, due, served = self.jobs, self.due, self.served
            for name, gpus in fair_gpus.items():
                job = jobs[name]
                request = job.request
                gained = seconds * gpus
                if job.group is None:
                    # With what it waited beyond the limit, at what it is due now.
                    waited = now - job.counted_s
                    job.fair_s += waited * gpus / request.gpus
                    job.waited_s += waited
                    job.counted_s = now
                else:
                    job.fair_s += gained / request.gpus
                tenant = request.tenant
                due[tenant] = due.get(tenant, 0.0) + gained
            for group in self.groups.values():
                held = seconds * len(group.gpus)
                weights = sum(group.jobs.values())
                for name, weight in group.jobs.items():
                    tenant = jobs[name].request.tenant
                    served[tenant] = served.get(tenant, 0.0) + held * weight / weights
        self.now = now

    def happen(self, event: Event) -> None:
        self.revision += 1
        match event:
            case Arrival(request=request):
                # One that did not come to its end may go on, if a person wants it: one that was
                # refused is looked at anew.
                outcome = self.outcomes.pop(request.name, None)
                known = request.name in self.jobs or outcome == "completed"
                assert not known, f"job '{request.name}' arrived twice"
                self.jobs[request.name] = JobState(
                    request, since_s=self.now, counted_s=self.now, number=self.arrived
                )
                self.arrived += 1
                self._queue(self.jobs[request.name])
            case Completion(job=name):
                self._end(name, "completed")
            case EarlyExit(job=name):
                self._end(name, "exited")
            case JobFailure(job=name):
                self._end(name, "failed")
            case GpuFailure(gpus=gpus):
                self.down |= set(gpus)
                hit = [each for each in self.groups.values() if self.down & set(each.gpus)]
                for group in hit:
                    for name in list(group.jobs):
                        self._take_out(self.jobs[name])
                self.free -= self.down
            case GpuRepair(gpus=gpus):
                self.free |= set(gpus) & self.down
                self.down -= set(gpus)
                for gpu in gpus:
                    self.speed.pop(gpu, None)
            case Straggler(gpu=gpu, speed=speed):
                self.speed[gpu] = speed
                if speed == 1:
                    del self.speed[gpu]
            case SlowdownBreach() | Tick():
                # Nothing here changes by them.
                self.revision -= 1

    def apply(self, decision: Decision) -> None:
        """Raises AssertionError for what no policy may decide: a GPU booked twice, a job in two
        groups, a base that differs."""
        self.revision += 1
        match decision:
            case Start():
                assert decision.group not in self.groups, f"{decision.group} is there already"
                assert decision.jobs, f"{decision.group} has no jobs"
                self._book(decision.group, (), decision.gpus, decision.plan)
                self.groups[decision.group] = GroupState(
                    decision.group,
                    decision.base,
                    decision.gpus,
                    decision.plan,
                    {},
                    self.now,
                    self.now,
                )
                for name, weight in zip(decision.jobs, decision.weights, strict=True):
                    self._put_in(name, decision.group, weight)
                if decision.group[1:].isdecimal():
                    self.next_group = max(self.next_group, int(decision.group[1:]) + 1)
            case Join():
                self._put_in(decision.job, decision.group, decision.weight)
            case Move():
                job = self.jobs[decision.job]
                assert job.group == decision.source, f"{job.name} is not in {decision.source}"
                self._take_out(job)
                job.moves += 1
                self._put_in(decision.job, decision.target, decision.weight)
            case Pause():
                job = self.jobs[decision.job]
                assert job.group == decision.group, f"{job.name} is not in {decision.group}"
                self._take_out(job)
                job.moves += 1
            case Resize():
                group = self.groups[decision.group]
                self._book(group.name, group.gpus, decision.gpus, decision.plan)
                group.gpus, group.plan, group.changed_s = decision.gpus, decision.plan, self.now
                group.jobs = dict(zip(group.jobs, decision.weights, strict=True))
            case Refuse():
                assert self.jobs[decision.job].group is None, f"{decision.job} is running"
                self._end(decision.job, "refused")

    def check(self) -> None:
        """Raises AssertionError where the books do not agree."""
        seen: set[int] = set()
        for group in self.groups.values():
            assert group.jobs, f"{group.name} has no jobs"
            assert not seen & set(group.gpus), f"{group.name} shares a GPU"
            seen |= set(group.gpus)
            for name in group.jobs:
                assert self.jobs[name].group == group.name, f"{name} is not in {group.name}"
        assert not seen & self.down, "a group holds a GPU that is down"
        everything = set(range(len(self.cluster)))
        assert self.free == everything - seen - self.down, "free GPUs are miscounted"
        for job in self.jobs.values():
            assert job.group is None or job.name in self.groups[job.group].jobs

    def _book(self, group: str, old: Iterable[int], new: tuple[int, ...], plan: Plan) -> None:
        assert len(set(new)) == len(new) == plan.gpus, f"{group}: {len(new)} GPUs for {plan}"
        free = self.free | set(old)
        taken = set(new) - free
        assert not taken, f"{group}: GPUs {sorted(taken)} are not free"
        self.free = free - set(new)

    def _put_in(self, name: str, group_name: str, weight: float) -> None:
        job, group = self.jobs[name], self.groups[group_name]
        assert job.group is None, f"{name} is in {job.group} already"
        assert job.request.base == group.base, f"{name} has another base than {group_name}"
        assert weight > 0, f"{name} has no weight"
        if self.line is not None:
            self.line.remove(name)
        job.waited_s += self.now - job.counted_s
        job.group, job.since_s, job.counted_s = group_name, self.now, self.now
        group.jobs[name] = weight
        group.changed_s = self.now
        group.changes += 1

    def _take_out(self, job: JobState) -> None:
        if job.group is None:
            return
        group = self.groups[job.group]
        del group.jobs[job.name]
        job.group, job.since_s, job.counted_s = None, self.now, self.now
        self._queue(job)
        group.changed_s = self.now
        group.changes += 1
        if not group.jobs:
            self.free |= set(group.gpus) - self.down
            del self.groups[group.name]

    def _end(self, name: str, outcome: Outcome) -> None:
        job = self.jobs[name]
        self._take_out(job)
        if self.line is not None:
            self.line.remove(name)
        job.waited_s += self.now - job.counted_s
        job.counted_s = self.now
        del self.jobs[name]
        self.outcomes[name] = outcome


def _number(job: JobState) -> int:
    return job.number
