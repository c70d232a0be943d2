"""Jobs over devices that come to an end while no worker has them: what is kept, told and answered.
Devices that only take notes."""

import errno
import json
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.asking import answers, put
from support.runs import job_file, write_rows
from support.scheduling import request

from tlora.config import dump_spec, load_spec
from tlora.core.cluster import uniform_cluster
from tlora.core.decision import Reasons, Refuse
from tlora.core.errors import AdapterError
from tlora.core.event import Arrival, EarlyExit, JobFailure
from tlora.core.state import State
from tlora.runtime import scheduled
from tlora.runtime.checking import prepare_jobs
from tlora.runtime.directory import RunDirectory
from tlora.runtime.elastic.desk import Desk
from tlora.runtime.executors.devices import MOST_LOSSES, DeviceExecutor
from tlora.runtime.executors.messages import Lost
from tlora.runtime.progress import ProgressLines
from tlora.runtime.scheduled import Lead, _OverDevices


class Silent:
    """One device of which nothing is heard."""

    def __len__(self) -> int:
        return 1

    def send(self, device, command) -> None: ...

    def receive(self, timeout_s) -> list:
        return []

    def restart(self, device) -> None: ...

    def close(self) -> list:
        return []


class Run:
    """Two jobs that wait, in the order in which a run puts its parts together."""

    def __init__(self, base: Path, root: Path) -> None:
        data = {"path": str(write_rows(root / "rows.jsonl", 4))}
        self.spec = load_spec(job_file(base, *({"name": name, "data": data} for name in "ab")))
        self.root = root
        (root / "resolved.yaml").write_text(dump_spec(self.spec))
        (root / "run.json").write_text(json.dumps({"jobs": ["a", "b"]}))
        found = prepare_jobs(self.spec, limit=None)
        self.lead = Lead(self.spec, found, RunDirectory(root), ProgressLines(StringIO()))
        self.desk = Desk(
            root,
            self.spec,
            "ab",
            prepare=lambda jobs: {job.name: found[job.name] for job in jobs},
            say=lambda *lines: None,
        )
        self.lead.on_result = self.desk.ended
        self.executor = DeviceExecutor(
            Silent(),
            clock=self.lead.clock,
            arrivals=[],
            visit=self.visit,
            on_failure=self.lead.failed,
        )
        self.floor = _OverDevices(self.lead, self.executor, {})
        self.state = State(uniform_cluster(1, per_node=1))
        for job in self.spec.jobs:
            self.floor.admit(job, found[job.name])
        self.turn()

    def visit(self) -> None:
        self.desk.serve(self.floor, now=True)
        self.floor.look_after()

    def turn(self) -> list:
        events = list(self.executor.wait(self.lead.clock.now()))
        for event in events:
            self.state.happen(event)
        return events

    def ask(self, *requests: tuple[str, str]) -> list:
        put(self.root, *((kind, job, {}) for kind, job in requests))
        return self.turn()

    def status(self, job: str) -> str:
        return json.loads((self.root / job / "result.json").read_text())["status"]


@pytest.fixture
def run(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(scheduled, "request_of", lambda job, *_, base: request(job.name, steps=10))
    return Run(base, tmp_path)


@pytest.mark.parametrize("error", [AdapterError("another adapter"), OSError(5, "bad disk")])
def test_a_cancelled_job_whose_adapter_cannot_be_written_has_failed(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It is answered, the run goes on, and the job may too."""

    def fails(*_) -> None:
        raise error

    saved = SimpleNamespace(state=SimpleNamespace(weights={}, step=3), progress={})
    monkeypatch.setattr(scheduled, "find_newest", lambda path: SimpleNamespace(checkpoint=saved))
    monkeypatch.setattr(scheduled, "export_matrices", fails)
    (event,) = run.ask(("cancel", "a"))
    assert isinstance(event, EarlyExit)
    assert answers(run.root) == ["error: a is over: failed"]
    assert "could not be written" in str(run.lead.results["a"].reason)
    assert run.turn() == [] and list(run.lead.unfinished) == ["b"]
    (event,) = run.ask(("resume", "a"))
    assert isinstance(event, Arrival) and sorted(run.state.jobs) == ["a", "b"]


def test_a_cancelled_job_whose_result_cannot_be_written_is_answered_so(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk; once there is room it can be asked for again."""

    def full(self, result) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "write_result", full)
        (event,) = run.ask(("cancel", "a"))
    assert isinstance(event, EarlyExit) and run.turn() == []
    why = "its result could not be written: No space left on device"
    assert answers(run.root) == [f"error: a is over, but {why}"]
    run.ask(("resume", "a"))
    run.ask(("cancel", "a"))
    assert answers(run.root)[1:] == ["at work", "cancelled after 0 steps; it has not begun"]
    assert run.status("a") == "cancelled"


def test_a_refused_job_is_over_when_it_is_refused_and_may_come_again(run: Run) -> None:
    """Its result is on disk, and a person who asks is told so."""
    refusal = Refuse(job="a", reasons=Reasons(why="it fits nowhere"))
    run.state.apply(refusal)
    run.executor.apply(refusal)
    assert run.status("a") == "failed" and run.lead.results["a"].reason == "it fits nowhere"
    assert run.ask(("cancel", "a")) == [] and answers(run.root) == ["error: a is over: failed"]
    (event,) = run.ask(("resume", "a"))
    assert isinstance(event, Arrival) and sorted(run.state.jobs) == ["a", "b"]
    assert not (run.root / "a" / "result.json").exists()


def test_jobs_without_a_device_are_over_and_nobody_waits_for_one(run: Run) -> None:
    """Also one that comes after that."""
    for _ in range(MOST_LOSSES):
        run.executor._heard(0, Lost("a cable was pulled"))
    assert [run.status(job) for job in "ab"] == ["failed"] * 2
    run.turn()
    assert not run.state.jobs
    arrived, failed = run.ask(("resume", "b"))
    assert isinstance(arrived, Arrival) and isinstance(failed, JobFailure)
    assert run.status("b") == "failed" and not run.state.jobs and run.executor.idle
