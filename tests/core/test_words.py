"""The shared words of scheduling: they check themselves, print and survive JSON."""

import json

import pytest

from tlora.core.cluster import Tier, uniform_cluster
from tlora.core.decision import Join, Reasons, Start, decision_of_json
from tlora.core.errors import SpecError
from tlora.core.event import Arrival, GpuFailure, event_of_json
from tlora.core.load import JobLoad
from tlora.core.plan import Plan
from tlora.core.records import as_json
from tlora.core.request import JobRequest
from tlora.core.state import State

JOB = JobRequest(
    name="a",
    base="llama",
    load=JobLoad(rank=4, batch_size=2, lengths=(100, 301)),
    total_steps=7,
    arrival_s=0.1,
)
START = Start(
    group="g0",
    base="llama",
    jobs=("a",),
    gpus=(3, 1),
    plan=Plan(replicas=2, bucket=2048),
    weights=(0.1 + 0.2,),
    reasons=Reasons(why="two GPUs are free", before=0.0, after=1.5, bound_by="memory"),
)


def test_a_cluster_knows_how_far_apart_gpus_are() -> None:
    """Ten GPUs, two to a node, two nodes to a rack."""
    cluster = uniform_cluster(10, per_node=2, nodes_per_rack=2)
    assert (len(cluster.nodes), len(cluster.racks)) == (5, 3)
    assert cluster.tier([4]) is Tier.GPU
    assert cluster.tier([4, 5]) is Tier.NODE
    assert cluster.tier([4, 6]) is Tier.RACK
    assert cluster.tier([3, 4]) is Tier.CLUSTER
    with pytest.raises(SpecError, match="at least 1"):
        uniform_cluster(0)


def test_a_plan_refuses_what_cannot_be() -> None:
    """And says which field."""
    assert Plan(replicas=2, fsdp=4, bucket=1).gpus == 8
    assert not Plan(tp=2, bucket=1).is_replicated_only
    with pytest.raises(SpecError, match=r"plan\.replicas"):
        Plan(replicas=0, bucket=1)
    with pytest.raises(SpecError, match=r"plan\.adapters"):
        Plan(bucket=1, adapters="replicated")
    with pytest.raises(SpecError, match=r"plan\.spread"):
        Plan(bucket=1, replicas=2, adapters="rank_local", spread=("big",))
    assert Plan(bucket=1, replicas=2, adapters="mixed", spread=("big",)).gpus == 2


def test_events_and_decisions_survive_json() -> None:
    """Floats to the last bit; an unknown field or kind is refused."""
    for event in (Arrival(0.1 + 0.2, JOB), GpuFailure(1.0, (2, 3), "lost")):
        assert event_of_json(json.loads(json.dumps(as_json(event)))) == event
    data = json.loads(json.dumps(as_json(START)))
    assert decision_of_json(data) == START
    for wrong in (data | {"extra": 1}, data | {"kind": "stop"}):
        with pytest.raises(SpecError):
            decision_of_json(wrong)
    del data["gpus"]
    with pytest.raises(SpecError, match="gpus"):
        decision_of_json(data)


def test_a_decision_is_a_sentence() -> None:
    """With what was expected of it and what bound it."""
    assert str(START) == (
        "start g0 with a on GPUs 3, 1 (2 replicas, nano-batches of 2048 tokens): two GPUs are "
        "free; 0.00 -> 1.50 GPUs' worth of work; bound by memory"
    )


def test_the_state_refuses_to_book_twice() -> None:
    """A GPU, a job; and frees what a failure takes away."""
    state = State(uniform_cluster(4))
    state.happen(Arrival(0.0, JOB))
    state.apply(START)
    state.check()
    assert state.free == {0, 2}
    with pytest.raises(AssertionError, match="already"):
        state.apply(Join(job="a", group="g0", weight=1.0, reasons=Reasons(why="again")))
    state.happen(GpuFailure(1.0, (1,), "lost"))
    state.check()
    assert state.free == {0, 2, 3}
    with pytest.raises(AssertionError, match="not free"):
        state.apply(START)
