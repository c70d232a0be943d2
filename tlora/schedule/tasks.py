"""Several sweeps on several devices: which task gets how many of them, and when.

A task is many trials that can be dealt to any number of devices. So a plan chooses a number of
devices and a start for each task, such that all are done soonest. It is made again whenever a
device has nothing to do, which early exit brings about sooner than planned; who trains stays where
it is. The solver and its limit are those of `makespan.py`, and so is what happens without it.

Values in, values out: no clock, no device, no randomness.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tlora.schedule.makespan import LIMIT, Solver, Task, as_early, longest_first

NOW_S = 1e-6
"""Starts before this are at once."""


@dataclass(frozen=True, slots=True)
class TaskWork:
    name: str
    phases: tuple[tuple[float, ...], ...]
    """Seconds that are left of each trial on one device. A phase begins when all of the one before
    are through: so it is when all are warmed up before some are chosen."""

    devices: int = 0
    """That its trials are on now: it keeps these. None: it has not begun."""

    @property
    def most(self) -> int:
        """More devices than this are of no use to it."""
        return max([1, self.devices, *(len(phase) for phase in self.phases)])

    @property
    def now(self) -> int:
        """Trials that can train at once."""
        return len(self.phases[0]) if self.phases else 0


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    start: float
    """Seconds from now."""

    seconds: float
    devices: int


@dataclass(frozen=True, slots=True)
class TaskPlan:
    spans: tuple[Span, ...]
    """In the order of the tasks."""

    makespan: float
    one_after_another: float
    """The same tasks in turn, each with all devices."""

    solver: Solver
    optimal: bool
    """Proved to be the least."""


def seconds_on(work: TaskWork, devices: int) -> float:
    return sum(longest_part(phase, devices) for phase in work.phases)


def longest_part(seconds: Sequence[float], parts: int) -> float:
    """Dealt longest first, each to the part that has least."""
    loads = [0.0] * parts
    for each in sorted(seconds, reverse=True):
        loads[loads.index(min(loads))] += each
    return max(loads)


def plan_tasks(works: Sequence[TaskWork], devices: int, *, limit: float = LIMIT) -> TaskPlan:
    """Tasks that run start at once, on no fewer devices than they have."""
    assert sum(work.devices for work in works) <= devices, "tasks have more devices than there are"
    in_turn = sum(seconds_on(work, devices) for work in works)
    if not works:
        return TaskPlan((), 0.0, 0.0, "greedy", True)
    options = [_options(work, devices) for work in works]
    greedy = _greedy(works, options, devices)
    best, solver, optimal = greedy, "greedy", False
    if importlib.util.find_spec("ortools") is not None:
        # Heavy, and optional.
        from tlora.schedule.cp_sat import solved_modes

        found = solved_modes(
            options,
            [work.devices > 0 for work in works],
            devices,
            hints=[
                (span.start, [need for need, _ in ways].index(span.devices))
                for span, ways in zip(greedy, options, strict=True)
            ],
            limit=limit,
        )
        if found is not None:
            ways = [each[mode] for each, mode in zip(options, found.modes, strict=True)]
            tasks = _tasks(works, ways)
            solved = _spans(tasks, as_early(tasks, devices, found.starts).starts)
            if _end(solved) <= _end(greedy) * (1 + 1e-9):
                best, solver, optimal = solved, "cp-sat", found.optimal
    return TaskPlan(best, _end(best), in_turn, solver, optimal)


def _options(work: TaskWork, devices: int) -> list[tuple[int, float]]:
    """Ways to run it: devices and seconds. More devices that make it no faster are left out."""
    ways: list[tuple[int, float]] = []
    for each in range(max(1, work.devices), min(devices, work.most) + 1):
        seconds = max(seconds_on(work, each), 1e-3)
        if not ways or seconds < ways[-1][1] * (1 - 1e-9):
            ways.append((each, seconds))
    return ways


def _greedy(
    works: Sequence[TaskWork], options: Sequence[Sequence[tuple[int, float]]], devices: int
) -> tuple[Span, ...]:
    """Everyone on the fewest devices, the longest first; then whichever task gains most by more."""
    modes = [0] * len(works)

    def tried(changed: Sequence[int]) -> tuple[Span, ...]:
        ways = [each[mode] for each, mode in zip(options, changed, strict=True)]
        tasks = _tasks(works, ways)
        return _spans(tasks, longest_first(tasks, devices).starts)

    best = tried(modes)
    while True:
        wider = [
            [mode + (at == i) for at, mode in enumerate(modes)]
            for i in range(len(works))
            if modes[i] + 1 < len(options[i]) and _starts_fit(works, options, modes, i, devices)
        ]
        found = min(((_end(spans := tried(each)), each, spans) for each in wider), default=None)
        if found is None or found[0] >= _end(best) * (1 - 1e-9):
            return best
        modes, best = found[1], found[2]


def _starts_fit(
    works: Sequence[TaskWork],
    options: Sequence[Sequence[tuple[int, float]]],
    modes: Sequence[int],
    wider: int,
    devices: int,
) -> bool:
    """All that run start now: they must have room beside each other."""
    used = sum(
        options[i][modes[i] + (i == wider)][0] for i, work in enumerate(works) if work.devices
    )
    return used <= devices


def _tasks(works: Sequence[TaskWork], ways: Sequence[tuple[int, float]]) -> list[Task]:
    return [
        Task(work.name, need, seconds, work.devices > 0)
        for work, (need, seconds) in zip(works, ways, strict=True)
    ]


def _spans(tasks: Sequence[Task], starts: Sequence[float]) -> tuple[Span, ...]:
    return tuple(
        Span(task.name, start, task.seconds, task.gpus)
        for task, start in zip(tasks, starts, strict=True)
    )


def _end(spans: Sequence[Span]) -> float:
    return max(span.start + span.seconds for span in spans)


def lanes(plan: TaskPlan, devices: int) -> dict[str, tuple[int, ...]]:
    """The devices of each task if all goes as planned: those that are free first."""
    free_at = [0.0] * devices
    found: dict[str, tuple[int, ...]] = {}
    for span in sorted(plan.spans, key=lambda each: (each.start, each.name)):
        free = [at for at, end in enumerate(free_at) if end <= span.start + NOW_S]
        found[span.name] = tuple(free[: span.devices])
        for device in found[span.name]:
            free_at[device] = span.start + span.seconds
    return found


def dealt(
    plan: TaskPlan, works: Sequence[TaskWork], on: Mapping[int, str | None]
) -> dict[int, str]:
    """Who has which device now. `on`: the devices that are up, and whose trials are there. These
    stay; tasks that start now get what the plan says; what is left then goes to whoever has trials
    for it, in the order of the plan, for a task may grow and a device that idles is lost."""
    order = sorted(plan.spans, key=lambda each: (each.start, -each.seconds, each.name))
    found = {device: task for device, task in on.items() if task is not None}
    free = sorted(device for device, task in on.items() if task is None)

    def give(task: str, wanted: int) -> None:
        while free and list(found.values()).count(task) < wanted:
            found[free.pop(0)] = task

    for span in order:
        if span.start <= NOW_S:
            give(span.name, span.devices)
    open_trials = {work.name: work.now for work in works}
    for span in order:
        give(span.name, open_trials[span.name])
    return found


def dealt_fixed(on: Mapping[int, str | None], homes: Mapping[str, int]) -> dict[int, str]:
    """Every task on a device of its own choice, the first of those that are not over: what is to be
    compared with."""
    found: dict[int, str] = {}
    for task, device in homes.items():
        if device in on:
            found.setdefault(device, task)
    return found


def balanced(
    loads: Mapping[int, Mapping[str, float]], *, worth_s: float = 0.0
) -> list[tuple[str, int]]:
    """Trials to be moved within a task, each with its new device: from the fullest device to one
    that has none. `loads`: seconds left by trial; what is over in `worth_s` stays."""
    kept = {device: dict(trials) for device, trials in loads.items()}
    moves: list[tuple[str, int]] = []
    while True:
        idle = sorted(device for device, trials in kept.items() if not trials)
        full = max(kept, key=lambda device: (sum(kept[device].values()), -device), default=None)
        if full is None or not idle or len(kept[full]) < 2:
            return moves
        if sum(kept[full].values()) < worth_s:
            return moves
        # Half of it, by the trials that go one by one into the lighter part.
        stays, goes = 0.0, 0.0
        for name, seconds in sorted(kept[full].items(), key=lambda each: (-each[1], each[0])):
            if goes < stays:
                goes += seconds
                moves.append((name, idle[0]))
                kept[idle[0]][name] = kept[full].pop(name)
            else:
                stays += seconds
