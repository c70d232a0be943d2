"""`isolation: exact` with rank-local adapters: the same bits on 1, 2 and 4 ranks."""

import pytest
from support import rank_work
from support.curves import same_bits
from support.rank_jobs import STEPS, Told
from support.ranks import Ranks

from tlora.core.plan import Plan

PLANS = {
    "two": Plan(bucket=192, replicas=2, adapters="rank_local"),
    "four": Plan(bucket=192, replicas=4, adapters="rank_local"),
    "two shards": Plan(bucket=192, fsdp=2, adapters="rank_local"),
}


@pytest.fixture(scope="module")
def alone() -> Told:
    return rank_work.train_alone(list(STEPS), exact=True, budget=192)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_more_ranks_change_no_bit(plan: Plan, ranks: Ranks, checkpoint: str, alone: Told) -> None:
    """Losses, gradient norms, evaluations and adapters, with the backbone whole or in shards."""
    told = ranks.call(
        rank_work.train_in_group,
        plan.gpus,
        plan=plan,
        path=checkpoint,
        exact=True,
        first=list(STEPS),
    )
    curves = {name: curve for each in told for name, curve in each.curves.items()}
    assert set(curves) == set(STEPS)
    for name, curve in curves.items():
        assert same_bits(curve, alone.curves[name]), name


def test_a_sum_over_ranks_has_other_bits(ranks: Ranks, alone: Told) -> None:
    """What the comparison sees, and why exact jobs live on one rank."""
    plan = Plan(bucket=192, replicas=2)
    told = ranks.call(rank_work.train_in_group, 2, plan=plan, exact=True, first=("dropped", "wide"))
    assert not all(
        same_bits(told[0].curves[name], alone.curves[name]) for name in ("dropped", "wide")
    )
