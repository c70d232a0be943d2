"""Whether a plan can run: on so many ranks, with these jobs, in this memory.

What cannot run is refused with the numbers and the nearest plan that can; what runs but wastes is
explained.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from tlora.core.errors import SpecError
from tlora.core.plan import Plan
from tlora.core.wording import number_of
from tlora.costs.plans import PlanPrice
from tlora.schedule.planner import (
    ALIKE,
    Planner,
    least_memory,
    memory_text,
    not_executed,
)


def check_plan(
    plan: Plan, *, world: int, jobs: Sequence[str], planner: Planner | None = None
) -> tuple[str, ...]:
    """What a person should know of a plan that can run. Raises SpecError for one that cannot.
    Without a planner nothing is known of memory and of the base's layers."""
    if not plan.is_executed:
        raise SpecError(f"{not_executed(plan)}; {_try(_untensored(plan, world))}", field="plan")
    if plan.gpus != world:
        raise SpecError(
            f"replicas {plan.replicas} x fsdp {plan.fsdp} is {number_of(plan.gpus, 'GPU')}, "
            f"and there {'is' if world == 1 else 'are'} {world}; {_try(resized(plan, world))}",
            field="plan",
        )
    unknown = [name for name in plan.spread if name not in jobs]
    if unknown:
        raise SpecError(
            f"names {', '.join(unknown)}, and the jobs are {', '.join(jobs)}", field="plan.spread"
        )
    notes = _idle_notes(plan, jobs)
    if planner is None:
        return notes
    price = planner.price(plan)
    if not price.fits:
        raise SpecError(f"{memory_text(price)}; {_nearest(plan, world, planner)}", field="plan")
    if price.memory.total is None or price.usable_bytes is None:
        notes += ("Whether it fits is not known: the profile has no measured memory.",)
    if price.idle_share > 0.2 and not price.empty_ranks:
        notes += (f"Ranks wait {price.idle_share:.0%} of the time for the fullest.",)
    return notes


def distance(one: Plan, other: Plan) -> float:
    """Doublings of each number between two plans; another placement of adapters is one too."""
    pairs = ((one.replicas, other.replicas), (one.fsdp, other.fsdp), (one.bucket, other.bucket))
    apart = sum(abs(math.log2(mine / theirs)) for mine, theirs in pairs)
    return apart + (one.adapters != other.adapters)


def resized(plan: Plan, world: int) -> Plan:
    """The plan carried to so many ranks, with no fewer shards, as far as there are ranks: what fits
    a GPU hangs on them."""
    enough = [count for count in range(plan.fsdp, world) if world % count == 0]
    fsdp = enough[0] if enough else world
    fsdp = 1 if plan.fsdp == 1 else fsdp
    kept = plan.kept_layers if fsdp > 1 else 0
    return replace(plan, replicas=world // fsdp, fsdp=fsdp, kept_layers=kept)


def smaller(plan: Plan, planner: Planner) -> Plan | None:
    """What a group goes on with that has lost a rank: of the plans on fewer ranks that fit, the one
    that has the jobs left done soonest; jobs that span ranks still do, and nano-batches are no
    larger. None if there is none. Where memory is not known there are no fewer shards, as far as
    there are ranks."""
    able = [price for price in _on_fewer(plan, planner) if price.fits]
    if not able:
        return None
    most = max(map(planner.run_tokens_per_s, able))
    alike = [price for price in able if planner.run_tokens_per_s(price) >= most * (1 - ALIKE)]
    return min(alike, key=lambda price: (price.plan.fsdp, distance(plan, price.plan))).plan


def nothing_smaller(plan: Plan, planner: Planner) -> str:
    """Why there is none, with the numbers."""
    prices = _on_fewer(plan, planner)
    if not prices:
        return "there is no rank left to go on with"
    least = min(prices, key=least_memory)
    return (
        f"nothing fits on {number_of(plan.gpus - 1, 'GPU')}: the least, {_as_fields(least.plan)}, "
        f"{memory_text(least)}"
    )


def _on_fewer(plan: Plan, planner: Planner) -> list[PlanPrice]:
    """For each number of shards, as many copies as there is room for."""
    world = plan.gpus - 1
    known = planner.price(plan).memory.total is not None
    most = world if planner.may_shard else min(1, world)
    sizes = sorted({plan.bucket, *(size for size in planner.sizes() if size < plan.bucket)})
    return [
        planner.price(replace(plan, replicas=world // fsdp, fsdp=fsdp, bucket=size, kept_layers=0))
        for fsdp in range(min(1 if known else plan.fsdp, most), most + 1)
        if fsdp
        for size in sizes
    ]


def _idle_notes(plan: Plan, jobs: Sequence[str]) -> tuple[str, ...]:
    local = len(jobs) - len(plan.spread)
    if plan.adapters == "data_parallel" or plan.spread or local >= plan.ranks:
        return ()
    enough = number_of(max(1, local), "rank")
    return (
        f"{number_of(local, 'rank-local job')} on {plan.ranks} ranks: "
        f"{plan.ranks - local} of them train nothing. Take {enough}, or adapters: data_parallel, "
        "which deals every job's sequences to all.",
    )


def _nearest(plan: Plan, world: int, planner: Planner) -> str:
    """Of the plans that fit: with smaller nano-batches if that is enough, else otherwise laid
    out."""
    smaller = [
        planner.price(replace(plan, bucket=size)) for size in planner.sizes() if size <= plan.bucket
    ]
    if plan.kept_layers:
        smaller.append(planner.price(replace(plan, kept_layers=0)))
    prices = smaller + [each.price for each in planner.choose(world).candidates]
    able = [price for price in prices if price.fits and price.plan.gpus == world]
    if able:
        return _try(min(able, key=lambda price: distance(plan, price.plan)).plan)
    return more_gpus(world, planner)


def more_gpus(world: int, planner: Planner) -> str:
    """Of a group that fits on no plan of so many: how many would do, as far as the cluster goes."""
    for more in _doubled(world, len(planner.costs.cluster)):
        best = planner.choose(more).best
        if best is not None:
            return f"{_least(world, planner)}; on {more}, {_as_fields(best.plan)} fits"
    return _least(world, planner)


def _least(world: int, planner: Planner) -> str:
    prices = [each.price for each in planner.choose(world).candidates]
    least = min(prices, key=least_memory)
    return (
        f"nothing fits on {number_of(world, 'GPU')}: the least, {_as_fields(least.plan)}, "
        f"{memory_text(least)}"
    )


def _doubled(world: int, most: int) -> list[int]:
    found: list[int] = []
    while (world := world * 2) <= most:
        found.append(world)
    return found


def _untensored(plan: Plan, world: int) -> Plan:
    shards = plan.fsdp * plan.tp * plan.pp
    return resized(replace(plan, fsdp=shards, tp=1, pp=1, kept_layers=0), world)


def _try(plan: Plan) -> str:
    return f"nearest: {_as_fields(plan)}"


def _as_fields(plan: Plan) -> str:
    """As a plan file has them."""
    kept = f"kept_layers: {plan.kept_layers}, " if plan.kept_layers else ""
    spread = f", spread: [{', '.join(plan.spread)}]" if plan.spread else ""
    return (
        f"replicas: {plan.replicas}, fsdp: {plan.fsdp}, {kept}bucket: {plan.bucket}, "
        f"adapters: {plan.adapters}{spread}"
    )
