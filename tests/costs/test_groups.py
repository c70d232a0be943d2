"""Predictions for policies agree with those for one device, and hold on several."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduling import PROFILE, costs_of, request

from tlora.core.cluster import Tier, uniform_cluster
from tlora.core.load import JobLoad
from tlora.core.plan import Plan
from tlora.costs import predict

CLUSTER = uniform_cluster(16)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 64), st.integers(1, 16), st.integers(16, 2048), st.floats(0.1, 10.0)
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([512, 2048, 8192]),
)
def test_on_one_gpu_it_is_the_same_as_predict(
    jobs: list[tuple[int, int, int, float]], bucket: int
) -> None:
    """Rates and memory, whatever the mix and the weights."""
    costs = costs_of(CLUSTER)
    requests = [
        request(f"j{i}", rank=rank, batch=batch, length=length)
        for i, (rank, batch, length, _) in enumerate(jobs)
    ]
    weights = [weight for *_, weight in jobs]
    ours = costs.predict(requests, weights, Plan(bucket=bucket), Tier.GPU)
    loads = [
        JobLoad(rank=rank, batch_size=batch, lengths=(length,), weight=weight)
        for rank, batch, length, weight in jobs
    ]
    plain = predict(PROFILE, loads, budget_tokens=bucket)
    assert ours.tokens_per_s == pytest.approx(plain.tokens_per_s, rel=1e-9)
    assert ours.memory_bytes == pytest.approx(plain.memory_bytes)
    for rate, each in zip(ours.steps_per_s, plain.jobs, strict=True):
        assert rate == pytest.approx(each.steps_per_s, rel=1e-9)


def test_a_job_alone_on_its_gpus_is_worth_them() -> None:
    """For one and for several; on fewer it is worth less than it brings, but more than these."""
    costs = costs_of(CLUSTER)
    for gpus in (1, 2, 8):
        job = request(f"j{gpus}", batch=gpus, gpus=gpus)
        assert costs.solo(job).worth == pytest.approx(gpus)
    one = costs.predict([job], [1.0], Plan(bucket=8192), Tier.GPU)
    assert 1 < one.worth < 8


def test_replicas_wait_for_the_fullest_and_for_the_link() -> None:
    """Four sequences on three replicas are two rounds' worth for one of them."""
    costs = costs_of(CLUSTER)
    job = request("j", batch=4, gpus=4)
    seconds = {
        replicas: costs.predict(
            [job], [1.0], Plan(replicas=replicas, bucket=8192), Tier.NODE
        ).round_s
        for replicas in (2, 3, 4)
    }
    assert seconds[3] == pytest.approx(seconds[2], rel=0.02)
    assert seconds[4] < seconds[3]
    far = costs.predict([job], [1.0], Plan(replicas=4, bucket=8192), Tier.CLUSTER)
    assert far.round_s > seconds[4]


def test_a_wrong_predictor_is_wrong_by_the_asked_amount_and_always_alike() -> None:
    """A spread of 10 % over many jobs, for groups as for single ones; seeds differ."""
    right, wrong = costs_of(CLUSTER), costs_of(CLUSTER, error=0.1)
    other = costs_of(CLUSTER, error=0.1, seed=1)
    jobs = [request(f"j{i}") for i in range(400)]
    pairs = list(zip(jobs[::2], jobs[1::2], strict=True))
    plan = Plan(bucket=8192)

    def logs(groups: list[tuple]) -> list[float]:  # type: ignore[type-arg]
        return [
            math.log(
                wrong.predict(each, [1.0] * len(each), plan, Tier.GPU).round_s
                / right.predict(each, [1.0] * len(each), plan, Tier.GPU).round_s
            )
            for each in groups
        ]

    for found in (logs([(job,) for job in jobs]), logs(pairs)):
        spread = (sum(each**2 for each in found) / len(found)) ** 0.5
        assert 0.08 < spread < 0.12
    again = costs_of(CLUSTER, error=0.1)
    job = jobs[0]
    assert again.figures(job).solo_step_s == wrong.figures(job).solo_step_s
    assert other.figures(job).solo_step_s != wrong.figures(job).solo_step_s


def test_unfused_adapters_cost_more_the_more_there_are() -> None:
    """And fused ones hardly anything."""
    fused, loop = costs_of(CLUSTER), costs_of(CLUSTER, kernel="unfused")
    jobs = [request(f"j{i}") for i in range(8)]
    plan = Plan(bucket=8192)

    def ratio(count: int) -> float:
        slow, fast = (
            each.predict(jobs[:count], [1.0] * count, plan, Tier.GPU).round_s
            for each in (loop, fused)
        )
        return slow / fast

    assert 1.1 < ratio(1) < ratio(8)
