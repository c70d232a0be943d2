"""What every job is due: its fair GPUs.

Where tenants have shares, the cluster's GPUs are dealt to them by these, and each tenant's to its
jobs by their priorities; else to all jobs alike. Nobody gets more than it asks for, and what one
leaves goes to the others. With n equal jobs for one GPU each is due 1/n of it; where GPUs abound,
each is due those it brings.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from tlora.core.state import Dues, JobState, State


def fair_gpus(state: State) -> Mapping[str, float]:
    """Of every runnable job, by name; at most the GPUs it brings. Kept with the state for as long
    as the same jobs are runnable."""
    jobs, kept = state.runnable(), state.kept_dues
    if (
        kept is None
        or kept.up_gpus != state.up_gpus
        or kept.shares != state.shares
        or kept.jobs != jobs
    ):
        gpus = _fair_gpus(state, jobs)
        kept = state.kept_dues = Dues(jobs, state.up_gpus, dict(state.shares), gpus)
    return kept.gpus


def _fair_gpus(state: State, jobs: Sequence[JobState]) -> dict[str, float]:
    wanted = [float(job.request.gpus) for job in jobs]
    if sum(wanted) <= state.up_gpus:
        return {job.request.name: gpus for job, gpus in zip(jobs, wanted, strict=True)}
    if not state.shares:
        # One pot for all where no tenant was given a share.
        priorities = [job.request.priority for job in jobs]
        parts = dealt(float(state.up_gpus), wanted, priorities)
        return {job.request.name: part for job, part in zip(jobs, parts, strict=True)}
    tenants: dict[str, list[JobState]] = {}
    for job in jobs:
        tenants.setdefault(job.request.tenant, []).append(job)
    due = dealt(
        float(state.up_gpus),
        [float(sum(job.request.gpus for job in each)) for each in tenants.values()],
        [state.shares.get(tenant, 1.0) for tenant in tenants],
    )
    result: dict[str, float] = {}
    for gpus, each in zip(due, tenants.values(), strict=True):
        parts = dealt(
            gpus,
            [float(job.request.gpus) for job in each],
            [job.request.priority for job in each],
        )
        result.update({job.name: part for job, part in zip(each, parts, strict=True)})
    return result


def dealt(amount: float, wanted: Sequence[float], weights: Sequence[float]) -> list[float]:
    """By weight, nobody more than wanted; what one leaves goes to the others."""
    levels = [want / weight for want, weight in zip(wanted, weights, strict=True)]
    order = sorted(range(len(levels)), key=levels.__getitem__)
    # Summed from the last on: a sum of which a large part is taken away is rounding.
    heavy = list(accumulate(weights[i] for i in reversed(order)))
    result = [0.0] * len(wanted)
    level = 0.0
    for i in order:
        total, want = heavy.pop(), wanted[i]
        part = amount * weights[i] / total
        if part > 0:
            level = amount / total
        else:
            # The amount is lost in rounding beside what others have. All who get less than they
            # want are dealt to at one level.
            part = level * weights[i]
        if want < part:
            part = want
        result[i] = part
        amount -= part
    return result
