# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""The makespan problem as CP-SAT states it; the only module that knows OR-Tools."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ortools.sat.python import cp_model

UNITS = 1000
"""The longest task, in the solver's whole numbers."""


def new_solver(limit: float) -> cp_model.CpSolver:
    """The same answer every time."""
    solver = cp_model.CpSolver()
    solver.parameters.num_search_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = limit
    # It would leave the default handler behind: Ctrl-C would end the process that planned at once.
    solver.parameters.catch_sigint_signal = False
    return solver


class Starts(NamedTuple):
    starts: list[float]
    optimal: bool


def solved_starts(
    seconds: Sequence[float],
    needs: Sequence[int],
    runs: Sequence[bool],
    gpus: int,
    *,
    hints: Sequence[float],
    limit: float,
) -> Starts | None:
    """Tasks of so many seconds and GPUs each; those that run start at 0. `limit` counts the
    solver's work, not time. None if it found nothing within it."""
    unit = max(seconds) / UNITS
    lengths = [max(1, math.ceil(each / unit - 1e-9)) for each in seconds]
    horizon = sum(lengths)
    model = cp_model.CpModel()
    starts = [
        model.new_int_var(0, 0 if running else horizon, f"s{i}") for i, running in enumerate(runs)
    ]
    intervals = [
        model.new_fixed_size_interval_var(start, length, f"i{i}")
        for i, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    model.add_cumulative(intervals, list(needs), gpus)
    makespan = model.new_int_var(0, horizon, "makespan")
    for start, length, hint in zip(starts, lengths, hints, strict=True):
        model.add(makespan >= start + length)
        model.add_hint(start, min(horizon, math.ceil(hint / unit - 1e-9)))
    # Among equal makespans, whatever can start early does.
    model.minimize((len(lengths) * horizon + 1) * makespan + sum(starts))
    solver = new_solver(limit)
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return Starts([solver.value(each) * unit for each in starts], status == cp_model.OPTIMAL)


class Modes(NamedTuple):
    starts: list[float]
    modes: list[int]
    """Which of its options each task takes."""

    optimal: bool


def solved_modes(
    options: Sequence[Sequence[tuple[int, float]]],
    runs: Sequence[bool],
    gpus: int,
    *,
    hints: Sequence[tuple[float, int]],
    limit: float,
) -> Modes | None:
    """Tasks that can be run in several ways, each of so many GPUs and seconds: a way and a start
    for each. The rest is as of `solved_starts`; a hint is a start and a way."""
    unit = max(seconds for ways in options for _, seconds in ways) / UNITS
    lengths = [[max(1, math.ceil(each / unit - 1e-9)) for _, each in ways] for ways in options]
    horizon = sum(max(each) for each in lengths)
    model = cp_model.CpModel()
    makespan = model.new_int_var(0, horizon, "makespan")
    starts, taken, intervals, needs = [], [], [], []
    for i, (ways, each, running) in enumerate(zip(options, lengths, runs, strict=True)):
        start = model.new_int_var(0, 0 if running else horizon, f"s{i}")
        chosen = [model.new_bool_var(f"m{i}.{at}") for at in range(len(ways))]
        model.add_exactly_one(chosen)
        for at, ((need, _), length) in enumerate(zip(ways, each, strict=True)):
            intervals.append(
                model.new_optional_fixed_size_interval_var(start, length, chosen[at], f"i{i}.{at}")
            )
            needs.append(need)
            model.add(makespan >= start + length).only_enforce_if(chosen[at])
        hint_start, hint_way = hints[i]
        model.add_hint(start, min(horizon, math.ceil(hint_start / unit - 1e-9)))
        for at, way in enumerate(chosen):
            model.add_hint(way, at == hint_way)
        starts.append(start)
        taken.append(chosen)
    model.add_cumulative(intervals, needs, gpus)
    model.minimize((len(starts) * horizon + 1) * makespan + sum(starts))
    solver = new_solver(limit)
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    modes = [[solver.value(way) for way in chosen].index(1) for chosen in taken]
    found = [solver.value(each) * unit for each in starts]
    return Modes(found, modes, status == cp_model.OPTIMAL)
