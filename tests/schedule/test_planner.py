"""The plan of one group: everything tried, the best kept, the others explained."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduling import PROFILE, request

from tlora.core.cluster import uniform_cluster
from tlora.core.plan import Plan
from tlora.core.request import JobRequest
from tlora.costs.groups import Costs
from tlora.costs.layout import NAMED
from tlora.schedule.paper import plan_on_paper
from tlora.schedule.planner import ALIKE, Planner, choice_as_json


def planner(jobs: list[JobRequest], gpus: int = 8) -> Planner:
    costs = Costs({"llama": PROFILE}, uniform_cluster(gpus))
    return Planner(costs, jobs, layout=NAMED["llama-8b"])


def some(count: int, batch: int = 4) -> list[JobRequest]:
    return [request(f"j{place}", rank=16, batch=batch) for place in range(count)]


def test_a_base_that_fits_is_replicated_with_its_jobs_where_they_are() -> None:
    """Nothing crosses ranks then."""
    best = planner(some(32)).choose(8).best
    assert best is not None
    assert (best.plan.replicas, best.plan.fsdp, best.plan.adapters) == (8, 1, "rank_local")
    assert best.gather_calls == best.sum_bytes == 0


def test_fewer_jobs_than_gpus_span_ranks() -> None:
    """Of three jobs with sequences for all, data-parallel ones use every GPU."""
    choice = planner(some(3, batch=16)).choose(8)
    assert choice.best is not None
    assert choice.best.plan.adapters == "data_parallel"
    whys = [each.why for each in choice.candidates if each.plan.adapters == "rank_local"]
    assert any("5 of 8 ranks have nothing to train" in why for why in whys)
    assert any("leaves 5 of 8 GPUs unused" in why for why in whys)


def test_one_large_job_among_small_ones_is_spread_alone() -> None:
    """In nano-batches of 2,048 tokens on one rank it would keep that as busy as the others, and be
    done much later."""
    jobs = [request("big", batch=64), *some(7)]
    asked = planner(jobs)
    choice = asked.choose(8)
    found = {each.plan.adapters: each.price for each in reversed(choice.candidates)}
    assert choice.best is found["mixed"]
    assert found["mixed"].plan.spread == ("big",)
    busy = asked.price(Plan(replicas=8, bucket=2048, adapters="rank_local"))
    assert busy.tokens_per_s > found["mixed"].tokens_per_s
    assert asked.all_done_s(busy) > 2 * asked.all_done_s(found["mixed"])
    assert asked.all_done_s(found["rank_local"]) > 2 * asked.all_done_s(found["mixed"])


def test_a_base_that_does_not_fit_is_sharded() -> None:
    """70B on eight H200: whole copies are refused with the parts of what they need."""
    choice = plan_on_paper("llama-70b", 8).choice
    assert choice.best is not None
    assert choice.best.plan.fsdp > 1
    whole = next(each for each in choice.candidates if each.plan.is_replicated_only)
    assert not whole.price.fits
    assert "needs" in whole.why
    assert "base 131.4" in whole.why


def test_where_nothing_fits_the_least_is_told() -> None:
    """70B on one H200."""
    choice = plan_on_paper("llama-70b", 1).choice
    assert choice.best is None
    assert choice.sentence.startswith("Nothing fits on 1 GPU. The least is")
    assert choice_as_json(choice)["best"] is None


def test_what_nothing_runs_yet_is_priced_and_never_chosen() -> None:
    """Pipelines are among the candidates on paper, and say so."""
    choice = plan_on_paper("llama-70b", 8).choice
    apart = [each for each in choice.candidates if not each.plan.is_executed]
    assert {(each.plan.tp > 1, each.plan.pp > 1) for each in apart} >= {
        (True, False),
        (False, True),
    }
    assert not any(each.is_best for each in apart)
    assert all("not executed yet" in each.why for each in apart if each.price.fits)
    assert planner(some(8)).choose(8).candidates
    assert all(each.plan.is_executed for each in planner(some(8)).choose(8).candidates)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(1, 32), st.integers(16, 2048)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 12),
)
def test_the_best_is_the_fastest_that_fits(shapes: list[tuple[int, int, int]], world: int) -> None:
    """Whatever the jobs: no candidate that fits has all done sooner by more than what is alike,
    none uses more GPUs than there are, and each layout stands once."""
    jobs = [
        request(f"j{place}", rank=rank, batch=batch, length=length)
        for place, (rank, batch, length) in enumerate(shapes)
    ]
    choice = planner(jobs, gpus=world).choose(world)
    plans = [each.plan for each in choice.candidates]
    assert len(set(plans)) == len(plans)
    assert all(plan.gpus <= world for plan in plans)
    fitting = [each.run_tokens_per_s for each in choice.candidates if each.price.fits]
    assert (choice.best is not None) == bool(fitting)
    if choice.best is not None:
        assert choice.candidates[0].price is choice.best
        assert choice.candidates[0].run_tokens_per_s >= max(fitting) * (1 - ALIKE)


def test_the_same_question_has_the_same_answer() -> None:
    """Asked of another planner."""
    jobs = some(12)
    one, other = (choice_as_json(planner(jobs).choose(8)) for _ in range(2))
    assert one == other


def test_the_size_of_nano_batches_can_be_held() -> None:
    """And only that size is tried."""
    choice = planner(some(8)).choose(8, bucket=2048)
    assert {each.plan.bucket for each in choice.candidates} == {2048}


def test_waiting_for_weights_buys_kept_layers_where_memory_is_free() -> None:
    """Small nano-batches on shards: layers stay gathered, and it gets faster."""
    choice = planner(some(8, batch=1)).choose(8, bucket=512)
    kept, plain = (
        each
        for each in choice.candidates
        if (each.plan.fsdp, each.plan.adapters) == (8, "rank_local")
    )
    assert (kept.plan.kept_layers, plain.plan.kept_layers) == (32, 0)
    assert kept.price.tokens_per_s > plain.price.tokens_per_s
    assert kept.plan.is_executed and kept.price.fits


@pytest.mark.parametrize("shape", ["llama-8b", "qwen-32b", "llama-70b"])
def test_more_gpus_train_more(shape: str) -> None:
    """On paper, from 2 to 32 H200s with eight jobs for each."""
    rates = [plan_on_paper(shape, gpus).choice.best for gpus in (2, 8, 32)]
    tokens = [best.tokens_per_s for best in rates if best is not None]
    assert tokens == sorted(tokens)
    assert len(tokens) >= 2
