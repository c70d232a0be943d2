"""Plans that cannot run are refused with numbers and the nearest that can; wasteful ones are
explained."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduling import request

from tlora.core.cluster import uniform_cluster
from tlora.core.errors import SpecError
from tlora.core.plan import Plan
from tlora.costs.groups import Costs
from tlora.costs.layout import NAMED
from tlora.schedule.paper import paper_jobs, paper_profile
from tlora.schedule.plan_check import (
    check_plan,
    distance,
    nothing_smaller,
    resized,
    smaller,
)
from tlora.schedule.planner import Planner

JOBS = [f"j{place}" for place in range(16)]


def planner(shape: str, jobs: int = 16, gpus: int = 64) -> Planner:
    costs = Costs({shape: paper_profile(shape)}, uniform_cluster(gpus))
    return Planner(costs, paper_jobs(jobs, shape), layout=NAMED[shape])


def test_a_world_that_does_not_divide_is_refused_with_the_nearest() -> None:
    """Eight ranks asked for where six are."""
    with pytest.raises(SpecError) as error:
        check_plan(Plan(replicas=2, fsdp=4, bucket=512), world=6, jobs=JOBS)
    assert "replicas 2 x fsdp 4 is 8 GPUs, and there are 6" in str(error.value)
    assert "nearest: replicas: 1, fsdp: 6" in str(error.value)


def test_the_nearest_plan_says_whose_jobs_span_ranks() -> None:
    """It can be copied as it stands."""
    plan = Plan(replicas=2, bucket=512, adapters="mixed", spread=("j1", "j2"))
    with pytest.raises(SpecError, match=r"adapters: mixed, spread: \[j1, j2\]$"):
        check_plan(plan, world=3, jobs=JOBS)


def test_fewer_ranks_keep_as_many_shards_as_there_are() -> None:
    """What fitted still fits; whole copies stay whole."""
    sizes = {(4, 2, 7): (1, 7), (4, 2, 6): (3, 2), (1, 8, 4): (1, 4), (8, 1, 5): (5, 1)}
    for (replicas, fsdp, world), expected in sizes.items():
        found = resized(Plan(replicas=replicas, fsdp=fsdp, bucket=512), world)
        assert (found.replicas, found.fsdp) == expected


def test_memory_that_cannot_fit_is_refused_with_the_nearest() -> None:
    """Whole copies of 70B; smaller nano-batches where they are enough; more GPUs where nothing
    fits."""
    big = planner("llama-70b")
    with pytest.raises(SpecError, match=r"needs .* GiB of 132.0 .*nearest: replicas: ., fsdp: ."):
        check_plan(Plan(replicas=8, bucket=8192), world=8, jobs=JOBS, planner=big)
    more = planner("llama-70b", jobs=32)
    with pytest.raises(SpecError, match="nearest: replicas: 1, fsdp: 8, bucket: 2048"):
        plan = Plan(fsdp=8, bucket=8192, adapters="rank_local")
        check_plan(plan, world=8, jobs=JOBS, planner=more)
    with pytest.raises(
        SpecError, match=r"nothing fits on 1 GPU: the least.*; on [24], replicas.* fits"
    ):
        check_plan(Plan(bucket=512), world=1, jobs=JOBS, planner=big)
    with pytest.raises(SpecError, match="nothing fits on 1 GPU: the least"):
        small = planner("llama-70b", gpus=1)
        check_plan(Plan(bucket=512), world=1, jobs=JOBS, planner=small)


def test_a_group_that_loses_a_rank_goes_on_with_what_fits() -> None:
    """Whole copies with one less; 70B with a shard less, or with smaller nano-batches, as long as
    there is room, and then not at all, with the numbers."""
    local = Plan(replicas=4, bucket=8192, adapters="rank_local")
    assert smaller(local, planner("llama-8b")) == replace(local, replicas=3)
    big = planner("llama-70b", jobs=8)
    plan: Plan | None = Plan(fsdp=6, bucket=8192, adapters="rank_local")
    seen: list[Plan] = []
    while plan is not None:
        seen.append(plan)
        assert plan is seen[0] or big.price(plan).fits
        plan = smaller(plan, big)
    sizes = [each.gpus for each in seen]
    assert sizes == sorted(set(sizes), reverse=True) and sizes[-1] > 1
    assert sorted((each.bucket for each in seen), reverse=True) == [each.bucket for each in seen]
    why = nothing_smaller(seen[-1], big)
    assert re.search(rf"nothing fits on {sizes[-1] - 1} GPU.* needs .* GiB of 132.0", why)


def test_shards_are_kept_where_memory_is_not_known() -> None:
    """A base that was sharded may not fit otherwise; the last rank has it whole all the same."""
    profile = paper_profile("llama-8b")
    memory = replace(profile.memory, device_bytes=None, row_bytes=None)
    costs = Costs({"llama-8b": replace(profile, memory=memory)}, uniform_cluster(8))
    unknown = Planner(costs, paper_jobs(8, "llama-8b"), layout=NAMED["llama-8b"])
    found = smaller(Plan(replicas=2, fsdp=2, bucket=512, adapters="rank_local"), unknown)
    assert found is not None and found.fsdp >= 2 and found.gpus <= 3
    last = smaller(Plan(fsdp=2, bucket=512, adapters="mixed", spread=("j0",)), unknown)
    assert last is not None and last == Plan(bucket=512, adapters="mixed", spread=("j0",))
    assert smaller(last, unknown) is None
    assert nothing_smaller(last, unknown) == "there is no rank left to go on with"


def test_more_ranks_than_rank_local_jobs_are_explained() -> None:
    """They run: jobs come and go. But it is said, with what would use them."""
    plan = Plan(replicas=8, bucket=512, adapters="rank_local")
    (note,) = check_plan(plan, world=8, jobs=JOBS[:3])
    assert "3 rank-local jobs on 8 ranks: 5 of them train nothing" in note
    assert "data_parallel" in note
    assert check_plan(plan, world=8, jobs=JOBS[:8]) == ()
    spread = Plan(replicas=8, bucket=512, adapters="mixed", spread=("j0",))
    assert check_plan(spread, world=8, jobs=JOBS[:3]) == ()


def test_uneven_ranks_are_explained() -> None:
    """One job with nearly all of the work."""
    costs = Costs({"llama": paper_profile("llama-8b")}, uniform_cluster(2))
    jobs = [request("big", batch=16), request("small", batch=1)]
    plan = Plan(replicas=2, bucket=8192, adapters="rank_local")
    (note,) = check_plan(plan, world=2, jobs=["big", "small"], planner=Planner(costs, jobs))
    assert "for the fullest" in note


def test_jobs_to_spread_must_be_there() -> None:
    """The message names them."""
    plan = Plan(replicas=2, bucket=512, adapters="mixed", spread=("j0", "nobody"))
    with pytest.raises(SpecError, match=r"plan.spread: names nobody"):
        check_plan(plan, world=2, jobs=JOBS)


def test_what_nothing_runs_yet_is_refused_with_shards_instead() -> None:
    """Tensor and pipeline parallel plans have a price only."""
    with pytest.raises(
        SpecError, match="tp and pp: priced, not executed yet; nearest: replicas: 1"
    ):
        check_plan(Plan(tp=2, pp=2, bucket=512), world=4, jobs=JOBS)


@given(
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(1, 128),
    st.sampled_from(["rank_local", "data_parallel"]),
    st.integers(1, 20),
)
def test_a_plan_runs_on_as_many_ranks_as_it_has_and_no_others(
    replicas: int, fsdp: int, world: int, adapters: str, jobs: int
) -> None:
    """And the plan it is resized to runs."""
    plan = Plan(replicas=replicas, fsdp=fsdp, bucket=512, adapters=adapters)  # type: ignore[arg-type]
    names = [f"j{place}" for place in range(jobs)]
    other = resized(plan, world)
    check_plan(other, world=world, jobs=names)
    if plan.gpus == world:
        check_plan(plan, world=world, jobs=names)
        assert other == plan
        assert distance(plan, other) == 0
    else:
        with pytest.raises(SpecError, match=f"nearest: replicas: {other.replicas}, fsdp: "):
            check_plan(plan, world=world, jobs=names)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["llama-8b", "qwen-32b", "llama-70b"]),
    st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (2, 4), (1, 8)]),
    st.sampled_from([512, 1024, 2048, 4096, 8192]),
    st.sampled_from(["rank_local", "data_parallel"]),
)
def test_what_passes_fits_and_what_is_refused_does_not(
    shape: str, sizes: tuple[int, int], bucket: int, adapters: str
) -> None:
    """For every base, layout and size; a refusal has the numbers."""
    plan = Plan(replicas=sizes[0], fsdp=sizes[1], bucket=bucket, adapters=adapters)  # type: ignore[arg-type]
    asked = planner(shape, gpus=8)
    fits = asked.price(plan).fits
    try:
        check_plan(plan, world=plan.gpus, jobs=JOBS, planner=asked)
    except SpecError as error:
        assert not fits
        assert "GiB" in str(error)
    else:
        assert fits
