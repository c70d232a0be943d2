"""For which trials of a sweep a pool is made: those that may be attached together."""

from collections.abc import Mapping

from tlora.core.job import JobSpec
from tlora.core.sweep import SweepSpec
from tlora.runtime.sweeps.trials import MadeTrial


def at_once(
    made: Mapping[str, MadeTrial], room: float | None, spec: SweepSpec, *, devices: int = 1
) -> tuple[JobSpec, ...]:
    """The trials that a pool is made for: as many of the largest as may be attached together, dealt
    over so many devices."""
    largest = sorted(made.values(), key=lambda each: -each.plan.adapter_bytes)
    most, used = -(-len(largest) // devices), 0.0
    if spec.search.max_parallel is not None:
        most = min(most, spec.search.max_parallel)
    taken: list[JobSpec] = []
    for each in largest:
        used += each.plan.adapter_bytes
        if taken and ((room is not None and used > room) or len(taken) == most):
            break
        taken.append(each.job)
    return tuple(taken)


def worker_rows(
    made: Mapping[str, Mapping[str, MadeTrial]],
    room: float | None,
    specs: Mapping[str, SweepSpec],
    *,
    devices: int,
) -> int:
    """Rank rows of a worker's pool. A device has the trials of one task at a time; of several
    tasks, one may have a single device for all of its own. Where more come the pool grows."""
    share = devices if len(specs) == 1 else 1
    return max(
        sum(job.lora.r for job in at_once(made[task], room, spec, devices=share))
        for task, spec in specs.items()
    )
