"""What a group costs under any plan."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduling import PROFILE, request

from tlora.core.cluster import Link, uniform_cluster
from tlora.core.dealing import deal_jobs, load_of
from tlora.core.errors import SpecError
from tlora.core.plan import Placement, Plan
from tlora.core.request import JobRequest
from tlora.costs import plans
from tlora.costs.deck import Deck, RankWork, placement_of
from tlora.costs.groups import Costs
from tlora.costs.layout import NAMED
from tlora.costs.plan_links import CONTROLS
from tlora.costs.plans import PlanPrice, price_plan
from tlora.costs.rounds import BaseCosts

CLUSTER = uniform_cluster(16)
LAYOUT = NAMED["llama-8b"]


def costs_of(cluster=CLUSTER) -> Costs:
    return Costs({"llama": PROFILE}, cluster)


def priced(jobs: list[JobRequest], plan: Plan, costs: Costs | None = None) -> PlanPrice:
    return price_plan(costs or costs_of(), jobs, [1.0] * len(jobs), plan, layout=LAYOUT)


def eight(batch: int = 4) -> list[JobRequest]:
    return [request(f"j{place}", rank=16, batch=batch) for place in range(8)]


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(1, 16), st.integers(16, 2048)),
        min_size=1,
        max_size=10,
    ),
    st.sampled_from([512, 2048, 8192]),
    st.sampled_from([1, 2, 3, 8, 16]),
)
def test_replicas_compute_as_long_as_policies_are_told(
    shapes: list[tuple[int, int, int]], bucket: int, replicas: int
) -> None:
    """Seconds, rates and memory, whatever the mix, but for the control element and for sums of
    gradients, which policies know as a ring."""
    costs = costs_of()
    jobs = [
        request(f"j{place}", rank=rank, batch=batch, length=length)
        for place, (rank, batch, length) in enumerate(shapes)
    ]
    plan = Plan(replicas=replicas, bucket=bucket)
    tier = CLUSTER.tier(range(replicas))
    told = costs.predict(jobs, [1.0] * len(jobs), plan, tier)
    found = priced(jobs, plan, costs)
    link = CLUSTER.link(tier)
    control_s = ring_s = 0.0
    if link is not None:
        control_s = CONTROLS * link.latency_s
        steps = [
            tokens / job.load.batch_tokens for tokens, job in zip(told.tokens, jobs, strict=True)
        ]
        values = [
            many * job.load.rank * PROFILE.parameters_per_rank
            for many, job in zip(steps, jobs, strict=True)
        ]
        ring_s = min(1.0, sum(steps)) * link.latency_s
        ring_s += 2 * (replicas - 1) / replicas * 4 * sum(values) / link.bytes_per_s
    assert found.compute_s == pytest.approx(told.round_s - ring_s, rel=1e-9)
    assert found.round_s == pytest.approx(found.compute_s + control_s + found.sum_s)
    assert found.tokens == pytest.approx(told.tokens)
    assert found.memory.total == pytest.approx(told.memory_bytes + found.memory.sums)
    if replicas == 1:
        assert found.round_s == pytest.approx(told.round_s, rel=1e-9)
        assert found.fits == told.fits


def test_policies_are_not_told_a_price_that_is_not_theirs() -> None:
    """A sharded base and rank-local adapters have another one."""
    for plan in (Plan(fsdp=2, bucket=512), Plan(replicas=2, bucket=512, adapters="rank_local")):
        with pytest.raises(SpecError, match="price_plan"):
            costs_of().predict(eight(), [1.0] * 8, plan, CLUSTER.tier((0, 1)))


def test_rank_local_jobs_sum_nothing_and_rest_on_their_ranks() -> None:
    """Each rank holds its own adapters; data-parallel ones are on all, and summed."""
    local = priced(eight(), Plan(replicas=4, bucket=8192, adapters="rank_local"))
    spread = priced(eight(), Plan(replicas=4, bucket=8192))
    assert local.sum_bytes == local.sum_s == 0
    gradients = 4 * 16 * PROFILE.parameters_per_rank
    assert spread.sum_bytes == pytest.approx(2 * 8 * gradients)
    assert spread.memory.sums == pytest.approx((2 + 1 / 4) * gradients)
    assert local.memory.sums == 0
    assert local.memory.adapters == pytest.approx(spread.memory.adapters / 4)
    assert sorted(rank for rank in local.placement if rank is not None) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert local.tokens_per_s > spread.tokens_per_s


def test_jobs_that_span_ranks_stand_beside_rank_local_ones() -> None:
    """The large one is dealt to all and alone is summed; the ranks are evener than without."""
    jobs = [request("big", batch=16), request("a", batch=2), request("b", batch=2)]
    mixed = priced(jobs, Plan(replicas=2, bucket=8192, adapters="mixed", spread=("big",)))
    local = priced(jobs, Plan(replicas=2, bucket=8192, adapters="rank_local"))
    assert mixed.placement[0] is None
    assert set(mixed.placement[1:]) == {0, 1}
    assert mixed.sum_bytes == pytest.approx(2 * 4 * 8 * PROFILE.parameters_per_rank)
    assert mixed.idle_share < local.idle_share
    assert mixed.tokens_per_s > local.tokens_per_s


def test_ranks_without_a_job_are_counted_and_idle() -> None:
    """Two jobs on eight ranks leave six of them idle three quarters of the time."""
    found = priced(eight()[:2], Plan(replicas=8, bucket=8192, adapters="rank_local"))
    assert found.empty_ranks == 6
    assert found.idle_share == pytest.approx(0.75, rel=0.01)
    assert priced(eight(), Plan(replicas=8, bucket=8192, adapters="rank_local")).idle_share < 1e-9


def test_shards_hold_a_part_of_the_base_and_the_layers_at_work() -> None:
    """By the layout, padding included; kept layers are on top."""
    plan = Plan(fsdp=8, bucket=8192, adapters="rank_local")
    found = priced(eight(), plan).memory
    layer = LAYOUT.gathered_bytes(LAYOUT.layers[0], 8)
    assert found.weights == LAYOUT.shard_bytes(8)
    table = LAYOUT.gathered_bytes(LAYOUT.embeddings, 8)
    assert found.gathered == max(3 * layer, table)
    kept = priced(eight(), replace(plan, kept_layers=10)).memory
    assert kept.gathered - found.gathered == pytest.approx(10 * layer)
    everything = priced(eight(), replace(plan, kept_layers=32)).memory
    assert everything.gathered == 32 * layer + table
    whole = priced(eight(), Plan(replicas=8, bucket=8192, adapters="rank_local")).memory
    assert whole.weights == PROFILE.memory.weights_bytes
    assert whole.gathered == 0


def test_gathers_hide_behind_large_nano_batches_and_not_behind_small_ones() -> None:
    """Per layer the longer of the two counts: by hand for a link so slow that nothing hides."""
    slow = Link(bytes_per_s=1e6, latency_s=0.0)
    costs = costs_of(uniform_cluster(8, links=(slow, slow, slow)))
    plan = Plan(fsdp=8, bucket=8192, adapters="rank_local")
    found = priced(eight(16), plan, costs)
    gathered = LAYOUT.gathered_bytes(LAYOUT.layers[0], 8) * 7 / 8 / 1e6
    around = (2 * 128_256 + 2) * 4096 * 2 * 7 / 8 / 1e6
    layers_s = (found.compute_s - _steps_s(costs, found)) * (
        1 - LAYOUT.head_parameters / LAYOUT.matmul_parameters
    )
    assert found.waiting_s == pytest.approx(around + 64 * gathered - layers_s * 31 / 32, rel=1e-6)
    fast = priced(eight(16), plan)
    assert fast.communication_share < 0.05
    assert priced(eight(1), replace(plan, bucket=512)).communication_share > 0.2


def test_between_processes_nothing_hides() -> None:
    """The processor that computes is the one that copies: every layer waits for its gathers."""
    plan = Plan(fsdp=8, bucket=8192, adapters="rank_local")
    link = Link(bytes_per_s=1e12, latency_s=1e-3)
    beside, alone = (
        priced(eight(16), plan, costs_of(uniform_cluster(8, links=(each, each, each))))
        for each in (link, replace(link, overlaps=False))
    )
    gathered = LAYOUT.gathered_bytes(LAYOUT.layers[0], 8) * 7 / 8 / 1e12 + 1e-3
    assert alone.waiting_s - beside.waiting_s == pytest.approx(62 * gathered, rel=1e-6)


def test_all_layers_kept_leave_the_tables_to_be_gathered() -> None:
    """And one call less per layer and direction before that."""
    plan = Plan(fsdp=8, bucket=2048, adapters="rank_local")
    calls = [priced(eight(), replace(plan, kept_layers=kept)).gather_calls for kept in (0, 1, 32)]
    assert calls == [68, 66, 4]
    with pytest.raises(SpecError, match="has 32 layers"):
        priced(eight(), replace(plan, kept_layers=33))


def test_hsdp_gathers_within_a_node_and_sums_between() -> None:
    """Two nodes of eight: shards of eight wait less than shards of sixteen."""
    within = priced(eight(16), Plan(replicas=2, fsdp=8, bucket=1024))
    across = priced(eight(16), Plan(fsdp=16, bucket=1024))
    assert within.waiting_s < across.waiting_s
    assert within.sum_s == pytest.approx(across.sum_s)


def test_tensor_and_pipeline_plans_have_a_price() -> None:
    """They take part of the weights each, and say that nothing runs them."""
    one = priced(eight(16), Plan(bucket=8192))
    assert one.plan.is_executed
    for plan in (Plan(tp=4, bucket=8192), Plan(pp=4, bucket=8192)):
        found = priced(eight(16), plan)
        assert one.tokens_per_s < found.tokens_per_s < 4 * one.tokens_per_s * 1.01
        assert found.memory.weights == pytest.approx(one.memory.weights / 4)
        assert not plan.is_executed


def test_a_pipeline_that_is_not_fed_is_no_faster() -> None:
    """One nano-batch has to go through all stages."""
    one = priced(eight(1)[:1], Plan(bucket=512))
    found = priced(eight(1)[:1], Plan(pp=4, bucket=512))
    assert found.tokens_per_s <= one.tokens_per_s


def test_what_cannot_be_priced_is_refused() -> None:
    """More GPUs than there are; shards of a base of which nothing is known."""
    with pytest.raises(SpecError, match="32 GPUs, got 16"):
        priced(eight(), Plan(replicas=32, bucket=512))
    unknown = Costs({"llama": replace(PROFILE, shape="nobody")}, CLUSTER)
    with pytest.raises(SpecError, match="layout of the base is not known"):
        price_plan(unknown, eight(), [1.0] * 8, Plan(fsdp=2, bucket=512))


def test_jobs_are_priced_where_a_group_puts_them() -> None:
    """By the work they have left, not by that of a batch; those that span ranks are nowhere."""
    jobs = [request("a", batch=8, steps=10), request("b", steps=900), request("c", steps=800)]
    local = Plan(replicas=2, bucket=512, adapters="rank_local")
    assert placement_of(jobs, local) == [1, 0, 1]
    places = deal_jobs([load_of(each) for each in jobs], 2)
    assert placement_of(jobs, local) == [places[each.name] for each in jobs]
    mixed = replace(local, adapters="mixed", spread=("b",))
    assert placement_of(jobs, mixed) == [1, None, 0]
    assert placement_of(jobs, replace(local, adapters="data_parallel")) == [None] * 3


def _steps_s(costs: Costs, price: PlanPrice) -> float:
    base = costs.base("llama")
    return base.pass_s + costs.figures(eight(16)[0]).whole.step_s


@given(st.integers(1, 12), st.integers(1, 20), st.sampled_from(["rank_local", "data_parallel"]))
def test_every_rank_is_of_one_kind(jobs: int, replicas: int, adapters: Placement) -> None:
    """Each job on its rank, and the ranks that are left without."""
    plan = Plan(replicas=replicas, bucket=512, adapters=adapters)
    asked = [request(f"j{place}") for place in range(jobs)]
    placement = placement_of(asked, plan)
    deck = Deck([costs_of().figures(each) for each in asked], [1.0] * jobs, placement, plan)
    assert sum(kind.count for kind in deck.kinds) == plan.ranks
    held = [list(kind.local) for kind in deck.kinds for _ in range(kind.count)]
    assert held == [
        [job for job, at in enumerate(placement) if at == rank] for rank in range(plan.ranks)
    ]


@pytest.mark.parametrize("adapters", ["rank_local", "data_parallel"])
def test_ranks_that_are_alike_are_priced_once(
    adapters: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three jobs have at most three ranks of their own, however many there are."""
    asked: list[object] = []

    def counted(base: BaseCosts, rank: RankWork, plan: Plan) -> object:
        asked.append(rank)
        return nano_batch(base, rank, plan)

    nano_batch = plans._nano_batch
    monkeypatch.setattr(plans, "_nano_batch", counted)
    costs = costs_of(uniform_cluster(4000))
    found = priced(eight()[:3], Plan(replicas=4000, bucket=512, adapters=adapters), costs)
    assert len(asked) <= 2 * 4
    if adapters == "rank_local":
        assert found.empty_ranks == 3997
        assert found.idle_share == pytest.approx(1 - 3 / 4000, abs=2e-3)
