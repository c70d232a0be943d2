"""What jobs are due."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduling import request

from tlora.core.cluster import uniform_cluster
from tlora.core.errors import SpecError
from tlora.core.event import Arrival, GpuFailure
from tlora.core.request import JobRequest
from tlora.core.state import State
from tlora.schedule.fairness import dealt, fair_gpus


def state_of(gpus: int, *jobs: JobRequest, **options: object) -> State:
    state = State(uniform_cluster(gpus), **options)  # type: ignore[arg-type]
    for job in jobs:
        state.happen(Arrival(0.0, job))
    return state


def test_n_jobs_for_one_gpu_are_due_a_part_of_it_each() -> None:
    """Where GPUs abound, all that each brings; of two GPUs, one that wants eight gets what three
    others leave."""
    one, two = request("a"), request("b")
    assert fair_gpus(state_of(1, one, two)) == {"a": 0.5, "b": 0.5}
    assert fair_gpus(state_of(4, one, two)) == {"a": 1.0, "b": 1.0}
    wide = request("w", batch=8, gpus=8)
    assert fair_gpus(state_of(4, one, two, wide)) == {"a": 1.0, "b": 1.0, "w": 2.0}


def test_priority_counts_within_a_tenant_and_shares_between_tenants() -> None:
    """A tenant with many jobs is due no more than one with few."""
    jobs = [request(f"a{i}", tenant="a") for i in range(3)]
    vip = request("vip", tenant="a", priority=3.0)
    other = request("b", tenant="b", batch=8, gpus=8)
    due = fair_gpus(state_of(4, *jobs, vip, other, shares={"a": 1.0}))
    assert due["b"] == pytest.approx(2.0)
    assert due["vip"] == pytest.approx(1.0)
    assert due["a0"] == pytest.approx(1 / 3)
    due = fair_gpus(state_of(4, *jobs, vip, other, shares={"b": 3.0}))
    assert due["b"] == pytest.approx(3.0)


def test_where_no_tenant_has_a_share_all_jobs_are_due_alike() -> None:
    """Whoever sends many jobs is due many parts."""
    jobs = [request(f"a{i}", tenant="a") for i in range(3)]
    due = fair_gpus(state_of(2, *jobs, request("b", tenant="b")))
    assert set(due.values()) == {0.5}


def test_jobs_beyond_the_limit_are_due_nothing_and_lost_gpus_are_not_dealt() -> None:
    """In order of arrival."""
    jobs = [request(f"j{i}") for i in range(4)]
    state = state_of(2, *jobs, max_runnable=3)
    assert fair_gpus(state) == {name: pytest.approx(2 / 3) for name in ("j0", "j1", "j2")}
    state.happen(GpuFailure(0.0, (1,), "lost"))
    assert sum(fair_gpus(state).values()) == pytest.approx(1.0)


@pytest.mark.parametrize("high", [1e9, 1e18])
def test_priorities_that_are_far_apart_leave_no_gpu_undealt(high: float) -> None:
    """What is left when the highest has all it wants goes to the others alike."""
    low = 1e9 / high
    jobs = [request("high", priority=1e9), *(request(f"j{i}", priority=low) for i in range(3))]
    due = fair_gpus(state_of(2, *jobs))
    assert due == {"high": 1.0, **{f"j{i}": pytest.approx(1 / 3) for i in range(3)}}


@pytest.mark.parametrize(
    "wrong",
    [
        {"priority": 1e17},
        {"priority": 1e-17},
        {"priority": float("nan")},
        {"slowdown_bound": float("nan")},
        {"at": float("nan")},
        {"at": float("inf")},
    ],
)
def test_what_is_no_number_to_reckon_with_is_refused_by_field(wrong: dict[str, float]) -> None:
    """A due of nothing, or of nobody knows what, would end the loop for all jobs."""
    field = "arrival_s" if "at" in wrong else next(iter(wrong))
    with pytest.raises(SpecError, match=f"job 'a': {field}: must be"):
        request("a", **wrong)  # type: ignore[arg-type]


@given(
    st.floats(0.1, 100),
    st.lists(st.tuples(st.floats(0.1, 64), st.floats(0.1, 10)), min_size=1, max_size=20),
)
def test_what_is_dealt_is_all_there_is_or_all_that_is_wanted(
    amount: float, jobs: list[tuple[float, float]]
) -> None:
    """Nobody gets more than wanted; whoever gets less gets most for its weight."""
    wanted, weights = [each[0] for each in jobs], [each[1] for each in jobs]
    got = dealt(amount, wanted, weights)
    assert sum(got) == pytest.approx(min(amount, sum(wanted)))
    level = max(each / weight for each, weight in zip(got, weights, strict=True))
    for each, want, weight in zip(got, wanted, weights, strict=True):
        assert each <= want * (1 + 1e-9)
        assert each >= want * (1 - 1e-9) or each / weight == pytest.approx(level)


def test_the_least_priority_beside_the_most_is_due_something() -> None:
    """By its weight, though nothing of the amount is left after the others in rounding: a policy
    divides by it."""
    found = dealt(1.0, [1.0] * 4, [1e9, 1e9, 1e-9, 1e-9])
    assert found[:2] == [0.5, 0.5]
    assert found[2:] == pytest.approx([0.5e-18] * 2)
