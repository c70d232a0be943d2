"""Jobs come, go and are saved on a CUDA device: the copies are right to the bit while training goes
on, and the neighbours' pause is short.

    pytest tests/gpu/test_snapshot.py -m gpu -s

prints the pauses.
"""

import statistics
import threading
import time

import numpy as np
import pytest
import torch
from support.eight_b import VOCABULARY, super_model

from tlora.core.job import DataSpec, JobSpec, LoraSpec, TrainSpec
from tlora.core.sequence import TokenSequence
from tlora.model import cuda_link
from tlora.model.launches import Launches
from tlora.model.snapshot import InBackground
from tlora.model.super_model import SuperModel
from tlora.training import moving
from tlora.training.driver import JobDriver
from tlora.training.engine import Engine
from tlora.training.engine_job import JobState
from tlora.training.outcome import Outcome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

RANK = 64
PAUSE_SECONDS = 0.05


def driver(name: str, *, rank: int = RANK, steps: int = 1_000) -> JobDriver:
    generator = np.random.default_rng(len(name) + rank)
    rows = [generator.integers(1, VOCABULARY, size) for size in generator.integers(20, 200, 64)]
    spec = JobSpec(
        name=name,
        data=DataSpec(path="none"),
        lora=LoraSpec(r=rank),
        train=TrainSpec(batch_size=4, max_steps=steps, learning_rate=1e-3, seed=rank),
    )
    return JobDriver(spec, [TokenSequence(each, each) for each in rows])


class Group:
    def __init__(self, *names: str, layers: int = 2, compiled: bool = False) -> None:
        self.model = super_model(layers, compiled=compiled, reserve_rows=4 * RANK)
        self.engine = Engine(self.model, budget_tokens=1024, bucket_step=1024)
        self.drivers = {name: driver(name) for name in names}
        for each in self.drivers.values():
            each.attach(self.engine, self.model.new_adapter(each.spec))

    def run(self, nano_batches: int) -> None:
        for _ in range(nano_batches):
            for each in self.drivers.values():
                each.advance(self.engine)
            self._heard(self.engine.run_nano_batch())

    def drain(self) -> None:
        for outcome in self.engine.drain():
            self._heard(outcome)

    def _heard(self, outcome: Outcome) -> None:
        assert not outcome.error and not outcome.failures
        for done in outcome.steps:
            if done.job in self.drivers:
                self.drivers[done.job].on_step(done)


def rows_of(model: SuperModel, job: str) -> dict[str, torch.Tensor]:
    """What the job's rows hold now, read the plain way."""
    torch.cuda.synchronize()
    return {
        f"{kind} {name}": getattr(rows, kind).to("cpu", copy=True)
        for name, rows in model.views(job).items()
        for kind in ("value", "exp_avg", "exp_avg_sq")
    }


def tensors_of(state: JobState) -> dict[str, torch.Tensor]:
    found = {}
    for path, pair in state.weights.items():
        found[f"value {path}.lora_A"], found[f"value {path}.lora_B"] = pair.a, pair.b.T
    for kind, moments in (("exp_avg", state.exp_avg), ("exp_avg_sq", state.exp_avg_sq)):
        found |= {f"{kind} {name}": tensor for name, tensor in moments.items()}
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )


@pytest.mark.parametrize("leaves", [False, True])
def test_a_snapshot_is_the_state_of_then(leaves: bool) -> None:
    """Bit for bit, while the job trains on, or while another one trains in its rows."""
    group = Group("a", "b")
    group.run(4)
    expected = rows_of(group.model, "a")
    snapshot = group.engine.snapshot("a")
    if leaves:
        group.engine.detach("a")
        del group.drivers["a"]
        newcomer = group.drivers["c"] = driver("c", rank=RANK)
        newcomer.attach(group.engine, group.model.new_adapter(newcomer.spec))
    group.run(6)
    assert same(tensors_of(snapshot.result()), expected)
    if not leaves:
        assert not same(rows_of(group.model, "a"), expected), "it has gone on"
    group.engine.check_integrity()


