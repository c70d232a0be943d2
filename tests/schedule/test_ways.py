"""Workers or a group: what `tlora train --devices N` does."""

from dataclasses import replace

import pytest
from support.scheduling import request

from tlora.core.cluster import uniform_cluster
from tlora.core.errors import SpecError
from tlora.core.request import JobRequest
from tlora.costs.groups import Costs
from tlora.costs.layout import NAMED
from tlora.schedule.paper import paper_profile
from tlora.schedule.planner import Planner
from tlora.schedule.ways import WORTH_A_GROUP, choose_way, group_plan, is_apart


def planner(
    jobs: list[JobRequest], *, device_gib: float | None = None, exact: bool = False
) -> Planner:
    profile = paper_profile("llama-8b")
    if device_gib is not None:
        memory = replace(profile.memory, device_bytes=int(device_gib * 2**30), outside_bytes=0)
        profile = replace(profile, memory=memory)
    costs = Costs({"llama": profile}, uniform_cluster(64))
    return Planner(costs, jobs, layout=NAMED["llama-8b"], exact=exact)


MANY = [request(f"j{at}", batch=4) for at in range(16)]
ONE = [request("one", batch=64)]


def test_many_small_jobs_are_left_to_workers() -> None:
    """Nothing would cross ranks but the control element; the sentence has the prediction."""
    way = choose_way(planner(MANY), 4)
    assert way.plan is None
    assert "a worker on each device" in way.sentence and "tokens/s" in way.sentence


def test_one_large_job_spans_all_devices() -> None:
    """And it is said what that gains."""
    way = choose_way(planner(ONE), 4)
    assert way.plan is not None
    assert (way.plan.gpus, way.plan.fsdp, way.plan.adapters) == (4, 1, "data_parallel")
    assert "times what it would be with each job on one device" in way.sentence


def test_a_base_too_large_for_a_device_is_sharded() -> None:
    """With the numbers of what a whole copy would need."""
    way = choose_way(planner(MANY, device_gib=18), 4)
    assert way.plan is not None and way.plan.fsdp > 1
    assert "a whole copy of the base with its jobs needs" in way.sentence
    assert "GiB of 17.1" in way.sentence


def test_what_fits_nowhere_is_refused_with_what_would_do() -> None:
    """More devices, as far as there is a number of them; else what is missing."""
    with pytest.raises(SpecError, match=r"--devices: nothing fits on 2 GPUs: .*; on \d+, replicas"):
        choose_way(planner(MANY, device_gib=12), 2)
    with pytest.raises(SpecError, match=r"the least, .* needs .* GiB of 1.9 on a GPU"):
        choose_way(planner(MANY, device_gib=2), 2)


def test_little_is_not_worth_a_group() -> None:
    """A plan that is predicted to be a little faster is named, and workers train."""
    jobs = [request("large", batch=9), *(request(f"j{at}", batch=4) for at in range(3))]
    seen = set()
    for batch in range(4, 40):
        asked = planner([replace(jobs[0], load=replace(jobs[0].load, batch_size=batch)), *jobs[1:]])
        found = asked.choose(2).candidates
        apart = max(each.run_tokens_per_s for each in found if is_apart(each.plan))
        gain = found[0].run_tokens_per_s / apart - 1
        way = choose_way(asked, 2)
        is_group = not is_apart(found[0].plan) and gain >= WORTH_A_GROUP
        assert (way.plan is not None) == is_group
        seen.add(("%" in way.sentence.split(";")[-1], is_group))
    assert (True, False) in seen and any(group for _, group in seen)


def test_where_bits_count_no_job_spans_ranks_and_no_base_is_sharded() -> None:
    """Exact isolation: a job alone stays on one device; what does not fit whole is refused."""
    assert choose_way(planner(ONE, exact=True), 2).plan is None
    assert group_plan(planner(ONE, exact=True), 2).plan != group_plan(planner(ONE), 2).plan
    with pytest.raises(SpecError, match=r"nothing fits on 4 GPUs: the least, .*fsdp: 1,"):
        choose_way(planner(MANY, device_gib=18, exact=True), 4)


def test_ranks_that_were_started_are_all_used() -> None:
    """A job of one sequence a step would rather have one."""
    asked = planner([request("tiny", batch=1)])
    assert asked.choose(4).best is not None and asked.choose(4).best.plan.gpus == 1  # type: ignore[union-attr]
    way = group_plan(asked, 4, use_all=True)
    assert way.plan is not None and way.plan.gpus == 4
