# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""The makespan problem as CP-SAT states it; the only module that knows OR-Tools."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ortools.sat.python import cp_model

UNITS = 1000
"""The longest task, in the solver's whole numbers."""


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
    solver = cp_model.CpSolver()
    solver.parameters.num_search_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = limit
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return Starts([solver.value(each) * unit for each in starts], status == cp_model.OPTIMAL)
