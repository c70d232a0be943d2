"""What a scheduler asks of a profile, on a device whose costs are known."""

from dataclasses import replace

import pytest
from support.costs import PARAMETERS_PER_RANK, STEPS, TIME, WEIGHTS_BYTES

from tlora.core.errors import SpecError
from tlora.costs import JobLoad, Profile, finish_times, knee_tokens, predict, solo
from tlora.costs.model import NanoBatch, Segment
from tlora.costs.predict import rows_of, shares_of
from tlora.costs.rounds import BaseCosts
from tlora.training.compose import bucket_of, buckets_for

SMALL = JobLoad(rank=16, batch_size=1, lengths=(512,))
LARGE = JobLoad(rank=16, batch_size=64, lengths=(512,))


def test_one_small_job_alone_costs_what_its_nano_batch_and_step_cost(profile: Profile) -> None:
    """By the known parameters: one sequence, padded to the first bucket, and one step each time; a
    twin without the step is refused."""
    found = solo(profile, SMALL)
    batch = NanoBatch(1024, 512**2, (Segment(512, 16),))
    step = STEPS.seconds(passes=1, jobs=1, parameters=16 * PARAMETERS_PER_RANK)
    expected = 512 / (TIME.seconds(batch) + step)
    assert found.tokens_per_s == pytest.approx(expected, rel=2e-3)
    assert found.jobs[0].steps_per_s == pytest.approx(expected / 512, rel=2e-3)
    assert found.tokens_per_s != pytest.approx(512 / TIME.seconds(batch), rel=2e-3)


def test_fusing_small_jobs_is_faster_than_one_after_another_up_to_the_knee(
    profile: Profile,
) -> None:
    """Eight times one sequence below the knee gain much; large batches gain little."""
    alone = solo(profile, SMALL).tokens_per_s
    assert predict(profile, [SMALL] * 8).tokens_per_s > 2 * alone
    gain = predict(profile, [LARGE] * 8).tokens_per_s / solo(profile, LARGE).tokens_per_s
    assert 0.9 < gain < 1.1


def test_tokens_are_shared_by_weight_and_none_gets_more_than_its_batch() -> None:
    """What one cannot use goes to the others; the sum is the budget, or all there is."""
    heavy = replace(LARGE, weight=3.0)
    assert shares_of([LARGE, heavy], 8192) == pytest.approx([2048, 6144])
    assert shares_of([LARGE, SMALL, heavy], 8192) == pytest.approx([1920, 512, 5760])
    assert shares_of([SMALL, SMALL], 8192) == [512, 512]


def test_the_rates_of_the_jobs_sum_to_that_of_the_group(profile: Profile) -> None:
    """And a job steps once per batch of its own."""
    jobs = [SMALL, LARGE, replace(SMALL, rank=64, batch_size=4, lengths=(100, 300))]
    found = predict(profile, jobs)
    assert sum(rate.tokens_per_s for rate in found.jobs) == pytest.approx(found.tokens_per_s)
    for job, rate in zip(jobs, found.jobs, strict=True):
        assert rate.steps_per_s * job.batch_tokens == pytest.approx(rate.tokens_per_s)


def test_a_job_that_ends_leaves_its_room_to_the_others(profile: Profile) -> None:
    """Alone it takes its tokens at the solo rate; in a group the last ends after the first, and
    faster than if the first had stayed. A twin at the group's rate throughout is refused."""
    tokens = 100_000
    alone = finish_times(profile, [LARGE], [tokens])[0]
    assert alone == pytest.approx(tokens / solo(profile, LARGE).tokens_per_s)
    rate = predict(profile, [LARGE, LARGE]).jobs[0].tokens_per_s
    first, last = finish_times(profile, [LARGE, LARGE], [tokens, 2 * tokens])
    assert first == pytest.approx(tokens / rate)
    assert last == pytest.approx(first + alone)
    assert last != pytest.approx(2 * tokens / rate, rel=0.2)
    assert finish_times(profile, [LARGE] * 3, [tokens] * 3) == pytest.approx([3 * alone] * 3, 0.02)


