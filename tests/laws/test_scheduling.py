"""What every policy must keep on random inputs, and what ours must keep besides."""

import random

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.instances import HARD, gap, instance
from support.scheduling import Run, costs_of, request

from tlora.control.replay import replay
from tlora.core.cluster import uniform_cluster
from tlora.core.decision import Join, Reasons, Refuse
from tlora.core.event import Arrival, Event, GpuFailure, GpuRepair, JobFailure, Straggler
from tlora.core.request import JobRequest
from tlora.core.state import State
from tlora.costs.rounds import shared_tokens
from tlora.schedule import POLICIES, make_policy
from tlora.schedule.check import broken_laws

GROUPING = ["tlora", "tlora-no-kernel"]
QUICK = [name for name in POLICIES if name != "makespan"]


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[JobRequest], int, list[Event]]:
    """Jobs, GPUs, and what breaks."""
    gpus = draw(st.sampled_from([1, 2, 3, 5, 8, 12]))
    jobs: list[JobRequest] = []
    for i in range(draw(st.integers(1, 14))):
        batch = draw(st.sampled_from([1, 1, 2, 4, 8]))
        jobs.append(
            request(
                f"j{i}",
                base=draw(st.sampled_from(["llama", "llama", "qwen"])),
                rank=draw(st.sampled_from([2, 8, 64])),
                batch=batch,
                length=draw(st.sampled_from([64, 512, 2048])),
                steps=draw(st.integers(1, 20_000)),
                gpus=min(batch, draw(st.sampled_from([1, 1, 2, 8])), gpus),
                at=draw(st.floats(0, 2000)),
                tenant=draw(st.sampled_from(["a", "b"])),
                priority=draw(st.sampled_from([1.0, 1.0, 3.0])),
                slowdown_bound=draw(st.sampled_from([1.0, 1.5, 3.0])),
            )
        )
    world: list[Event] = []
    for _ in range(draw(st.integers(0, 3))):
        at, gpu = draw(st.floats(0, 3000)), draw(st.integers(0, gpus - 1))
        if draw(st.booleans()):
            world += [GpuFailure(at, (gpu,), "lost"), GpuRepair(at + 100, (gpu,))]
        else:
            world += [Straggler(at, gpu, 0.5), Straggler(at + 500, gpu, 1.0)]
    return jobs, gpus, world


@pytest.mark.parametrize("policy", QUICK)
# Shrinking whole simulations takes minutes and explains little.
@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(case=traces())
def test_no_turn_breaks_a_law_and_nobody_starves(
    policy: str, case: tuple[list[JobRequest], int, list[Event]]
) -> None:
    """No GPU booked twice, no memory over-committed, no bound broken by a decision; every job ends,
    and a replay decides the same."""
    jobs, gpus, world = case
    run = Run(policy, jobs, gpus=gpus, per_node=4, world=world)
    inner = run.policy.decide

    def watched(state: State, events):  # type: ignore[no-untyped-def]
        decisions = inner(state, events)
        assert broken_laws(state, decisions, run.costs, bounds=policy in GROUPING) == []
        return decisions

    run.policy.decide = watched  # type: ignore[method-assign]
    run.to_the_end()
    assert set(run.state.outcomes.values()) == {"completed"}
    assert len(run.state.outcomes) == len(jobs)
    again = make_policy(policy, costs_of(run.cluster, kernel=POLICIES[policy].kernel))
    assert replay(run.store.turns(), state=State(run.cluster), policy=again) is None


def test_the_laws_are_able_to_refuse() -> None:
    """A GPU booked twice, a job slowed beyond its bound, and memory that is not there."""
    cluster = uniform_cluster(1)
    costs = costs_of(cluster)
    state = State(cluster)
    for i in range(3):
        state.happen(Arrival(0.0, request(f"j{i}", slowdown_bound=1.0)))
    start = make_policy("solo", costs).decide(state, [])
    assert broken_laws(state, [*start, *start], costs) != []
    for decision in start:
        state.apply(decision)
    big = request("big", batch=16, length=2048, slowdown_bound=1.0)
    state.happen(Arrival(0.0, big))
    join = Join(job="big", group="g0", weight=100.0, reasons=Reasons(why="to see"))
    assert any("slowdown" in each for each in broken_laws(state, [join], costs))
    huge = request("huge", rank=2048)
    state.happen(Arrival(0.0, huge))
    join = Join(job="huge", group="g0", weight=1.0, reasons=Reasons(why="to see"))
    assert any("memory" in each for each in broken_laws(state, [join], costs))


def test_the_laws_see_a_stall_and_a_refusal_without_need() -> None:
    """Where nothing runs though a job could, on what is up; or one is sent away that the whole
    cluster has room for."""
    cluster = uniform_cluster(3)
    costs = costs_of(cluster)
    state = State(cluster)
    state.happen(GpuFailure(0.0, (0,), "lost"))
    state.happen(Arrival(0.0, TOO_WIDE))
    assert broken_laws(state, [], costs) == []
    refuse = Refuse(job="wide", reasons=Reasons(why="to see"))
    assert any("is refused" in each for each in broken_laws(state, [refuse], costs))
    state.happen(Arrival(0.0, request("a")))
    assert any("a waits" in each for each in broken_laws(state, [], costs))
    state.happen(GpuRepair(0.0, (0,)))
    for bounds in (True, False):
        found = broken_laws(state, [], costs, bounds=bounds)
        assert any("wide waits" in each for each in found)


