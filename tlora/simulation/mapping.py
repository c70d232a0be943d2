"""From the jobs of a trace to LoRA jobs, as published: rank uniform of {2, 4, 8, 16}, batch by the
GPUs that the job had, base at random of two; and arrivals stretched to the load asked for.

Every draw comes from the seed and the job's name alone, so that a part of a trace maps as the whole
does. What is our choice is listed in docs/simulation.md.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tlora.core.errors import DataError, SpecError
from tlora.core.load import JobLoad
from tlora.core.request import JobRequest
from tlora.costs.groups import Costs
from tlora.simulation.traces import MOST_SECONDS, YEAR_S, TraceJob

RANKS = (2, 4, 8, 16)
BASES = ("llama-8b", "qwen-8b")
LENGTH = 512
LOAD = 0.8

SAMPLE = 32
"""Lengths kept of a dataset, at equal steps of its distribution."""

LONGEST = 4096
"""Longer sequences of a dataset are cut, as a trainer would."""


def bases_of(jobs: Sequence[TraceJob]) -> tuple[str, ...]:
    """Those that the trace names, or the two that are drawn from."""
    named = {job.given.base for job in jobs if job.given and job.given.base}
    return tuple(sorted(named)) or BASES


def map_jobs(
    jobs: Sequence[TraceJob],
    costs: Costs,
    *,
    seed: int = 0,
    load: float | None = LOAD,
    bases: Sequence[str] = BASES,
    lengths: Sequence[tuple[int, ...]] = ((LENGTH,),),
) -> list[JobRequest]:
    """`costs` are the true ones with the fused kernel, for every policy alike: they turn durations
    into steps. `load` None leaves arrivals as they are. A job draws one of `lengths`."""
    requests = [map_job(job, costs, seed=seed, bases=bases, lengths=lengths) for job in jobs]
    start = min((request.arrival_s for request in requests), default=0.0)
    requests = [replace(each, arrival_s=each.arrival_s - start) for each in requests]
    if load is None:
        return requests
    factor = stretch(requests, costs, load=load)
    return [replace(each, arrival_s=each.arrival_s * factor) for each in requests]


def map_job(
    job: TraceJob,
    costs: Costs,
    *,
    seed: int = 0,
    bases: Sequence[str] = BASES,
    lengths: Sequence[tuple[int, ...]] = ((LENGTH,),),
) -> JobRequest:
    draw = random.Random(f"{seed}:{job.name}")
    rank, base, data = draw.choice(RANKS), draw.choice(bases), draw.choice(lengths)
    batch = batch_for(job.gpus)
    if job.given:
        rank, batch, data = job.given.rank, job.given.batch, (job.given.length,)
        base = job.given.base or base
    request = JobRequest(
        name=job.name,
        base=base,
        load=JobLoad(rank=rank, batch_size=batch, lengths=data),
        total_steps=job.given.steps if job.given else 1,
        # A replica without a sequence would idle.
        gpus=min(job.gpus, batch, len(costs.cluster)),
        arrival_s=job.arrival_s,
        tenant=job.tenant,
        priority=job.given.priority if job.given else 1.0,
    )
    if job.duration_s is None:
        seconds = solo_seconds(request, costs)
        if seconds > MOST_SECONDS:
            raise DataError(
                f"{request.total_steps:,} steps would take {seconds / YEAR_S:,.0f} years alone; "
                "ten are the most",
                job=job.name,
            )
        return request
    steps = round(job.duration_s / costs.figures(request).solo_step_s)
    return replace(request, total_steps=max(1, steps))


def batch_for(gpus: int) -> int:
    """1, 2, 4 or 8 sequences for 1, 2, 3-4 or more GPUs."""
    return next((batch for batch in (1, 2, 4) if gpus <= batch), 8)


def solo_seconds(request: JobRequest, costs: Costs) -> float:
    """All its steps alone on the GPUs it brings."""
    return request.total_steps * costs.figures(request).solo_step_s


def demanded_gpus(requests: Sequence[JobRequest], costs: Costs) -> float | None:
    """Mean over the time in which jobs arrive, if every job ran solo at once; None where they all
    arrive together."""
    span = max(each.arrival_s for each in requests) - min(each.arrival_s for each in requests)
    work = sum(solo_seconds(each, costs) * each.gpus for each in requests)
    return work / span if span > 0 else None


def stretch(requests: Sequence[JobRequest], costs: Costs, *, load: float) -> float:
    """By which arrival times are multiplied to have this load; 1 where all arrive together."""
    if load <= 0:
        raise SpecError(f"must be above 0, got {load}", field="--load")
    demanded = demanded_gpus(requests, costs) if requests else None
    return 1.0 if demanded is None else demanded / (len(costs.cluster) * load)


def read_lengths(path: str | Path) -> list[tuple[int, ...]]:
    """An .npz with one array of lengths per dataset -> a small sample of each."""
    path = Path(path).expanduser()
    try:
        with np.load(path, allow_pickle=False) as sets:
            arrays = [np.sort(np.asarray(sets[name]).ravel()) for name in sorted(sets.files)]
    except (OSError, ValueError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not an .npz"
        raise DataError(f"cannot be read: {reason}", path=str(path)) from None
    if not arrays or any(not each.size or each.min() < 1 for each in arrays):
        raise DataError("needs one array of lengths above 0 per dataset", path=str(path))
    middles = (np.arange(SAMPLE) + 0.5) / SAMPLE
    return [
        tuple(int(min(LONGEST, each[int(at * each.size)])) for at in middles) for each in arrays
    ]
