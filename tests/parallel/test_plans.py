"""Every plan gives each job the losses and the adapter that it has in one process."""

import pytest
from support import rank_work
from support.curves import Curve, difference
from support.rank_jobs import FIRST, LATE, Told
from support.ranks import Ranks

from tlora.core.plan import Plan

# As in tests/laws: relative, in float32. Measured over all plans: at most 7e-8 in the losses,
# 3e-7 in the gradient norms, 1.5e-6 in the adapters.
ROUNDING = 5e-6

PLANS = {
    "replicated, rank-local": Plan(bucket=192, replicas=2, adapters="rank_local"),
    "replicated, data-parallel": Plan(bucket=192, replicas=2),
    "sharded, rank-local": Plan(bucket=192, fsdp=2, adapters="rank_local"),
    "sharded and kept, data-parallel": Plan(bucket=192, fsdp=2, kept_layers=1),
    "sharded, mixed": Plan(bucket=192, fsdp=2, adapters="mixed", spread=("wide", "one")),
    "four, rank-local": Plan(bucket=192, replicas=4, adapters="rank_local"),
    "four, data-parallel": Plan(bucket=192, replicas=4),
    "two by two, mixed": Plan(
        bucket=192, replicas=2, fsdp=2, adapters="mixed", spread=("dropped", "widest")
    ),
}


def merged(told: list[Told]) -> dict[str, Curve]:
    """Of every job; those that span ranks must have the same bits on all of them."""
    found: dict[str, Curve] = {}
    for each in told:
        for name, curve in each.curves.items():
            if name in found:
                assert curve.losses == found[name].losses, name
                assert all(
                    (pair.a == found[name].adapter[path].a).all()
                    and (pair.b == found[name].adapter[path].b).all()
                    for path, pair in curve.adapter.items()
                ), name
            found[name] = curve
    return found


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_plan_changes_no_job(plan: Plan, ranks: Ranks, checkpoint: str, alone: Told) -> None:
    """Jobs of all ranks and dropouts, evaluated, some arriving late and all leaving when they are
    over; those that span ranks with the same bits on every rank."""
    told = ranks.call(
        rank_work.train_in_group,
        plan.gpus,
        plan=plan,
        path=checkpoint,
        first=FIRST,
        late=LATE,
    )
    curves = merged(told)
    assert set(curves) == set(alone.curves)
    for name, curve in curves.items():
        found = difference(curve, alone.curves[name])
        assert found.within(ROUNDING), (name, found)
    for each in told:
        assert not each.errors and not each.failed
        for name, losses in each.evaluations.items():
            assert losses == pytest.approx(alone.evaluations[name], rel=ROUNDING), name


@pytest.mark.parametrize(
    "twin", ["summed twice", "not summed", "norm of one rank", "every rank runs all"]
)
def test_a_wrong_sum_is_refused(twin: str, ranks: Ranks, alone: Told) -> None:
    """Gradients counted twice or not at all, a norm that knows one rank, sequences run by all."""
    plan = Plan(bucket=192, replicas=2)
    told = ranks.call(
        rank_work.train_in_group, 2, plan=plan, first=("dropped",), twin=twin, late={}
    )
    curve = told[0].curves["dropped"]
    assert not difference(curve, alone.curves["dropped"]).within(ROUNDING)