def test_longer_sequences_higher_ranks_and_more_linears_cost_more(profile: Profile) -> None:
    """Each by itself."""
    rate = solo(profile, LARGE).tokens_per_s
    for change in ({"lengths": (2048,), "batch_size": 16}, {"rank": 64}):
        assert solo(profile, replace(LARGE, **change)).tokens_per_s < rate
    assert solo(profile, replace(LARGE, coverage=0.3)).tokens_per_s > rate


def test_rows_are_padded_to_a_bucket_of_the_budget(profile: Profile) -> None:
    """Buckets follow the budget; a sequence beyond it goes alone in a multiple of it."""
    assert rows_of(profile, 1025, 8192) == 2048
    assert rows_of(profile, 300, 4096) == 512
    assert rows_of(profile, 9000, 8192) == 16_384


@pytest.mark.parametrize("budget", [128, 352, 2048])
def test_rows_are_padded_as_the_engine_pads_them(profile: Profile, budget: int) -> None:
    """Under every budget, where sizes are parts of it and where they are multiples of a step, which
    do not shrink with it."""
    parts = replace(profile, budget_tokens=9600, buckets=buckets_for(9600))
    steps = replace(parts, buckets=buckets_for(9600, step=64), bucket_step=64)
    for tokens in range(1, budget + 1, 7):
        engines = bucket_of(tokens, budget, buckets_for(budget, step=64))
        assert rows_of(steps, tokens, budget) == engines
        assert BaseCosts(steps, None).rows(tokens, budget) == engines
        engines = bucket_of(tokens, budget, buckets_for(budget))
        assert rows_of(parts, tokens, budget) == pytest.approx(engines)
    assert rows_of(replace(steps, bucket_step=None), 1, budget) < 64


def test_memory_counts_weights_adapters_and_the_largest_nano_batch(profile: Profile) -> None:
    """Against the known parts; a group that is too large does not fit."""
    found = predict(profile, [SMALL, LARGE])
    expected = WEIGHTS_BYTES + 18 * 32 * PARAMETERS_PER_RANK + 10**9 + 3e6 * 8192 + 2 * 10**8
    assert found.memory_bytes == pytest.approx(expected)
    assert found.fits is True
    assert predict(profile, [LARGE] * 80).fits is False
    long = replace(SMALL, lengths=(20_000,))
    taken = solo(profile, long).memory_bytes
    assert taken is not None and taken > expected
    unknown = replace(profile, memory=replace(profile.memory, row_bytes=None))
    assert predict(unknown, [SMALL]).memory_bytes is None
    assert predict(unknown, [SMALL]).fits is None


def test_the_knee_is_where_nearly_all_of_the_rate_is_reached(profile: Profile) -> None:
    """Just below it the rate is too low; a device with slower launches has it later."""

    def rate(tokens: int) -> float:
        squares = tokens * min(tokens, 512)
        batch = NanoBatch(tokens, squares, (Segment(tokens, 16),))
        return tokens / profile.time.seconds(batch)

    knee = knee_tokens(profile)
    assert knee is not None
    assert rate(knee) >= 0.95 * rate(2**20) > rate(knee - 1)
    slower = replace(profile, time=replace(profile.time, flat_s=2 * profile.time.flat_s))
    later = knee_tokens(slower)
    assert later is not None and later > 1.2 * knee


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "rank: must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size: must be at least 1"),
        ({"lengths": ()}, "lengths: must be one length or more"),
        ({"weight": 0.0}, "weight must be above 0"),
        ({"coverage": 1.5}, "coverage in"),
    ],
)
def test_an_impossible_job_is_refused_by_field(fields, message) -> None:
    """Before it is priced."""
    with pytest.raises(SpecError, match=message):
        replace(SMALL, **fields)


def test_an_empty_group_and_an_empty_nano_batch_are_refused(profile: Profile) -> None:
    """There is nothing to predict."""
    with pytest.raises(SpecError, match="jobs: a group needs a job"):
        predict(profile, [])
    with pytest.raises(SpecError, match="budget_tokens: must be at least 1, got 0"):
        predict(profile, [SMALL], budget_tokens=0)
