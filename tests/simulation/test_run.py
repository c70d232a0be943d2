"""A simulated run as a whole, and its figures against what can be worked out by hand."""

import time
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
from support.scheduling import PROFILE, request

from tlora.core.cluster import uniform_cluster
from tlora.core.errors import SpecError
from tlora.core.event import GpuFailure, GpuRepair
from tlora.core.request import JobRequest
from tlora.costs.groups import Costs
from tlora.schedule import POLICIES
from tlora.simulation.compare import choose_profile
from tlora.simulation.mapping import map_jobs, solo_seconds
from tlora.simulation.metrics import Metrics, finish_time_fairness, slowdown
from tlora.simulation.run import Result, simulate
from tlora.simulation.synthetic import synthetic_jobs
from tlora.simulation.world import World

PROFILES = {"llama": PROFILE, "qwen": PROFILE}
START_S = Costs(PROFILES, uniform_cluster(1)).start_s("llama")


def run(policy: str, jobs: list[JobRequest], gpus: int, **options: object) -> Result:
    return simulate(jobs, policy, uniform_cluster(gpus), PROFILES, **options)  # type: ignore[arg-type]


def many_jobs(count: int, *, gpus: int, load: float = 0.9) -> list[JobRequest]:
    costs = Costs(PROFILES, uniform_cluster(gpus))
    return map_jobs(
        synthetic_jobs(count, days=count / 100, seed=1), costs, load=load, bases=tuple(PROFILES)
    )


def without_decision_time(metrics: Metrics) -> dict[str, object]:
    return {name: each for name, each in asdict(metrics).items() if name != "decision_ms"}


def enough_jobs(policy: str) -> int:
    """A solver that plans anew at every event takes a second for each."""
    return 40 if policy == "makespan" else 60


@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_same_seed_gives_the_same_figures(policy) -> None:
    """To the last digit, failures and wrong predictions included; another seed differs."""
    jobs = many_jobs(enough_jobs(policy), gpus=8)
    world = World(gpu_mtbf_s=100 * 3600, straggle_every_s=100 * 3600)
    options = {"predictor_error": 0.3, "world": world, "seed": 4}
    once, again = (run(policy, jobs, 8, **options).metrics for _ in range(2))
    assert without_decision_time(once) == without_decision_time(again)
    other = run(policy, jobs, 8, **options | {"seed": 5}).metrics
    assert without_decision_time(other) != without_decision_time(once)
    assert once.jobs_done + once.jobs_failed == len(jobs)


def test_jobs_with_gpus_to_spare_run_as_they_are_due() -> None:
    """Solo on enough GPUs: nothing queued, slowdown and fairness 1, all of it effective but for the
    starts."""
    jobs = [request(f"j{n}", steps=500 + 100 * n, at=n * 7.0, batch=2, gpus=2) for n in range(4)]
    result = run("solo", jobs, 8)
    found, costs = result.metrics, result.costs
    work = [solo_seconds(job, costs) for job in jobs]
    assert found.jct_s.mean == pytest.approx(np.mean(work) + START_S)
    assert found.queue_s.mean == 0 and found.queue_s.p99 == 0
    assert found.makespan_s == pytest.approx(21.0 + START_S + work[3])
    assert (found.slowdown.max, found.ftf.max) == (pytest.approx(1), pytest.approx(1))
    assert found.ftf_within == 1
    capacity = 8 * found.makespan_s
    assert found.util_busy == pytest.approx(2 * (sum(work) + 4 * START_S) / capacity)
    assert found.util_effective == pytest.approx(2 * sum(work) / capacity)
    steps = sum(job.total_steps for job in jobs)
    assert found.samples_per_s == pytest.approx(2 * steps / found.makespan_s)
    assert found.tokens_per_s == pytest.approx(2 * 512 * steps / found.makespan_s)
    assert (found.jobs_done, found.jobs_failed, found.regroups) == (4, 0, 0)
    record = next(iter(result.recorder.jobs.values()))
    assert slowdown(replace_steps(record, 0.99), costs) > 1.005, "1 % less would be seen"


def replace_steps(record, factor: float):
    return replace(record, steps=record.steps * factor)


def test_a_job_in_line_is_unfairly_late_and_the_first_one_early() -> None:
    """One GPU, two equal jobs in order: worked out by hand, half its due and four thirds of it."""
    jobs = [request("a", steps=1000), request("b", steps=1000)]
    result = run("solo", jobs, 1)
    records = list(result.recorder.jobs.values())
    found = finish_time_fairness(records, records, result.costs)
    assert found == pytest.approx([1 / 2, 4 / 3])
    whole = START_S + solo_seconds(jobs[0], result.costs)
    assert result.metrics.queue_s.mean == pytest.approx(whole / 2)


