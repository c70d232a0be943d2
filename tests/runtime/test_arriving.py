"""One job's way into an engine: what it comes with, what keeps it out, and who is first."""

import threading
from pathlib import Path

import pytest
import torch
from support.arriving import Gate, bringing
from support.models import super_model, tiny_model
from support.runs import job_file, write_rows
from support.waiting import PATIENCE_S, until

from tlora.config import load_spec
from tlora.core.errors import DataError, JobFailed
from tlora.core.job import JobSpec
from tlora.data.prepare import PreparedData
from tlora.model.super_model import SuperModel
from tlora.runtime import arriving
from tlora.runtime.arriving import Arrival, Arrivals
from tlora.runtime.checking import prepare_jobs
from tlora.runtime.directory import RunDirectory
from tlora.runtime.resuming import Resumption
from tlora.training.checkpoint import Checkpoint
from tlora.training.driver import Status
from tlora.training.engine import Engine
from tlora.training.engine_job import JobState


class World:
    def __init__(self, base: Path, root: Path) -> None:
        data = {"path": str(write_rows(root / "rows.jsonl", 4))}
        spec = load_spec(job_file(base, *({"name": name, "data": data} for name in "ab")))
        self.jobs: dict[str, JobSpec] = {job.name: job for job in spec.jobs}
        self.data: dict[str, PreparedData] = prepare_jobs(spec, limit=None)
        self.model = super_model(tiny_model())
        self.directory = RunDirectory(root)

    def arrival(self, job: str) -> Arrival:
        return Arrival(self.jobs[job], self.directory, self.model, self.data[job])


@pytest.fixture
def world(base: Path, tmp_path: Path) -> World:
    return World(base, tmp_path)


def test_a_job_that_begins_comes_with_its_own_start(world: World) -> None:
    """The same as if it had been drawn here, whatever torch draws meanwhile."""
    torch.manual_seed(1)
    arrived = world.arrival("a").result()
    assert arrived.found.checkpoint is None and arrived.found.result is None
    expected = world.model.new_adapter(world.jobs["a"])
    assert arrived.start.keys() == expected.keys()
    for path, pair in expected.items():
        assert torch.equal(arrived.start[path].a, pair.a)
        assert torch.equal(arrived.start[path].b, pair.b)


def test_weights_that_are_no_numbers_are_found_on_the_way(world: World, monkeypatch) -> None:
    """Before anybody waits for the job."""

    def spoilt(job: JobSpec, model: SuperModel):
        weights = model.new_adapter(job)
        next(iter(weights.values())).a[0, 0] = torch.nan
        return weights

    monkeypatch.setattr(arriving, "adapter_start", spoilt)
    with pytest.raises(JobFailed, match="no finite numbers"):
        world.arrival("a").result()


def test_what_goes_wrong_on_the_way_is_raised_to_who_asks(world: World) -> None:
    """Whatever it is; and whether the data were there shows."""

    def broken() -> PreparedData:
        raise DataError("no rows")

    def ended() -> PreparedData:
        raise SystemExit

    for prepare, error in ((broken, DataError), (ended, SystemExit)):
        arrival = Arrival(world.jobs["a"], world.directory, world.model, prepare)
        with pytest.raises(error):
            arrival.result()
        assert arrival.done and arrival.data is None


def test_a_job_that_is_dismissed_brings_nothing(world: World, monkeypatch) -> None:
    gate = Gate(monkeypatch, "a")
    monkeypatch.setattr(arriving, "adapter_start", None)
    arrival = world.arrival("a")
    arrival.dismiss(Status.CANCELLED, "enough")
    gate.let_in()
    assert arrival.result().start == {}


def test_a_job_that_is_dropped_does_no_more_than_it_has(world: World, monkeypatch) -> None:
    """Nor does a process wait for it."""
    gate, arrivals, before = Gate(monkeypatch, "a", "b"), Arrivals(), bringing()
    prepared: list[str] = []
    for job in "ab":

        def prepare(job: str = job) -> PreparedData:
            prepared.append(job)
            return world.data[job]

        arrivals.add(Arrival(world.jobs[job], world.directory, world.model, prepare))
    coming = [thread for thread in bringing() if thread not in before]
    assert len(coming) == 2 and all(thread.daemon for thread in coming)
    dropped, kept = arrivals.of("a"), arrivals.of("b")
    arrivals.drop("a")
    gate.let_in()
    assert dropped.result().start == {} and kept.result().start
    assert prepared == ["b"] and arrivals.names == ["b"]
    arrivals.clear()
    assert kept.is_dropped and not arrivals


