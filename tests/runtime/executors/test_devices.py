"""The executor over devices: what it tells workers, and what it makes of what they say."""

from collections import deque

import pytest
from support.scheduling import request

from tlora.core.clock import ManualClock
from tlora.core.cluster import uniform_cluster
from tlora.core.decision import Join, Move, Pause, Reasons, Refuse, Resize, Start
from tlora.core.event import Arrival, Completion, EarlyExit, GpuFailure, GpuRepair, JobFailure
from tlora.core.plan import Plan
from tlora.core.state import State
from tlora.runtime.executors.devices import DeviceExecutor
from tlora.runtime.executors.messages import (
    Attach,
    Attached,
    Command,
    Detach,
    Detached,
    Ended,
    Lost,
    Message,
    Ready,
    Stepped,
    Tune,
)

WHY = Reasons(why="a test")
PLAN = Plan(bucket=64)


class Scripted:
    """Devices that say what the test has them say."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sent: list[tuple[int, Command]] = []
        self.coming: deque[tuple[int, Message]] = deque()
        self.restarted: list[int] = []

    def __len__(self) -> int:
        return self.count

    def send(self, device: int, command: Command) -> None:
        self.sent.append((device, command))

    def receive(self, timeout_s: float) -> list[tuple[int, Message]]:
        assert self.coming, "it would wait for ever"
        return [self.coming.popleft()]

    def restart(self, device: int) -> None:
        self.restarted.append(device)

    def close(self) -> list[tuple[int, Message]]:
        return []

    def new(self) -> list[tuple[int, Command]]:
        sent, self.sent = self.sent, []
        return sent


class World:
    def __init__(self, *jobs: str, devices: int = 2, saved: int = 0) -> None:
        self.devices = Scripted(devices)
        self.executor = DeviceExecutor(
            self.devices,
            clock=ManualClock(),
            arrivals=[request(job, steps=10) for job in jobs],
            saved_steps=lambda job: saved,
        )
        assert [event.kind for event in self.executor.wait(1.0)] == ["arrival"] * len(jobs)

    def start(self, group: str, device: int, *jobs: str) -> None:
        weights = (1.0,) * len(jobs)
        self.executor.apply(
            Start(
                group=group,
                base="llama",
                jobs=jobs,
                gpus=(device,),
                plan=PLAN,
                weights=weights,
                reasons=WHY,
            )
        )

    def move(self, job: str, source: str, target: str) -> None:
        self.executor.apply(Move(job=job, source=source, target=target, weight=2.0, reasons=WHY))

    def say(self, device: int, *messages: Message) -> list:
        """What the loop is told of these, up to the first of them that is an event."""
        self.devices.coming.extend((device, message) for message in messages)
        return list(self.executor.wait(1.0))


def ended(job: str, status: str, reason: str | None = None) -> Ended:
    return Ended(job, {"status": status, "reason": reason})


def test_ends_become_events_and_steps_become_progress() -> None:
    """A job that failed, stopped early or completed is no longer in a group."""
    world = World("a", "b", "c")
    world.start("g0", 0, "a", "b", "c")
    assert world.devices.new() == [(0, Attach(job, 1.0, 64)) for job in "abc"]
    assert world.executor.progress() == {"a": 0.0, "b": 0.0, "c": 0.0}
    done = world.say(0, Attached("a", 0, 0.1), _step("a", 4), ended("b", "completed"))
    assert done == [Completion(0.0, "b")]
    assert world.executor.progress() == {"a": 4.0, "c": 0.0}
    assert world.say(0, ended("a", "stopped_early", "why")) == [EarlyExit(0.0, "a", "why")]
    assert not world.executor.idle
    assert world.say(0, ended("c", "paused", "disk")) == [JobFailure(0.0, "c", "disk")]
    assert world.executor.idle


def test_a_move_waits_for_the_job_to_leave() -> None:
    """And comes with the weight and the nano-batches of its new group."""
    world = World("a", "b")
    world.start("g0", 0, "a")
    world.start("g1", 1, "b")
    world.devices.new()
    world.move("a", "g0", "g1")
    assert world.devices.new() == [(0, Detach("a"))]
    world.say(0, Detached("a", 3, 0.1), ended("b", "completed"))
    assert world.devices.new() == [(1, Attach("a", 2.0, 64))]
    assert world.executor.progress() == {"a": 3.0}


def test_decisions_that_overtake_a_move_hold() -> None:
    """Wanted back, wanted elsewhere, or not wanted: the last word counts, once the job has left."""
    for last, expected in (("back", [(0, 0)]), ("pause", []), ("third", [(2, 2)])):
        world = World("a", "b", "c", devices=3)
        for device, job in enumerate("abc"):
            world.start(f"g{device}", device, job)
        world.devices.new()
        world.move("a", "g0", "g1")
        if last == "back":
            world.start("g3", 0, "a")
        elif last == "pause":
            world.executor.apply(Pause(job="a", group="g1", reasons=WHY))
        else:
            world.move("a", "g1", "g2")
        assert world.devices.new() == [(0, Detach("a"))]
        world.say(0, Detached("a", 3, 0.1), ended("b", "completed"))
        assert [(device, device) for device, _ in world.devices.new()] == expected


def test_a_job_that_ends_before_it_leaves_is_not_sent_on() -> None:
    """Its worker finds nobody to detach."""
    world = World("a", "b")
    world.start("g0", 0, "a")
    world.start("g1", 1, "b")
    world.move("a", "g0", "g1")
    world.devices.new()
    assert world.say(0, ended("a", "completed")) == [Completion(0.0, "a")]
    world.say(0, Detached("a", None, 0.0), ended("b", "completed"))
    assert world.devices.new() == []


def test_a_lost_device_gives_its_jobs_back_and_is_started_again() -> None:
    """At the steps of their checkpoints; a job on its way to another device still gets there."""
    world = World("a", "b", "c", saved=2)
    world.start("g0", 0, "a", "b")
    world.start("g1", 1, "c")
    world.say(0, _step("a", 5), _step("b", 5), ended("c", "completed"))
    world.start("g2", 1, "b")
    world.devices.new()
    [lost] = world.say(0, Lost("ended by SIGKILL"))
    assert lost == GpuFailure(0.0, (0,), "ended by SIGKILL")
    assert world.executor.progress() == {"b": 2.0, "a": 2.0}
    assert world.devices.restarted == [0]
    assert world.devices.new() == [(1, Attach("b", 1.0, 64))]
    assert not world.executor.idle
    assert world.say(0, Ready(0.1)) == [GpuRepair(0.0, (0,))]


def test_a_job_that_loses_its_devices_all_alone_fails() -> None:
    """Twice; one of several is not to blame yet."""
    world = World("a", "b", "c")
    world.start("g0", 0, "a")
    world.start("g1", 1, "b", "c")
    world.say(0, Lost("x"))
    world.say(1, Lost("x"))
    world.say(0, Ready(0.1))
    world.say(1, Ready(0.1))
    world.start("g2", 0, "a")
    world.start("g3", 1, "b", "c")
    assert [event.kind for event in world.say(0, Lost("x"))] == ["gpu_failure", "job_failure"]
    assert [event.kind for event in world.say(1, Lost("x"))] == ["gpu_failure"]


def test_nothing_is_held_against_a_job_that_a_person_has_go_on() -> None:
    """It lost two devices and failed; another one lost does not fail it at once."""
    world = World("a", devices=1)
    failed: list[bool] = []
    for _ in range(2):
        world.start("g", 0, "a")
        failed.append(isinstance(world.say(0, Lost("killed"))[-1], JobFailure))
        world.say(0, Ready(1.0))
    assert failed == [False, True]
    world.executor.add(request("a", steps=10))
    assert [event.kind for event in world.executor.wait(1.0)] == ["arrival"]
    world.start("g", 0, "a")
    assert [event.kind for event in world.say(0, Lost("killed"))] == ["gpu_failure"]


def test_when_no_device_comes_back_the_jobs_fail() -> None:
    """Rather than wait for ever."""
    world = World("a", "b", devices=1)
    kinds: list[str] = []
    for _ in range(10):
        kinds += [event.kind for event in world.say(0, Lost("no such device"))]
        if "job_failure" in kinds:
            break
        world.devices.coming.append((0, Ready(0.1)))
        world.executor.wait(1.0)
    assert kinds.count("job_failure") == 2
    assert world.executor.idle


def test_resizing_and_joining_reach_the_worker() -> None:
    """A group that goes to another device takes its jobs along."""
    world = World("a", "b", "c")
    world.start("g0", 0, "a", "b")
    world.devices.new()
    world.executor.apply(Join(job="c", group="g0", weight=3.0, reasons=WHY))
    assert world.devices.new() == [(0, Attach("c", 3.0, 64))]
    wider = Resize(
        group="g0", gpus=(0,), plan=Plan(bucket=32), weights=(1.0, 2.0, 4.0), reasons=WHY
    )
    world.executor.apply(wider)
    assert world.devices.new() == [(0, Tune(32, {"a": 1.0, "b": 2.0, "c": 4.0}))]
    moved = Resize(
        group="g0", gpus=(1,), plan=Plan(bucket=32), weights=(1.0, 1.0, 1.0), reasons=WHY
    )
    world.executor.apply(moved)
    commands = world.devices.new()
    assert [(device, command.kind) for device, command in commands] == [
        *[(0, "detach")] * 3,
        (1, "tune"),
    ]


def test_a_plan_over_several_devices_fails_its_jobs() -> None:
    """Until such plans are run; nothing is raised."""
    world = World("a")
    plan = Plan(bucket=64, replicas=2)
    start = Start(
        group="g0",
        base="llama",
        jobs=("a",),
        gpus=(0, 1),
        plan=plan,
        weights=(1.0,),
        reasons=WHY,
    )
    world.executor.apply(start)
    [failed] = world.executor.wait(1.0)
    assert isinstance(failed, JobFailure)
    assert world.executor.idle


def test_refused_jobs_are_forgotten_and_late_ones_arrive_in_time() -> None:
    """The clock decides, not the order of the file."""
    clock = ManualClock()
    devices = Scripted(1)
    late, early = request("late", at=5.0), request("early", at=1.0)
    executor = DeviceExecutor(devices, clock=clock, arrivals=[late, early])
    assert executor.wait(0.0) == []
    clock.move_to(1.5)
    assert executor.wait(9.0) == [Arrival(1.5, early)]
    executor.apply(Refuse(job="early", reasons=WHY))
    clock.move_to(6.0)
    assert executor.wait(9.0) == [Arrival(6.0, late)]
    executor.apply(Refuse(job="late", reasons=WHY))
    assert executor.idle


def _step(job: str, step: int) -> Stepped:
    return Stepped(job, step, 1.0, 1.0, 1e-3, 4, 8, 2, 1)


def test_a_job_that_says_twice_that_it_has_left_is_attached_once() -> None:
    """Told to leave, then given up, then wanted again, there or elsewhere: its second word on
    leaving is about the stay before."""
    for device in (0, 1):
        world = World("a")
        world.start("g0", 0, "a")
        world.executor.apply(Pause(job="a", group="g0", reasons=WHY))
        assert world.executor.give_up("a", "by hand")
        world.executor._heard(0, Detached("a", 2, 0.1))
        world.devices.new()
        world.start("g1", device, "a")
        world.executor._heard(0, Detached("a", None, 0.0))
        assert world.devices.new() == [(device, Attach("a", 1.0, 64))]
        assert world.executor.device_of("a") == device


def test_a_job_that_is_nowhere_can_be_withdrawn_and_come_again() -> None:
    """While it waits, or before it has arrived; its exit is told once."""
    world = World("a")
    world.executor.withdraw("a", "by hand")
    (event,) = world.executor.wait(1.0)
    assert isinstance(event, EarlyExit) and event.job == "a"
    assert world.executor.idle and world.devices.new() == []
    later = request("b", steps=10)
    world.executor.add(later)
    world.executor.withdraw("b", "by hand")
    assert world.executor.idle
    world.executor.add(request("a", steps=10))
    (event,) = world.executor.wait(1.0)
    assert isinstance(event, Arrival) and event.request.name == "a"
    state = State(uniform_cluster(1, per_node=1))
    for each in (Arrival(0.0, event.request), EarlyExit(0.0, "a", "by hand"), event):
        state.happen(each)
    assert list(state.jobs) == ["a"] and not state.outcomes
    state.happen(Completion(0.0, "a"))
    with pytest.raises(AssertionError, match="arrived twice"):
        state.happen(event)


def test_a_job_is_leaving_until_its_device_is_lost() -> None:
    """Then whoever wanted it gone has to ask again."""
    world = World("a", "b")
    world.start("g0", 0, "a", "b")
    assert world.executor.give_up("a", "by hand", "cancelled")
    assert world.executor.is_leaving("a") and not world.executor.is_leaving("b")
    world.executor._heard(0, Lost("a cable was pulled"))
    assert not world.executor.is_leaving("a")


def test_a_job_that_was_given_up_is_in_its_group_until_it_has_ended() -> None:
    """As the state has it: its group can be resized and joined meanwhile, beside other groups."""
    world = World("a", "b", "c")
    world.start("g0", 0, "a")
    assert world.executor.give_up("a", "by hand", "cancelled")
    world.start("g1", 1, "b")
    world.executor.apply(Join(job="c", group="g0", weight=1.0, reasons=WHY))
    resize = Resize(group="g0", gpus=(0,), plan=PLAN, weights=(1.0, 2.0), reasons=WHY)
    world.executor.apply(resize)
    assert world.devices.new()[-1] == (0, Tune(64, {"a": 1.0, "c": 2.0}))
    assert world.executor.device_of("a") is None
    assert world.say(0, ended("a", "cancelled", "by hand")) == [EarlyExit(0.0, "a", "by hand")]
    with pytest.raises(ValueError):
        world.executor.apply(resize)


def test_a_job_that_was_given_up_on_its_way_is_not_sent_on() -> None:
    """Neither when it has left nor when it is lost there: whoever gave it up asks again."""
    for message in (Detached("a", 2, 0.1), Lost("a cable was pulled")):
        world = World("a", "b")
        world.start("g0", 0, "a")
        world.start("g1", 1, "b")
        world.move("a", "g0", "g1")
        assert world.executor.give_up("a", "by hand", "cancelled")
        world.devices.new()
        world.executor._heard(0, message)
        assert world.devices.new() == []
        assert not world.executor.is_somewhere("a") and world.executor.device_of("a") is None
        assert not world.executor.give_up("a", "by hand", "cancelled")
        world.executor.withdraw("a", "by hand")
        assert world.executor.wait(1.0)[-1] == EarlyExit(0.0, "a", "by hand")