@pytest.mark.parametrize("policy", ["solo", "tlora"])
def test_fairness_is_what_stepping_through_time_gives(policy) -> None:
    """Against a plain loop over the moments at which the number of jobs changes."""
    result = run(policy, many_jobs(80, gpus=4), 4)
    records = list(result.recorder.jobs.values())
    found = finish_time_fairness(records, records, result.costs)
    ends = {record.request.name: record.ended_s or 0.0 for record in records}
    moments = sorted({*ends.values(), *(each.request.arrival_s for each in records)})
    for record, fairness in list(zip(records, found, strict=True))[::7]:
        mine, due = record.request, None
        left = solo_seconds(mine, result.costs) + START_S
        for at, until in zip(moments, [*moments[1:], float("inf")], strict=True):
            if at < mine.arrival_s:
                continue
            others = sum(
                each.request.arrival_s <= at < ends[each.request.name]
                for each in records
                if each.request.name != mine.name
            )
            part = min(1.0, 4 / ((others + 1) * mine.gpus))
            if left <= (until - at) * part:
                due = at + left / part
                break
            left -= (until - at) * part
        assert due is not None
        expected = (ends[mine.name] - mine.arrival_s) / (due - mine.arrival_s)
        assert fairness == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_what_groups_did_adds_up(policy) -> None:
    """Their stretches are without gaps, no GPU is in two at once, and the steps are the jobs'."""
    jobs = many_jobs(enough_jobs(policy), gpus=8, load=1.1)
    result = run(policy, jobs, 8)
    until: dict[str, float] = {}
    held: dict[int, list[tuple[float, float]]] = {}
    for each in result.recorder.stretches:
        assert each.start <= each.trains_from <= each.end
        assert until.get(each.group, each.start) == each.start
        until[each.group] = each.end
        for gpu in each.gpus:
            held.setdefault(gpu, []).append((each.start, each.end))
    for spans in held.values():
        spans.sort()
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
    for record in result.recorder.jobs.values():
        assert record.outcome == "completed"
        assert record.steps == pytest.approx(record.request.total_steps, rel=1e-6)


def test_a_failure_costs_what_it_broke_off() -> None:
    """The job waits for the repair, starts again, and that counts as regrouping."""
    job = request("a", steps=1000)
    calm = run("solo", [job], 1).metrics
    world = [GpuFailure(60.0, (0,), "lost"), GpuRepair(100.0, (0,))]
    rough = run("solo", [job], 1, world=world)
    late = rough.metrics.makespan_s - calm.makespan_s
    step = rough.costs.figures(job).solo_step_s
    assert 40 + START_S <= late <= 40 + START_S + step
    assert rough.metrics.queue_s.mean == pytest.approx(40)
    assert rough.metrics.regroup_s == pytest.approx(START_S) and calm.regroup_s == 0


def test_jobs_that_exit_or_cannot_run_are_counted_apart() -> None:
    """Early exits are done; refused jobs failed and are in no mean."""
    jobs = [request("a", steps=1000), request("b", steps=1000), request("c", length=10**6)]
    result = run("solo", jobs, 2, exits={"b": (500.0, "patience")})
    found = result.metrics
    assert (found.jobs_done, found.jobs_failed) == (2, 1)
    assert result.recorder.jobs["b"].steps == pytest.approx(500)
    assert found.jct_s.p50 == pytest.approx(START_S + 0.75 * solo_seconds(jobs[0], result.costs))
    nothing = run("solo", [jobs[2]], 2).metrics
    assert nothing.jct_s.mean is None and nothing.ftf.max is None and nothing.util_busy == 0


def test_a_long_queue_counts_all_its_waiting() -> None:
    """Also for jobs that were not runnable for most of it: once one comes in, what it waited
    before is owed at what it is due then."""
    jobs = [request(f"j{n}", steps=500) for n in range(12)]
    result = run("solo", jobs, 1, max_runnable=3)
    whole = START_S + solo_seconds(jobs[0], result.costs)
    waited = [record.state.waited_s for record in result.recorder.jobs.values()]
    assert waited == pytest.approx([n * whole for n in range(12)])
    last = result.recorder.jobs["j11"].state
    beyond = 9 / 3
    assert last.fair_s == pytest.approx(whole * (beyond + 1 / 3 + 1 / 2 + 1))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("odd", [{"rank": 2500}, {"length": 25_000}])
def test_no_policy_refuses_what_fits_in_smaller_nano_batches(policy, odd) -> None:
    """The fastest nano-batches have no room beside such an adapter or such rows; others have."""
    job = request("a", batch=4, steps=5, base="b", **odd)
    _, profile = choose_profile(None)
    found = simulate([job], policy, uniform_cluster(1), {"b": profile})
    assert found.metrics.jobs_done == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_that_brings_more_gpus_than_there_are_ends_nobody_elses(policy) -> None:
    """It is run on those that there are, or refused."""
    jobs = [request("wide", batch=8, gpus=8), request("a")]
    found = run(policy, jobs, 4).metrics
    assert found.jobs_done >= 1 and found.jobs_done + found.jobs_failed == 2


@pytest.mark.parametrize(
    ("names", "options", "field"),
    [
        ("aa", {}, "name"),
        ("ab", {"max_runnable": 0}, "max_runnable"),
        ("ab", {"shares": {"x": 0.0}}, "shares"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_field(names, options, field) -> None:
    """Before anything is run."""
    with pytest.raises(SpecError, match=field):
        run("tlora", [request(name) for name in names], 1, **options)


def test_an_unknown_policy_is_told() -> None:
    """With those that there are."""
    with pytest.raises(SpecError, match="'best' is none of tlora"):
        run("best", [request("a")], 1)


@pytest.mark.slow
def test_thousands_of_jobs_on_a_large_cluster_take_seconds() -> None:
    """3,000 jobs on 128 GPUs: some 4 s of processor time, with room for slower
    ones; a queue that is walked at every turn would take minutes."""
    jobs = many_jobs(3000, gpus=128, load=1.2)
    began = time.process_time()
    found = run("solo", jobs, 128).metrics
    assert found.jobs_done == 3000 and found.queue_s.p95 is not None and found.queue_s.p95 > 3600
    assert time.process_time() - began < 40


def test_the_bound_knows_true_durations_and_the_others_do_not() -> None:
    """srtf decides the same whatever the predictor's error; a policy that is no bound does not."""
    jobs = many_jobs(40, gpus=4)
    right, wrong = (run("srtf", jobs, 4, predictor_error=error).metrics for error in (0.0, 0.5))
    assert without_decision_time(right) == without_decision_time(wrong)
    right, wrong = (run("tlora", jobs, 4, predictor_error=error).metrics for error in (0.0, 0.5))
    assert without_decision_time(right) != without_decision_time(wrong)
