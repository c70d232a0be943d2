"""From trace jobs to LoRA jobs: draws, steps, load."""

from collections import Counter

import numpy as np
import pytest
from support.scheduling import PROFILE

from tlora.core.cluster import uniform_cluster
from tlora.core.errors import DataError, SpecError
from tlora.costs.groups import Costs
from tlora.simulation.mapping import (
    BASES,
    LONGEST,
    RANKS,
    SAMPLE,
    bases_of,
    batch_for,
    demanded_gpus,
    map_job,
    map_jobs,
    read_lengths,
    solo_seconds,
)
from tlora.simulation.synthetic import synthetic_jobs
from tlora.simulation.traces import Given, TraceJob

JOBS = synthetic_jobs(400, days=4, seed=3)


def new_costs(gpus: int = 32) -> Costs:
    return Costs(dict.fromkeys(BASES, PROFILE), uniform_cluster(gpus))


def test_batch_follows_the_gpus_that_the_job_had() -> None:
    """1, 2, 4, 8 for 1, 2, 3-4, 5 and more; never more GPUs than sequences or than there are."""
    assert [batch_for(gpus) for gpus in (1, 2, 3, 4, 5, 8, 64)] == [1, 2, 4, 4, 8, 8, 8]
    wide = [TraceJob("a", 0, 1e5, 64), TraceJob("b", 0, 1e5, 3)]
    assert [job.gpus for job in map_jobs(wide, new_costs())] == [8, 3]
    assert [job.gpus for job in map_jobs(wide, new_costs(gpus=2))] == [2, 2]


def test_steps_take_the_duration_alone() -> None:
    """To half a step; a duration 1 % longer would be seen."""
    costs = new_costs()
    mapped = map_jobs(JOBS, costs)
    for job, request in zip(JOBS, mapped, strict=True):
        assert job.duration_s is not None
        off = abs(solo_seconds(request, costs) - job.duration_s)
        assert off <= costs.figures(request).solo_step_s * 0.501
    long = max(range(len(JOBS)), key=lambda at: JOBS[at].duration_s or 0)
    wrong = 1.01 * (JOBS[long].duration_s or 0)
    step = costs.figures(mapped[long]).solo_step_s
    assert abs(solo_seconds(mapped[long], costs) - wrong) > step


@pytest.mark.parametrize("load", [0.5, 0.8, 1.2])
def test_arrivals_are_stretched_to_the_load(load) -> None:
    """Mean demanded GPUs of solo runs / GPUs; the order and the proportions stay."""
    costs = new_costs()
    mapped = map_jobs(JOBS, costs, load=load)
    demanded = demanded_gpus(mapped, costs)
    assert demanded is not None and demanded / 32 == pytest.approx(load, rel=1e-9)
    raw = np.array([job.arrival_s for job in JOBS]) - JOBS[0].arrival_s
    factor = np.array([job.arrival_s for job in mapped])[1:] / raw[1:]
    assert np.ptp(factor) < 1e-9 * factor[0]
    as_they_are = map_jobs(JOBS, costs, load=None)
    assert [job.arrival_s for job in as_they_are] == list(raw)


def test_jobs_that_arrive_together_stay_together() -> None:
    """There is no time to stretch."""
    together = [TraceJob("a", 7, 100, 1), TraceJob("b", 7, 100, 1)]
    assert [job.arrival_s for job in map_jobs(together, new_costs())] == [0, 0]
    with pytest.raises(SpecError, match="--load: must be above 0"):
        map_jobs(JOBS, new_costs(), load=-1.0)


def test_draws_depend_on_seed_and_name_alone() -> None:
    """A part of a trace maps as the whole does; ranks and bases are about uniform."""
    whole = map_jobs(JOBS, new_costs(), load=None, seed=5)
    part = map_jobs(JOBS[:50], new_costs(), load=None, seed=5)
    assert part == whole[:50]
    assert map_jobs(JOBS, new_costs(), load=None, seed=6) != whole
    ranks = Counter(job.load.rank for job in whole)
    bases = Counter(job.base for job in whole)
    assert set(ranks) == set(RANKS) and min(ranks.values()) > 60
    assert set(bases) == set(BASES) and min(bases.values()) > 150


def test_what_a_trace_gives_is_not_drawn() -> None:
    """Steps, rank, batch, length, base, priority."""
    given = Given(steps=77, rank=5, batch=3, length=200, base="b", priority=2.0)
    job = TraceJob("x", 10.0, None, 4, "blue", "", given)
    costs = Costs({"b": PROFILE}, uniform_cluster(8))
    (request,) = map_jobs([job], costs, bases=bases_of([job]))
    assert (request.total_steps, request.base, request.priority) == (77, "b", 2.0)
    assert (request.load.rank, request.load.batch_size, request.load.lengths) == (5, 3, (200,))
    assert (request.gpus, request.tenant, bases_of(JOBS)) == (3, "blue", BASES)


def test_steps_that_take_longer_than_any_job_are_refused_by_name() -> None:
    """Ten years alone is the most, as of a duration; the simulation would go on to its end."""
    given = Given(steps=10**12, rank=8, batch=1, length=512)
    with pytest.raises(DataError, match=r"job 'a': 1,000,000,000,000 steps would take .* years"):
        map_job(TraceJob("a", 0.0, None, 1, given=given), new_costs())


def test_lengths_come_from_the_datasets_of_a_file(tmp_path) -> None:
    """A small sample of each with the same distribution, long ones cut."""
    generator = np.random.default_rng(0)
    even = generator.integers(1, 1001, 5000)
    np.savez(tmp_path / "l.npz", even=even, long=np.full(10, 99_999))
    samples = read_lengths(tmp_path / "l.npz")
    assert samples[1] == (LONGEST,) * SAMPLE and len(samples[0]) == SAMPLE
    assert np.mean(samples[0]) == pytest.approx(even.mean(), rel=0.01)
    drawn = {job.load.lengths for job in map_jobs(JOBS, new_costs(), lengths=samples)}
    assert drawn == set(samples)
    (tmp_path / "no.npz").write_text("x")
    for name, message in (("no.npz", "not an .npz"), ("none.npz", "No such file")):
        with pytest.raises(DataError, match=message):
            read_lengths(tmp_path / name)
