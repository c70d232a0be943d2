"""ALTO's planner between tasks: known tasks, each with its GPUs and its length, in the least time.

Planned again at every arrival and end, which often comes early; what runs stays where it is. The
solver is CP-SAT (the `plan` extra), with a limit that counts its work and not the clock, and one
worker, so that the same tasks give the same plan. Where it finds none within the limit, or is not
installed, the longest tasks go first.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tlora.core.decision import Decision, Reasons, Refuse, Start
from tlora.core.event import Arrival, Event, Tick
from tlora.core.state import JobState, State
from tlora.costs.groups import Costs
from tlora.schedule.placement import choose_gpus
from tlora.schedule.policy import Policy

Solver = Literal["cp-sat", "greedy"]

LIMIT = 1.0
"""CP-SAT's deterministic time: about a second of its work, the same on every machine."""


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    gpus: int
    seconds: float
    """What remains of it."""

    runs: bool = False
    """Began already: its start is 0."""


@dataclass(frozen=True, slots=True)
class Schedule:
    starts: tuple[float, ...]
    """Seconds from now, in the order of the tasks."""

    makespan: float
    solver: Solver
    optimal: bool
    """Proved to be the least."""


def plan(tasks: Sequence[Task], gpus: int, *, limit: float = LIMIT) -> Schedule:
    """Never more GPUs at once than there are. A task that needs more than all is not for here."""
    assert all(task.gpus <= gpus for task in tasks), "a task needs more GPUs than there are"
    if tasks and sum(task.gpus for task in tasks) <= gpus:
        # All at once: nothing is left to be found.
        return Schedule((0.0,) * len(tasks), max(task.seconds for task in tasks), "greedy", True)
    greedy = longest_first(tasks, gpus)
    if not tasks or importlib.util.find_spec("ortools") is None:
        return greedy
    # Heavy, and optional.
    from tlora.schedule.cp_sat import solved_starts

    lengths = [task.seconds for task in tasks]
    found = solved_starts(
        lengths,
        [task.gpus for task in tasks],
        [task.runs for task in tasks],
        gpus,
        hints=greedy.starts,
        limit=limit,
    )
    if found is None:
        return greedy
    exact = as_early(tasks, gpus, found.starts)
    if exact.makespan > greedy.makespan * (1 + 1e-9):
        return greedy
    return Schedule(exact.starts, exact.makespan, "cp-sat", found.optimal)


def lower_bound(tasks: Sequence[Task], gpus: int) -> float:
    """No schedule ends before the longest task, or before all work is dealt evenly."""
    work = sum(task.gpus * task.seconds for task in tasks)
    return max([work / gpus, *(task.seconds for task in tasks)])


def longest_first(tasks: Sequence[Task], gpus: int) -> Schedule:
    """Each as early as it fits, those that run first, then the longest."""
    order = sorted(
        range(len(tasks)), key=lambda i: (not tasks[i].runs, -tasks[i].seconds, tasks[i].name)
    )
    placed: list[tuple[float, float, int]] = []
    starts = [0.0] * len(tasks)
    for i in order:
        task = tasks[i]
        times = sorted({0.0, *(end for _, end, _ in placed)})
        starts[i] = next(
            at for at in times if _peak(placed, at, at + task.seconds) + task.gpus <= gpus
        )
        placed.append((starts[i], starts[i] + task.seconds, task.gpus))
    makespan = max((end for _, end, _ in placed), default=0.0)
    done = makespan <= lower_bound(tasks, gpus) * (1 + 1e-9) if tasks else True
    return Schedule(tuple(starts), makespan, "greedy", done)


def _peak(placed: Sequence[tuple[float, float, int]], begin: float, end: float) -> int:
    """GPUs in use at most between these."""
    over = [each for each in placed if each[0] < end and each[1] > begin]
    times = [begin, *(start for start, _, _ in over if start > begin)]
    return max(sum(gpus for start, stop, gpus in over if start <= at < stop) for at in times)


def as_early(tasks: Sequence[Task], gpus: int, starts: Sequence[float]) -> Schedule:
    """The same order without what rounding to whole numbers left between tasks."""
    order = sorted(range(len(tasks)), key=lambda i: (not tasks[i].runs, starts[i], tasks[i].name))
    placed: list[tuple[float, float, int]] = []
    exact = [0.0] * len(tasks)
    for i in order:
        times = sorted({0.0, *(end for _, end, _ in placed)})
        task = tasks[i]
        exact[i] = next(
            at for at in times if _peak(placed, at, at + task.seconds) + task.gpus <= gpus
        )
        placed.append((exact[i], exact[i] + task.seconds, task.gpus))
    return Schedule(tuple(exact), max(end for _, end, _ in placed), "cp-sat", False)


class Makespan(Policy):
    """Every job a task, alone on the GPUs it brings."""

    name = "makespan"

    def __init__(self, costs: Costs, *, limit: float = LIMIT) -> None:
        self.costs = costs
        self.limit = limit
        self._refused = False
        """The last turn sent a job away: another may have come in for it."""

    def decide(self, state: State, events: Sequence[Event]) -> list[Decision]:
        arrived = any(isinstance(event, Arrival) for event in events)
        quiet = not self._refused and all(isinstance(event, Tick) for event in events)
        if not arrived and (quiet or not state.free):
            return []
        decisions: list[Decision] = []
        jobs: list[JobState] = []
        for job in state.runnable():
            alone = self.costs.solo(job.request)
            need = self.costs.figures(job.request).solo_plan.gpus
            if job.group is None and (not alone.fits or need > len(state.cluster)):
                bound = "memory" if not alone.fits else "GPUs of the cluster"
                reasons = Reasons(why="it does not fit even alone", bound_by=bound)
                decisions.append(Refuse(job=job.name, reasons=reasons))
            elif need <= state.up_gpus:
                jobs.append(job)
        self._refused = bool(decisions)
        needs = [self.costs.figures(job.request).solo_plan.gpus for job in jobs if not job.group]
        if not any(need <= len(state.free) for need in needs):
            # Whatever is planned, nobody can start; plans are made anew when somebody can.
            return decisions
        found = plan([self._task(job) for job in jobs], state.up_gpus, limit=self.limit)
        free = set(state.free)
        number = state.next_group
        order = sorted(zip(found.starts, jobs, strict=True), key=lambda each: each[0])
        for start, job in order:
            figures = self.costs.figures(job.request)
            if job.group is not None or start > 0:
                continue
            gpus = choose_gpus(state.cluster, free, figures.solo_plan.gpus)
            if gpus is None:
                continue
            free -= set(gpus)
            proved = "the least possible" if found.optimal else f"planned by {found.solver}"
            decisions.append(
                Start(
                    group=f"g{number}",
                    base=job.request.base,
                    jobs=(job.name,),
                    gpus=gpus,
                    plan=figures.solo_plan,
                    weights=(1.0,),
                    reasons=Reasons(
                        why=f"all is done in {found.makespan:.0f} s then, {proved}",
                        slowdown=1.0,
                        cost_s=self.costs.start_s(job.request.base),
                    ),
                )
            )
            number += 1
        return decisions

    def _task(self, job: JobState) -> Task:
        figures = self.costs.figures(job.request)
        seconds = max(job.remaining_steps * figures.solo_step_s, 1e-3)
        return Task(job.name, figures.solo_plan.gpus, seconds, job.group is not None)
