"""Nano-batches whose size is tuned, in a group: one rank measures, and all follow."""

import pytest
from support import rank_work
from support.curves import difference
from support.rank_jobs import FIRST, Told
from support.ranks import Ranks

from tlora.core.plan import Plan

ROUNDING = 5e-6
PLANS = {
    "replicated": Plan(bucket=192, replicas=2, adapters="mixed", spread=("wide",)),
    "sharded": Plan(bucket=192, fsdp=2, adapters="mixed", spread=("wide",)),
}


def same_as_alone(told: list[Told], alone: Told) -> bool:
    curves = {name: curve for each in told for name, curve in each.curves.items()}
    return all(difference(curves[name], alone.curves[name]).within(ROUNDING) for name in FIRST)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_all_ranks_take_every_size_at_the_same_turn(
    plan: Plan, ranks: Ranks, checkpoint: str, alone: Told
) -> None:
    """Another one after every nano-batch; each job ends as alone."""
    told = ranks.call(
        rank_work.train_in_group, 2, plan=plan, path=checkpoint, controller="stepping", late={}
    )
    agreed = [[budget for budget, _ in each.budgets] for each in told]
    assert agreed[0] == agreed[1] and len(set(agreed[0])) > 5
    assert all(budget == own for budget, own in told[1].budgets)
    assert same_as_alone(told, alone)


def test_the_rank_that_measures_hears_of_memory_on_another(
    ranks: Ranks, checkpoint: str, alone: Told
) -> None:
    """Its limit falls, and with it the size on all ranks; until then the rank without room goes on
    with less."""
    told = ranks.call(
        rank_work.train_in_group,
        2,
        plan=PLANS["sharded"],
        path=checkpoint,
        controller="usual",
        break_pass=(1, 3, "forward"),
        fault="memory",
        late={},
    )
    assert told[0].actions[0] == "limit" and not told[0].errors
    (before, own), *after = told[1].budgets[told[1].budgets.index((192, 96)) :]
    assert (before, own) == (192, 96)
    assert all(budget < 192 for budget, _ in after[1:])
    assert not any(each.failed for each in told)
    assert same_as_alone(told, alone)
