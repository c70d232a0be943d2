"""One job's way into an engine: what it comes with, what keeps it out, and who is first."""

from pathlib import Path

import pytest
import torch
from support.arriving import Gate, bringing
from support.models import super_model, tiny_model
from support.runs import job_file, write_rows
from support.waiting import PATIENCE_S

from tlora.config import load_spec
from tlora.core.errors import DataError, JobFailed
from tlora.core.job import JobSpec
from tlora.data.prepare import PreparedData
from tlora.model.super_model import SuperModel
from tlora.runtime import arriving
from tlora.runtime.arriving import Arrival, Arrivals
from tlora.runtime.checking import prepare_jobs
from tlora.runtime.directory import RunDirectory
from tlora.training.driver import Status


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
