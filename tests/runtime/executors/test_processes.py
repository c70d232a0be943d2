"""Worker processes under the control loop: real training, kills and replays."""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support import task_faults
from support.kills import same_end
from support.scheduling import PROFILE

from tlora.config import dump_spec
from tlora.control import Loop, Turn
from tlora.control.replay import replay
from tlora.core.clock import WallClock
from tlora.core.cluster import Cluster, uniform_cluster
from tlora.core.decision import Decision, Move, Reasons, Start
from tlora.core.event import Event, GpuFailure, GpuRepair, Tick
from tlora.core.job import RunSpec
from tlora.core.plan import Plan
from tlora.core.state import State
from tlora.costs.groups import Costs
from tlora.model.loading import load_shape
from tlora.model.targets import find_targets
from tlora.runtime.checking import prepare_jobs
from tlora.runtime.executors import processes as worker_processes
from tlora.runtime.executors.devices import DeviceExecutor, Devices
from tlora.runtime.executors.in_process import InThisProcess
from tlora.runtime.executors.messages import Message, Stepped
from tlora.runtime.executors.processes import WorkerProcesses
from tlora.runtime.executors.worker import WorkerSettings
from tlora.runtime.requests import requests_of
from tlora.runtime.training import train
from tlora.schedule import Policy, Settings, make_policy
from tlora.store.memory import MemoryStore

pytestmark = pytest.mark.multi_process

CLUSTER = uniform_cluster(2)
SETTINGS = Settings(max_replicas=1, min_stay_s=0.2)
EXACT_TOKENS = 64
HANG_S = 10.0
"""Longer than a busy machine makes a worker wait."""


def costs_of(cluster: Cluster, base: str) -> Costs:
    """Small nano-batches, so that groups matter."""
    small = replace(PROFILE, budget_tokens=256, buckets=(64, 128, 256))
    return Costs({base: small}, cluster)


def run_loop(
    spec: RunSpec, devices: Devices, policy: str | Policy, *, watch=lambda device, message: None
) -> tuple[list[Turn], State]:
    data = prepare_jobs(spec, limit=None)
    base = spec.base.model
    requests = requests_of(spec, data, find_targets(load_shape(spec.base)), base=base)
    clock = WallClock()
    store: MemoryStore[Turn] = MemoryStore()
    state = State(CLUSTER)
    executor = DeviceExecutor(devices, clock=clock, arrivals=requests, watch=watch)
    loop = Loop(
        state=state,
        policy=make_policy(policy, costs_of(CLUSTER, base), SETTINGS)
        if isinstance(policy, str)
        else policy,
        executor=executor,
        store=store,
        clock=clock,
        tick_s=0.3,
    )
    try:
        loop.run()
        state.check()
    finally:
        executor.close()
    return list(store.turns()), state


def processes(root: Path, *, exact: bool = False) -> WorkerProcesses:
    tokens = EXACT_TOKENS if exact else None
    settings = WorkerSettings(root, "cpu", limit_tokens=256, exact_tokens=tokens)
    return WorkerProcesses([settings] * 2)


def exact(spec: RunSpec) -> RunSpec:
    """Where a machine's pace decides how nano-batches are cut, hundreds of steps magnify rounding
    beyond any bound worth having: there it is bits that must agree."""
    engine = replace(spec.engine, isolation="exact", nano_batch_tokens=EXACT_TOKENS)
    return replace(spec, engine=engine)


def adapter(root: Path, job: str) -> dict:
    return load_file(root / job / "adapter" / "adapter_model.safetensors")


def assert_same_adapters(spec: RunSpec, root: Path, reference: Path) -> None:
    """As in test_worker.py: sums over other nano-batches differ by rounding. After 8 steps."""
    for job in spec.jobs:
        ours = adapter(root, job.name)
        for key, expected in adapter(reference, job.name).items():
            assert (ours[key] - expected).abs().max() <= 1e-3 * expected.abs().max(), (job, key)


