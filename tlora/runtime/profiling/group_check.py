"""A group of jobs trained for a few steps, against what the fresh profile predicts for it.

Held-out points check the time of a nano-batch; this checks what a scheduler is told: shares,
padding, steps, jobs that end and leave the others more room.
"""

import statistics
import time

from tlora.costs.predict import JobLoad, finish_times
from tlora.costs.profile import GroupCheck, Profile
from tlora.model.super_model import SuperModel
from tlora.runtime.benchmark.arms import train_together
from tlora.runtime.benchmark.workload import Workload, new_workload
from tlora.runtime.profiling.rig import NotMeasured

JOBS = 8
RANKS = (4, 8, 16, 32)
BATCHES = (1, 2, 4)
REPEATS = 3
"""At most, after those that warm up."""

MOST_WARM_UPS = 5
"""Shapes of nano-batches that were not measured may be captured first."""

ALL_SECONDS = 6.0
"""No further one begins after that: with a large base, jobs take long to come and go."""

AIM_SECONDS = 1.0
MOST_SECONDS = 20.0
FEWEST_STEPS, MOST_STEPS = 2, 12


def check_group(
    model: SuperModel, profile: Profile, *, lengths: tuple[int, ...], largest_rank: int
) -> GroupCheck:
    """The super-model must be empty. Raises NotMeasured if it would take too long."""
    budget = profile.budget_tokens

    def work_of(steps: int) -> Workload:
        return new_workload(
            num_jobs=JOBS,
            ranks=[min(rank, largest_rank) for rank in RANKS],
            batches=BATCHES,
            lengths=lengths,
            steps=steps,
            dropout=0.0,
            vocabulary=model.vocabulary,
        )

    shortest = predicted_seconds(profile, work_of(FEWEST_STEPS))
    if shortest > MOST_SECONDS:
        raise NotMeasured(f"{FEWEST_STEPS} steps each would take {shortest:.0f} s")
    each_step = shortest / FEWEST_STEPS
    work = work_of(max(FEWEST_STEPS, min(MOST_STEPS, round(AIM_SECONDS / each_step))))
    for _ in range(MOST_WARM_UPS):
        captures = model.captures
        train_together(model, work, work.jobs, budget)
        if model.settled and model.captures == captures:
            break
    started = time.monotonic()
    seconds: list[float] = []
    while not seconds or (len(seconds) < REPEATS and time.monotonic() - started < ALL_SECONDS):
        seconds.append(train_together(model, work, work.jobs, budget).seconds)
    return GroupCheck(
        jobs=JOBS,
        tokens=work.tokens,
        predicted_s=predicted_seconds(profile, work),
        measured_s=statistics.median(seconds),
    )


def predicted_seconds(profile: Profile, work: Workload) -> float:
    """Until the last job is through."""
    loads = [
        JobLoad(
            rank=job.lora.r,
            batch_size=job.train.batch_size,
            lengths=tuple(map(len, work.rows[job.name])),
        )
        for job in work.jobs
    ]
    tokens = [sum(map(len, work.rows[job.name])) for job in work.jobs]
    return max(finish_times(profile, loads, tokens))
