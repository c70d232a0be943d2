"""Rates of groups as the engine's composer makes them."""

from dataclasses import replace

import pytest
from support.scheduling import PROFILE, costs_of, request

from tlora.core.cluster import Tier, uniform_cluster
from tlora.core.plan import Plan
from tlora.core.request import JobRequest
from tlora.costs.groups import GroupPrediction
from tlora.costs.model import NanoBatch, Segment
from tlora.simulation.composed import ComposedCosts

CLUSTER = uniform_cluster(2)


def composed_costs() -> ComposedCosts:
    return ComposedCosts({"llama": PROFILE}, CLUSTER)


def both(jobs: list[JobRequest], bucket: int) -> tuple[GroupPrediction, GroupPrediction]:
    """As dealt, and as composed."""
    weights, plan = [1.0] * len(jobs), Plan(bucket=bucket)
    return (
        costs_of(CLUSTER).predict(jobs, weights, plan, Tier.GPU),
        composed_costs().predict(jobs, weights, plan, Tier.GPU),
    )


def test_batches_that_fit_are_composed_as_they_are_dealt() -> None:
    """Of sequences of one length each; under a bucket that is too small they are not."""
    jobs = [request("a", batch=4, length=512), request("b", rank=4, batch=1, length=300)]
    dealt, composed = both(jobs, 8192)
    assert composed.round_s == pytest.approx(dealt.round_s)
    assert composed.tokens == pytest.approx(dealt.tokens)
    assert composed.steps_per_s == pytest.approx(dealt.steps_per_s)
    assert composed.worth == pytest.approx(dealt.worth)
    dealt, composed = both(jobs, 2048)
    assert composed.tokens_per_s != pytest.approx(dealt.tokens_per_s, rel=0.01)


def test_what_is_left_of_a_batch_is_a_nano_batch_that_is_not_full() -> None:
    """Four sequences of 100 beside one of 150 under 512: three and the one, then the last of the
    four and the one again. A liquid would fill both."""
    large, small = request("large", batch=4, length=100), request("small", batch=1, length=150)
    dealt, composed = both([large, small], 512)
    assert composed.tokens == pytest.approx((200, 150))
    assert composed.steps_per_s[1] == pytest.approx(2 * composed.steps_per_s[0])
    assert sum(dealt.tokens) == pytest.approx(512)
    assert dealt.steps_per_s[1] < 1.5 * dealt.steps_per_s[0]
    squares = 150**2
    full = NanoBatch(512, 3 * 100**2 + squares, (Segment(300, 8), Segment(150, 8)))
    rest = NanoBatch(256, 100**2 + squares, (Segment(100, 8), Segment(150, 8)))
    expected = seconds_of(full, steps=1) + seconds_of(rest, steps=2)
    assert composed.round_s == pytest.approx(expected / 2)
    assert composed.round_s != pytest.approx(seconds_of(full, steps=2), rel=0.01)


def seconds_of(batch: NanoBatch, *, steps: int) -> float:
    """Of rank 8."""
    parameters = 8 * steps * PROFILE.parameters_per_rank
    after = PROFILE.steps.seconds(passes=1, jobs=steps, parameters=parameters)
    return PROFILE.time.seconds(batch) + after


def test_lengths_that_differ_may_not_fit_though_their_mean_does() -> None:
    """A batch of 500 tokens on average under 512: some take two nano-batches."""
    even = request("even", batch=2, length=250)
    uneven = replace(even, load=replace(even.load, lengths=(100, 200, 300, 400)))
    _, steady = both([even], 512)
    dealt, composed = both([uneven], 512)
    assert dealt.steps_per_s == pytest.approx(steady.steps_per_s, rel=0.01)
    assert composed.steps_per_s[0] < 0.9 * dealt.steps_per_s[0]


def test_a_weight_counts_as_in_the_engine() -> None:
    """Two large jobs alike, of which one has three times the weight of the other."""
    jobs = [request("a", batch=64, length=100), request("b", batch=64, length=100)]
    found = composed_costs().predict(jobs, [3.0, 1.0], Plan(bucket=512), Tier.GPU)
    assert found.tokens[0] == pytest.approx(3 * found.tokens[1], rel=0.1)


def test_a_job_alone_is_worth_its_gpu_and_every_answer_is_the_same_again() -> None:
    """Whoever was asked about in between; a slow GPU and a predictor that errs slow it down."""
    costs = composed_costs()
    job = replace(request("j", batch=2), load=replace(request("j").load, lengths=(90, 400, 700)))
    first = costs.solo(job)
    assert first.worth == pytest.approx(1.0)
    costs.solo(request("other", batch=3))
    assert costs.solo(job) == first == composed_costs().solo(job)
    plan = costs.figures(job).solo_plan
    slow = costs.predict([job], [1.0], plan, Tier.GPU, speed=0.5)
    assert slow.round_s == pytest.approx(2 * first.round_s)
    wrong = ComposedCosts({"llama": PROFILE}, CLUSTER, error=0.3)
    assert wrong.solo(job).round_s != pytest.approx(first.round_s, rel=0.01)
    assert wrong.solo(job).worth == pytest.approx(1.0)


def test_replicas_are_dealt_to() -> None:
    """As `Costs` has it."""
    jobs = [request("a", batch=8, gpus=2), request("b", batch=8)]
    plan = Plan(replicas=2, bucket=4096)
    dealt = costs_of(CLUSTER).predict(jobs, [1.0, 1.0], plan, Tier.NODE)
    composed = composed_costs().predict(jobs, [1.0, 1.0], plan, Tier.NODE)
    assert composed.steps_per_s == dealt.steps_per_s