TOO_WIDE = request("wide", batch=6, length=3551, gpus=3, slowdown_bound=1.0, priority=1e6)
"""For two GPUs: six sequences fill three, and on two they take more than half as long again."""

SMALL = [request("a"), request("b", base="qwen", at=10.0), request("late", at=500.0)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("repaired", [2000.0, None])
def test_a_job_that_needs_more_than_is_up_holds_up_nobody(
    policy: str, repaired: float | None
) -> None:
    """It waits for the repair, or fails by name where none comes; the others go on meanwhile."""
    world: list[Event] = [GpuFailure(0.0, (0,), "lost")]
    world += [GpuRepair(repaired, (0,))] if repaired is not None else []
    run = Run(policy, [TOO_WIDE, *SMALL], gpus=3, world=world)
    inner = run.policy.decide

    def watched(state: State, events):  # type: ignore[no-untyped-def]
        decisions = inner(state, events)
        assert broken_laws(state, decisions, run.costs, bounds=policy in GROUPING) == []
        return decisions

    run.policy.decide = watched  # type: ignore[method-assign]
    run.to_the_end()
    ended = run.ended_at()
    assert all(ended[job.name] < 1500 for job in SMALL), ended
    if repaired is None and run.state.outcomes["wide"] != "completed":
        (failure,) = [
            event
            for turn in run.store.turns()
            for event in turn.events
            if isinstance(event, JobFailure)
        ]
        assert failure.job == "wide" and "2 of 3 GPUs are up" in failure.reason
    else:
        # In company it is due less, and some policies find a place for it at once.
        assert run.state.outcomes["wide"] == "completed"


@pytest.mark.slow
def test_a_thousand_small_instances_are_near_the_best_there_is() -> None:
    """By trying all groupings: at most 3 % off in the mean, 10 % at p99; and by the same code as on
    large instances."""
    gaps = np.array([gap(*instance(seed)) for seed in range(1000)])
    print(f"gap: mean {gaps.mean():.2%}, p99 {np.percentile(gaps, 99):.2%}, max {gaps.max():.2%}")
    assert gaps.min() > -1e-6, "better than the best"
    assert gaps.mean() < 0.03
    assert np.percentile(gaps, 99) < 0.10


@pytest.mark.slow
def test_hard_small_instances_are_near_the_best_there_is() -> None:
    """More jobs than GPUs, bounds of 1 to 3 and priorities of 0.5 to 4."""
    gaps = np.array([gap(*instance(seed, HARD)) for seed in range(20_000, 21_000)])
    print(f"gap: mean {gaps.mean():.2%}, p99 {np.percentile(gaps, 99):.2%}, max {gaps.max():.2%}")
    assert gaps.min() > -1e-6, "better than the best"
    assert gaps.mean() < 0.005
    assert np.percentile(gaps, 99) < 0.05


@pytest.mark.parametrize("seed", [11145, 11029, 10742, 11301])
def test_jobs_that_come_together_are_placed_in_the_best_of_several_orders(seed: int) -> None:
    """The most urgent first was 46 to 73 % off here, or left a job without a place."""
    assert gap(*instance(seed, HARD)) < 0.05


def test_priorities_far_apart_break_no_bound() -> None:
    """Beside a job of great weight, whose batch is soon through, the others share what it leaves:
    by their own weights, not by what rounding left of the sum."""
    for heavy in (1e6, 1e9):
        shares = shared_tokens([10.0, 1000.0, 1000.0], [heavy, 1 / heavy, 1 / heavy], 110.0)
        assert shares == [10, 50, 50]
    cluster = uniform_cluster(1)
    costs = costs_of(cluster)
    for seed in range(80):
        draw = random.Random(seed)
        most = draw.choice([1e6, 1e9])
        state = State(cluster)
        for i in range(6):
            job = request(
                f"j{i}",
                batch=draw.choice([1, 4, 8]),
                length=draw.choice([64, 512, 2048]),
                priority=draw.choice([most, 1 / most, 1 / most]),
                slowdown_bound=draw.choice([1.5, 3.0]),
            )
            state.happen(Arrival(0.0, job))
        assert broken_laws(state, make_policy("tlora", costs).decide(state, []), costs) == []


def test_a_running_job_is_moved_no_more_often_than_is_allowed() -> None:
    """Twice and then four times an hour at most, where jobs come and go all the time."""
    draw = random.Random(3)
    jobs = [
        request(
            f"j{i}",
            base=draw.choice(["llama", "qwen"]),
            batch=(batch := draw.choice([1, 1, 1, 2, 4])),
            gpus=batch,
            steps=int(draw.lognormvariate(9, 1.5)) + 1,
            at=draw.uniform(0, 40_000),
        )
        for i in range(150)
    ]
    run = Run("tlora", jobs, gpus=8)
    most = 0.0
    ended: dict[str, int] = {}
    while run.state.jobs or not run.executor.idle:
        run.loop.step()
        for job in run.state.jobs.values():
            allowed = 2 + (run.state.now - job.request.arrival_s) / 3600 * 4
            most = max(most, job.moves - allowed)
            ended[job.name] = job.moves
    assert len(run.state.outcomes) == len(jobs)
    assert most <= 1
    assert sum(ended.values()) / len(jobs) < 3
