"""A small made-up trace, so that `tlora simulate` works alone.

The trace is shaped after what is published of real ones: durations log-normal with a long tail,
nine jobs in ten on one GPU, arrivals in daily waves, some in bursts by one tenant.
"""

import math
import random
from pathlib import Path

from tlora.core.assets import SIMULATION
from tlora.simulation.traces import DAY_S, TraceJob

SMALL_TRACE = SIMULATION / "small.csv"
"""`synthetic_jobs(400, days=4, seed=0)`, as `write_trace` wrote it."""

GPUS = {1: 0.88, 2: 0.04, 4: 0.05, 8: 0.03}
TENANTS = {"research": 0.5, "search": 0.3, "support": 0.2}
MEDIAN_S, SIGMA, LONGEST_S = 2400.0, 1.6, 2 * DAY_S
BURST = 0.15
"""The part of arrivals that bring further jobs like it along."""


def synthetic_jobs(count: int, *, days: float, seed: int) -> list[TraceJob]:
    """In order of arrival; the same seed gives the same jobs."""
    draw = random.Random(seed)
    drawn: list[tuple[float, float, int, str]] = []
    while len(drawn) < count:
        at = draw.uniform(0, days * DAY_S)
        # Most work is handed in by day.
        if draw.random() > 0.55 + 0.45 * math.sin(2 * math.pi * (at / DAY_S - 0.25)):
            continue
        tenant = draw.choices(list(TENANTS), list(TENANTS.values()))[0]
        gpus = draw.choices(list(GPUS), list(GPUS.values()))[0]
        many = draw.randint(4, 12) if draw.random() < BURST else 1
        for place in range(many):
            duration = min(LONGEST_S, max(60.0, draw.lognormvariate(math.log(MEDIAN_S), SIGMA)))
            drawn.append((at + 5.0 * place, duration, gpus, tenant))
    drawn = sorted(drawn[:count])
    return [
        TraceJob(f"job-{number:04}", round(at), round(duration), gpus, tenant)
        for number, (at, duration, gpus, tenant) in enumerate(drawn)
    ]


def write_trace(jobs: list[TraceJob], path: Path) -> None:
    """In the layout of cluster traces."""
    lines = ["job_id,submit_time_s,submit_time,duration_s,gpus,vc,status"]
    lines += [
        f"{job.name},{job.arrival_s},,{job.duration_s},{job.gpus},{job.tenant}," for job in jobs
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
