"""What every job is due: its fair GPUs.

Where tenants have shares, the cluster's GPUs are dealt to them by these, and each tenant's to its
jobs by their priorities; else to all jobs alike. Nobody gets more than it asks for, and what one
leaves goes to the others. With n equal jobs for one GPU each is due 1/n of it; where GPUs abound,
each is due those it brings.
"""

from collections.abc import Sequence

from tlora.core.state import JobState, State


def fair_gpus(state: State, jobs: Sequence[JobState] | None = None) -> dict[str, float]:
    """Of every runnable job, by name; at most the GPUs it brings. `jobs`: those, where they are
    known."""
    jobs = state.runnable() if jobs is None else jobs
    if sum(job.request.gpus for job in jobs) <= state.up_gpus:
        return {job.name: float(job.request.gpus) for job in jobs}
    tenants: dict[str, list[JobState]] = {}
    for job in jobs:
        # One pot for all where no tenant was given a share.
        tenants.setdefault(job.request.tenant if state.shares else "", []).append(job)
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
    heavy = sum(weights)
    result = [0.0] * len(wanted)
    for i in order:
        result[i] = min(wanted[i], amount * weights[i] / heavy)
        amount -= result[i]
        heavy -= weights[i]
    return result
