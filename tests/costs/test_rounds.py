"""What a round holds, and what is padded for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduling import PROFILE

from tlora.costs.predict import rows_of
from tlora.costs.rounds import BaseCosts, fullest_part, shared_tokens

BASE = BaseCosts(PROFILE, None)
JOBS = st.lists(st.tuples(st.floats(1, 4096), st.floats(0.01, 100)), min_size=1, max_size=8)


def check_shares(batches: list[float], weights: list[float], shares: list[float]) -> None:
    """Nobody has more than its batch, and those that have less are served alike by weight, no worse
    than those that are through."""
    rates = [share / weight for share, weight in zip(shares, weights, strict=True)]
    for batch, share, rate in zip(batches, shares, rates, strict=True):
        assert share <= batch * (1 + 1e-9)
        assert share >= batch * (1 - 1e-6) or rate >= max(rates) * (1 - 1e-6)


@given(jobs=JOBS, part=st.floats(0.05, 1.5))
def test_a_round_is_dealt_by_weight_and_is_full(
    jobs: list[tuple[float, float]], part: float
) -> None:
    """What one cannot use goes to the others."""
    batches, weights = [each[0] for each in jobs], [each[1] for each in jobs]
    capacity = part * sum(batches)
    shares = shared_tokens(batches, weights, capacity)
    assert sum(shares) == pytest.approx(min(capacity, sum(batches)))
    check_shares(batches, weights, shares)


@pytest.mark.parametrize("light", [1e-12, 1e-15, 1e-18])
def test_the_lightest_beside_the_heaviest_has_its_share(light: float) -> None:
    """By its weight, though rounding leaves nothing of the round, or a little that is wrong: it
    would never end, or be far from the rate that it was placed for."""
    shares = shared_tokens([500.0, 50.0, 500.0, 500.0], [1.0, 1.0, 3 * light, light], 100.0)
    assert shares == pytest.approx([50.0, 50.0, 150.0 * light, 50.0 * light], rel=1e-9, abs=0.0)


def test_a_deal_that_favours_one_is_refused() -> None:
    """Equal jobs, one with a percent more."""
    batches, weights = [100.0, 100.0], [1.0, 1.0]
    assert shared_tokens(batches, weights, 100.0) == [50.0, 50.0]
    with pytest.raises(AssertionError):
        check_shares(batches, weights, [50.5, 49.5])


@given(tokens=st.floats(1, PROFILE.budget_tokens), halving=st.integers(0, 4))
def test_rows_are_those_of_the_plain_prediction(tokens: float, halving: int) -> None:
    """At every budget that plans may have, for what fits it and what does not."""
    bucket = BASE.buckets[-1 - halving]
    assert BASE.rows(tokens, bucket) == rows_of(PROFILE, tokens * (1 - 1e-9), bucket)


@pytest.mark.parametrize(
    ("sequences", "replicas", "part"), [(8, 1, 1.0), (8, 2, 0.5), (5, 2, 0.6), (1, 4, 1.0)]
)
def test_the_fullest_replica_has_whole_sequences(
    sequences: int, replicas: int, part: float
) -> None:
    """Five on two are three and two."""
    assert fullest_part(float(sequences), replicas) == pytest.approx(part)
