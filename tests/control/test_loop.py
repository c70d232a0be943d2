"""The loop over simulated time, with the simplest policy."""

import json

from support.scheduling import Run, costs_of, request

from tlora.control.protocols import turn_of_json
from tlora.control.replay import replay
from tlora.core.cluster import uniform_cluster
from tlora.core.event import GpuFailure, GpuRepair, Straggler
from tlora.core.state import State
from tlora.schedule import make_policy

JOBS = [
    request("a", steps=1000),
    request("b", steps=500, batch=4, gpus=2, at=1.0),
    request("c", steps=100, at=2.0, base="qwen"),
]


def test_jobs_run_alone_in_order_and_end_when_the_costs_say() -> None:
    """Two GPUs: a on one, b waits for both, c waits behind b."""
    run = Run("solo", JOBS, gpus=2).to_the_end()
    costs = costs_of(run.cluster)
    start = costs.start_s("llama")
    length = {job.name: job.total_steps * costs.figures(job).solo_step_s for job in JOBS}
    ended = run.ended_at()
    first = start + length["a"]
    assert abs(ended["a"] - first) < 1e-6
    assert abs(ended["b"] - (first + start + length["b"])) < 1e-6
    assert abs(ended["c"] - (ended["b"] + start + length["c"])) < 1e-6
    assert set(run.state.outcomes.values()) == {"completed"}


def test_recorded_turns_survive_json_and_give_the_same_decisions_again() -> None:
    """One scheduler, two worlds; a replay with other progress or another policy is found out."""
    world = [
        GpuFailure(5.0, (0,), "lost"),
        GpuRepair(9.0, (0,)),
        Straggler(20.0, 1, 0.5),
    ]
    run = Run("solo", JOBS, gpus=2, world=world, exits={"b": (100.0, "patience")}).to_the_end()
    turns = [turn_of_json(json.loads(json.dumps(turn.as_json()))) for turn in run.store.turns()]
    assert turns == list(run.store.turns())
    cluster = uniform_cluster(2)
    again = make_policy("solo", costs_of(cluster))
    assert replay(turns, state=State(cluster), policy=again) is None
    wider = uniform_cluster(3)
    assert replay(turns, state=State(wider), policy=make_policy("solo", costs_of(wider)))


def test_a_failed_gpu_sends_its_job_back_with_its_whole_steps() -> None:
    """It goes on elsewhere, and ends later by what was lost."""
    calm = Run("solo", JOBS[:1], gpus=1).to_the_end().ended_at()["a"]
    world = [GpuFailure(30.0, (0,), "lost"), GpuRepair(40.0, (0,))]
    run = Run("solo", JOBS[:1], gpus=1, world=world).to_the_end()
    costs = run.costs
    late = run.ended_at()["a"] - calm
    again = 10.0 + costs.start_s("llama")
    assert again <= late <= again + costs.figures(JOBS[0]).solo_step_s
