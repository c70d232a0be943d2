"""The loop over simulated time, with the simplest policy."""

import gc
import json
import math

from support.scheduling import Run, costs_of, request

from tlora.control.loop import Loop
from tlora.control.protocols import turn_of_json
from tlora.control.replay import Nobody, Nowhere, replay
from tlora.core.clock import ManualClock
from tlora.core.cluster import uniform_cluster
from tlora.core.decision import Decision
from tlora.core.event import Arrival, GpuFailure, GpuRepair, Straggler
from tlora.core.state import State
from tlora.schedule import Policy, make_policy

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


class Watcher(Policy):
    """Remembers how it was asked; wants to be asked again at a time of its own."""

    name = "watcher"

    def __init__(self, look_by: float) -> None:
        self.next_look = look_by
        self.collecting: list[bool] = []

    def decide(self, state: State, events) -> list[Decision]:
        self.collecting.append(gc.isenabled())
        return []

    def look_by(self, state: State) -> float:
        return self.next_look


class Waiter(Nobody):
    """Nothing happens; how long it was to wait is remembered."""

    idle = False

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.waited: list[float] = []

    def wait(self, until: float):
        self.waited.append(until)
        self.clock.move_to(until)
        return ()


def test_a_policy_is_asked_when_it_wants_to_and_at_every_tick_at_least() -> None:
    clock = ManualClock()
    policy, waiter = Watcher(40.0), Waiter(clock)
    loop = Loop(
        state=State(uniform_cluster(1)),
        policy=policy,
        executor=waiter,
        store=Nowhere(),
        clock=clock,
        tick_s=100.0,
    )
    loop.turn(0.0, [Arrival(0.0, JOBS[0])], {})
    loop.step()
    policy.next_look = math.inf
    loop.step()
    assert waiter.waited == [40.0, 140.0]


def test_no_garbage_is_collected_while_a_policy_decides() -> None:
    """And it is afterwards, as before."""
    policy = Watcher(math.inf)
    loop = Loop(
        state=State(uniform_cluster(1)),
        policy=policy,
        executor=Nobody(),
        store=Nowhere(),
        clock=ManualClock(),
    )
    assert gc.isenabled()
    loop.turn(0.0, [Arrival(0.0, JOBS[0])], {})
    assert policy.collecting == [False]
    assert gc.isenabled()


def test_after_a_refusal_whoever_comes_in_does_not_wait_for_a_tick() -> None:
    """With a limit of one, the job behind one that fits nowhere starts at the same time."""
    jobs = [request("huge", rank=4096), request("a")]
    run = Run("solo", jobs, gpus=1, max_runnable=1).to_the_end()
    starts = [turn.time for turn in run.store.turns() for d in turn.decisions if d.kind == "start"]
    assert starts == [0.0]
    assert run.state.outcomes == {"huge": "refused", "a": "completed"}