def test_jobs_over_two_processes_train_as_on_one_device_and_replay(new_run, tmp_path) -> None:
    """Adapters agree, every job completed, and the recorded turns give the same decisions again,
    while turns with a changed event do not."""
    spec, root = new_run("a", "b", "c", "d", max_steps=8)
    train(spec, output=tmp_path / "alone")
    turns, state = run_loop(spec, processes(root), "tlora")
    assert set(state.outcomes.values()) == {"completed"}
    assert_same_adapters(spec, root, tmp_path / "alone")
    base = spec.base.model

    def replayed(turns: list[Turn]):
        policy = make_policy("tlora", costs_of(CLUSTER, base), SETTINGS)
        return replay(turns, state=State(CLUSTER), policy=policy)

    assert any(turn.decisions for turn in turns)
    assert replayed(turns) is None
    first = turns[0]
    assert replayed([replace(first, events=first.events[:1]), *turns[1:]]) is not None


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "has not been heard of for")],
)
def test_a_worker_that_is_killed_or_hangs_is_replaced_and_no_job_is_harmed(
    new_run, tmp_path, monkeypatch, number, reason
) -> None:
    """Its jobs wait, go on from their checkpoints, and end with the bits that they would have."""
    if number == signal.SIGSTOP:
        monkeypatch.setattr(worker_processes, "HANG_S", HANG_S)
    spec, root = new_run("a", "b", "c", max_steps=30)
    spec = exact(spec)
    saving = replace(spec, jobs=tuple(replace(j, save=replace(j.save, steps=5)) for j in spec.jobs))
    (root / "resolved.yaml").write_text(dump_spec(saving))
    train(spec, output=tmp_path / "alone")
    devices = processes(root, exact=True)
    killed: list[int] = []

    def kill(device: int, message: Message) -> None:
        if isinstance(message, Stepped) and message.step >= 12 and not killed:
            os.kill(devices.pid(device), number)
            killed.append(device)

    turns, state = run_loop(spec, devices, "solo", watch=kill)
    events = [event for turn in turns for event in turn.events]
    [lost] = [event for event in events if isinstance(event, GpuFailure)]
    [back] = [event for event in events if isinstance(event, GpuRepair)]
    assert lost.gpus == back.gpus == tuple(killed)
    assert reason in lost.reason
    assert set(state.outcomes.values()) == {"completed"}
    assert all(same_end(root, tmp_path / "alone", job.name) for job in spec.jobs)


def test_workers_that_are_stopped_hold_up_no_end(new_run, monkeypatch) -> None:
    """They hear of nothing, so that they are not asked for long; nothing of them is left."""
    _, root = new_run("a")
    devices = processes(root)
    ready: set[int] = set()
    while len(ready) < 2:
        ready |= {device for device, _ in devices.receive(1.0)}
    for device in ready:
        os.kill(devices.pid(device), signal.SIGSTOP)
    monkeypatch.setattr(worker_processes, "HANG_S", 0.5)
    devices.close()
    for device in ready:
        with pytest.raises(ProcessLookupError):
            os.kill(devices.pid(device), 0)


class Restless(Policy):
    """Two groups, and at every tick the first job goes over to the other one."""

    name = "restless"

    def decide(self, state: State, events: Sequence[Event]) -> list[Decision]:
        why, plan = Reasons(why="a test"), Plan(bucket=128)
        if not state.groups:
            names = list(state.jobs)
            return [
                Start(
                    group=f"g{gpu}",
                    base=state.jobs[name].request.base,
                    jobs=(name,),
                    gpus=(gpu,),
                    plan=plan,
                    weights=(1.0,),
                    reasons=why,
                )
                for gpu, name in enumerate(names[:2])
            ]
        first = next(iter(state.jobs.values()))
        others = [name for name in state.groups if name != first.group]
        if first.group is None or not others or not isinstance(events[0], Tick):
            return []
        if len(state.groups[first.group].jobs) == 1:
            # Its group would end; it could not come back.
            return [
                Move(job=first.name, source=first.group, target=others[0], weight=1.0, reasons=why)
            ]
        return []


def test_a_job_moves_between_live_groups_of_two_processes(new_run, tmp_path, monkeypatch) -> None:
    """By detach and attach; it and its neighbours end with the bits that they would have had."""
    # The jobs are not over before the first tick, however late it is.
    monkeypatch.setattr(worker_processes, "serve", task_faults.waits_for_a_word)
    spec, root = new_run("a", "b", max_steps=300)
    spec = exact(spec)
    (root / "resolved.yaml").write_text(dump_spec(spec))
    train(spec, output=tmp_path / "alone")
    turns, state = run_loop(spec, processes(root, exact=True), Restless())
    moves = [each for turn in turns for each in turn.decisions if isinstance(each, Move)]
    assert moves
    assert state.outcomes == {"a": "completed", "b": "completed"}
    assert all(same_end(root, tmp_path / "alone", job.name) for job in spec.jobs)


def test_groups_in_this_process_take_turns(new_run, tmp_path) -> None:
    """The same executor over two engines here."""
    spec, root = new_run("a", "b", "c", max_steps=6)
    train(spec, output=tmp_path / "alone")
    devices = InThisProcess([WorkerSettings(root, "cpu", limit_tokens=256)] * 2)
    turns, state = run_loop(spec, devices, "tlora")
    assert set(state.outcomes.values()) == {"completed"}
    assert_same_adapters(spec, root, tmp_path / "alone")
    starts = [d for turn in turns for d in turn.decisions if isinstance(d, Start)]
    assert {gpu for start in starts for gpu in start.gpus} == {0, 1}