def checkpoint_of(world: World, job: str) -> Checkpoint:
    """Of its third step, moments and all."""
    weights = world.model.new_adapter(world.jobs[job])
    names = [f"{path}.{side}" for path in weights for side in ("lora_A", "lora_B")]
    like = [each for pair in weights.values() for each in (pair.a, pair.b.t())]
    exp_avg, exp_avg_sq = (
        {name: torch.rand_like(each) for name, each in zip(names, like, strict=True)}
        for _ in range(2)
    )
    return Checkpoint(JobState(3, weights, exp_avg, exp_avg_sq), {})


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_job_comes_with_rows_of_its_own(world: World, monkeypatch, goes_on: bool) -> None:
    """Which it has when it is attached with what it brings, and nobody else before."""
    if goes_on:
        found = Resumption(checkpoint=checkpoint_of(world, "a"))
        monkeypatch.setattr(arriving, "resumption", lambda *_: found)
    arrived, engine = world.arrival("a").result(), Engine(world.model, budget_tokens=64)
    assert arrived.berth is not None and arrived.berth.entry is not None
    rows = arrived.berth.entry.rows
    checkpoint = arrived.brought.checkpoint
    state = checkpoint.state if checkpoint is not None else None
    assert (state is not None) == goes_on
    engine.check_integrity()
    engine.attach("a", state.weights if state else arrived.start, scale=1.0, state=state)
    assert world.model.rows("a") is rows
    for kind, held in (state.moments if state else {}).items():
        assert all(torch.equal(rows.matrices(kind)[name], held[name]) for name in held)
    del arrived
    engine.check_integrity()


def test_a_job_that_nobody_waits_for_any_more_gives_its_rows_back(world: World) -> None:
    """Whether it was dropped or dismissed, once whoever had it lets go."""
    ledger = world.model.adapter_rows._kept
    for leave in ("drop", "dismiss"):
        arrivals = Arrivals()
        arrivals.add(world.arrival("a"))
        assert arrivals.of("a").result().berth is not None and len(ledger) == 1
        if leave == "drop":
            arrivals.drop("a")
        else:
            arrivals.of("a").dismiss(Status.CANCELLED, "enough")
            (ended,) = arrivals.take_dismissed()
            assert ended.result().berth is not None
            del ended
        until(lambda: not bringing())
        world.model.check_integrity()
        assert not ledger, leave


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_job_that_is_dropped_while_it_is_brought_takes_no_rows(
    world: World, monkeypatch, goes_on: bool
) -> None:
    if goes_on:
        found = Resumption(checkpoint=checkpoint_of(world, "a"))
        monkeypatch.setattr(arriving, "resumption", lambda *_: found)
    name = "bring" if goes_on else "bring_weights"
    bring, arrivals, begun = getattr(arriving, name), Arrivals(), threading.Event()

    def dropped(*about):
        assert begun.wait(PATIENCE_S)
        arrivals.drop("a")
        return bring(*about)

    monkeypatch.setattr(arriving, name, dropped)
    arrival = world.arrival("a")
    arrivals.add(arrival)
    begun.set()
    assert arrival.result().berth is None
    assert not world.model.adapter_rows._kept


def test_a_job_for_which_there_is_no_room_comes_all_the_same(world: World) -> None:
    """Its rows are found when it is attached."""
    world.model = super_model(tiny_model(), reserve_rows=1)
    arrived = world.arrival("a").result()
    assert arrived.berth is None and world.model.adapter_rows.growths == 0
    world.model.attach("a", arrived.start, scale=1.0)
    assert world.model.adapter_rows.growths > 0


def test_of_those_that_are_here_the_first_is_taken_first(world: World, monkeypatch) -> None:
    """One that is still on its way holds up nobody, and is not waited for."""
    gate = Gate(monkeypatch, "a", "b")
    arrivals = Arrivals()
    assert arrivals.take() is None and not arrivals
    for job in "ab":
        arrivals.add(world.arrival(job))
    arrivals.wait(0.01)
    assert not arrivals.one_is_here and arrivals.take() is None
    gate.let_in("b")
    arrivals.wait(PATIENCE_S)
    assert arrivals.one_is_here
    second = arrivals.take()
    assert second is not None and second.name == "b" and arrivals.names == ["a"]
    arrivals.add(second)
    gate.let_in("a")
    arrivals.of("a").result()
    taken = [each.name for each in (arrivals.take(), arrivals.take()) if each is not None]
    assert taken == ["a", "b"] and len(arrivals) == 0