def test_without_room_on_the_device_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only waited for."""
    group = Group("a", "b")
    group.run(3)
    monkeypatch.setattr(cuda_link.CudaLink, "has_room", lambda self, num_bytes: False)
    expected = rows_of(group.model, "a")
    snapshot = group.engine.snapshot("a")
    assert snapshot.done
    group.run(2)
    assert same(tensors_of(snapshot.result()), expected)


@pytest.mark.parametrize("staging_bytes", [1 << 20, (1 << 20) + 12])
def test_small_staging_buffers_lose_nothing(staging_bytes: int) -> None:
    """Pieces that end in the middle of a matrix, both ways."""
    group = Group("a", "b")
    group.run(3)
    # A job that moves must have heard of its last step.
    group.drain()
    link = cuda_link.CudaLink(group.model.device, staging_bytes)
    group.model.adapter_rows.courier = InBackground(link, slab_bytes=10 << 20)
    expected = rows_of(group.model, "a")
    state = group.engine.state("a")
    assert same(tensors_of(state), expected)
    group.engine.detach("a")
    brought = moving.bring(group.model, "a", state).result()
    assert all(tensor.is_cuda for tensor in tensors_of(brought).values())
    group.drivers["a"].attach(group.engine, brought.weights, state=brought)
    assert same(rows_of(group.model, "a"), expected)
    group.engine.detach("a")
    group.drivers["a"].attach(group.engine, state.weights, state=state)
    assert same(rows_of(group.model, "a"), expected)
    assert same(tensors_of(group.engine.state("a")), expected)


def test_graphs_are_captured_while_a_snapshot_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait for their events break no capture, and the copies are right."""
    monkeypatch.setattr(Launches, "bound", property(lambda self: self.runs >= 2))
    group = Group("a", "b", compiled=True)
    group.run(2)
    taken = []
    for _ in range(6):
        taken.append((rows_of(group.model, "a"), group.engine.snapshot("a")))
        group.run(1)
    assert group.model.captures >= 1
    for expected, snapshot in taken:
        assert same(tensors_of(snapshot.result()), expected)


def test_graphs_are_captured_while_jobs_are_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that allocate and find rows break no capture, and what they bring is right."""
    monkeypatch.setattr(Launches, "bound", property(lambda self: self.runs >= 2))
    group = Group("a", "b", compiled=True)
    group.run(2)
    late = driver("late")
    weights = group.model.new_adapter(late.spec)
    over, errors = threading.Event(), list[BaseException]()

    def bring() -> None:
        try:
            torch.cuda.set_device(group.model.device)
            while not over.is_set():
                there = moving.bring_weights(group.model, "late", weights).result()
                assert group.model.keep_rows("late", there) is not None
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=bring, daemon=True)
    thread.start()
    for released in (True, True, False):
        group.run(4)
        if released:
            assert group.model.release_graphs()
    over.set()
    thread.join()
    assert not errors and group.model.captures >= 3
    there = moving.bring_weights(group.model, "late", weights).result()
    late.attach(group.engine, there)
    found = rows_of(group.model, "late")
    for path, pair in weights.items():
        assert torch.equal(found[f"value {path}.lora_A"], pair.a)
        assert torch.equal(found[f"value {path}.lora_B"], pair.b.T)
    group.engine.check_integrity()


def blocked(group: Group, action) -> float:
    """Seconds for which neither host nor device can go on with the next nano-batch."""
    torch.cuda.current_stream().synchronize()
    started = time.perf_counter()
    action()
    torch.cuda.current_stream().synchronize()
    return time.perf_counter() - started


@pytest.mark.parametrize("layers", [2, 32])
def test_neighbours_pause_shortly(layers: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Attaching what was brought, and detaching with a snapshot of all weights and moments; at full
    depth too."""
    group = Group("a", "b", layers=layers)
    one_more = driver("one-more")
    weights = group.model.new_adapter(one_more.spec)
    pauses: dict[str, list[float]] = {
        name: [] for name in ("attach from host", "attach", "snapshot", "detach", "arrival")
    }

    def measured(name: str, action) -> None:
        pauses[name].append(blocked(group, action))

    for _ in range(6):
        group.run(1)
        measured("attach from host", lambda: one_more.attach(group.engine, weights))
        group.engine.detach(one_more.name)
        brought = moving.bring_weights(group.model, one_more.name, weights)
        group.run(1)
        there = brought.result()
        measured("attach", lambda there=there: one_more.attach(group.engine, there))
        taken = []
        measured("snapshot", lambda taken=taken: taken.append(group.engine.snapshot(one_more.name)))
        measured("detach", lambda: group.engine.detach(one_more.name))
        started = time.perf_counter()
        state = taken[0].result()
        pauses["arrival"].append(time.perf_counter() - started)
    num_bytes = sum(4 * tensor.numel() for tensor in tensors_of(state).values())
    # The first ones lock staging buffers and fill the allocator.
    medians = {name: statistics.median(seconds[2:]) for name, seconds in pauses.items()}
    with capsys.disabled():
        figures = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in medians.items())
        print(f"\n{layers} layers, rank {RANK}, state of {num_bytes / 1e6:,.0f} MB: {figures}")
    assert medians["attach"] < PAUSE_SECONDS
    assert medians["snapshot"] + medians["detach"] < PAUSE_SECONDS
    if layers == 2:
        assert medians["attach from host"] < PAUSE_SECONDS
