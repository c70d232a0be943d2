"""One worker, and jobs that are still on their way to it: its own train on, and what is said of the
others meanwhile holds."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.arriving import Gate, let_others_arrive, rows_were_waiting, what_is_brought
from support.waiting import PATIENCE_S

from tlora.config import dump_spec
from tlora.runtime import arriving
from tlora.runtime.executors import worker as workers
from tlora.runtime.executors.messages import (
    Attach,
    Attached,
    Detach,
    Detached,
    Ended,
    GiveUp,
    Message,
    NoRoom,
    Stepped,
    Stop,
    Tune,
)
from tlora.runtime.executors.worker import Worker, WorkerSettings

BUCKET = 256


class Told(list[Message]):
    def of(self, kind: type, job: str) -> list:
        return [each for each in self if isinstance(each, kind) and each.job == job]  # type: ignore[attr-defined]


def new_worker(root: Path, *, asks: bool = False) -> tuple[Worker, Told]:
    told = Told()
    return Worker(WorkerSettings(root, "cpu", asks=asks), told.append), told


def work_until(worker: Worker, happened) -> None:
    end = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end, "it never happened"
        worker.work(happened)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """For the job `late`."""
    gate = Gate(monkeypatch, "late")
    yield gate
    gate.let_in()


@pytest.fixture
def busy(new_run, gate: Gate) -> tuple[Worker, Told, Path]:
    """A worker with a job that trains, and one on its way."""
    _, root = new_run("here", "late", max_steps=40)
    worker, told = new_worker(root)
    worker.obey(Attach("here", 1.0, BUCKET))
    work_until(worker, lambda: told.of(Stepped, "here"))
    worker.obey(Attach("late", 1.0, BUCKET))
    return worker, told, root


def steps(told: Told, job: str) -> int:
    return len(told.of(Stepped, job))


def test_neighbours_train_while_a_job_comes(busy, gate: Gate, monkeypatch) -> None:
    """What is said of it parts their pause from its way. Its rows are found meanwhile."""
    worker, told, _ = busy
    waiting = rows_were_waiting(monkeypatch)
    began, enter_job = worker.arrivals.of("late").began, workers.enter_job
    clock = SimpleNamespace(perf_counter=lambda: now[0], time=time.time)
    now = [began]

    def enter_slowly(*about) -> None:
        now[0] += 0.25
        enter_job(*about)

    monkeypatch.setattr(workers, "time", clock)
    monkeypatch.setattr(workers, "enter_job", enter_slowly)
    before = steps(told, "here")
    work_until(worker, lambda: steps(told, "here") >= before + 10)
    assert not told.of(Attached, "late")
    now[0] += 8.0
    gate.let_in()
    work_until(worker, lambda: told.of(Attached, "late"))
    [attached] = told.of(Attached, "late")
    assert waiting == [True]
    assert attached.seconds == pytest.approx(0.25) and attached.arriving_s == pytest.approx(8.0)
    work_until(worker, lambda: told.of(Ended, "late"))
    assert told.of(Ended, "late")[0].result["status"] == "completed"


def test_what_a_job_came_with_is_let_go_before_others_train(busy, gate: Gate, monkeypatch) -> None:
    """As it begins, and as it comes back with its moments."""
    worker, told, _ = busy
    brought, held = what_is_brought(monkeypatch), list[bool]()
    run_jobs = workers.run_jobs

    def run(*about, **more):
        if told.of(Attached, "late"):
            held.append(any(each() is not None for each in brought))
        return run_jobs(*about, **more)

    monkeypatch.setattr(workers, "run_jobs", run)
    gate.let_in()
    for times in (1, 2):
        work_until(worker, lambda times=times: len(told.of(Attached, "late")) == times)
        assert brought and held and not any(held)
        brought.clear()
        held.clear()
        worker.obey(Detach("late"))
        worker.obey(Attach("late", 1.0, BUCKET))


def test_with_nobody_to_train_a_worker_waits_and_hears_commands(
    new_run, gate: Gate, monkeypatch
) -> None:
    """Its turns are short, and not spun through."""
    _, root = new_run("late", max_steps=2)
    worker, told = new_worker(root)
    assert not worker.has_work
    worker.obey(Attach("late", 1.0, BUCKET))
    wait, waits = arriving.Arrivals.wait, []

    def noted(self, timeout_s: float) -> None:
        waits.append(timeout_s)
        wait(self, timeout_s)

    monkeypatch.setattr(arriving.Arrivals, "wait", noted)
    began = time.monotonic()
    for _ in range(10):
        assert worker.has_work
        worker.work(lambda: False)
    assert len(waits) == 10 and all(0.01 <= each <= 0.1 for each in waits)
    # Clocks of waiting may be a little coarse.
    assert time.monotonic() - began > 0.9 * sum(waits)
    gate.let_in()
    work_until(worker, lambda: told.of(Ended, "late"))
    assert not worker.has_work


def test_a_job_that_is_sent_elsewhere_on_its_way_never_comes(busy, gate: Gate) -> None:
    """It is free at once, and may come again."""
    worker, told, root = busy
    worker.obey(Detach("late"))
    assert told[-1] == Detached("late", None, 0.0)
    gate.let_in()
    before = steps(told, "here")
    work_until(worker, lambda: steps(told, "here") >= before + 10)
    assert not told.of(Attached, "late") and "late" not in worker.engine.jobs
    assert not (root / "late" / "result.json").exists()
    worker.obey(Attach("late", 1.0, BUCKET))
    work_until(worker, lambda: told.of(Attached, "late"))


@pytest.mark.parametrize("status", ["cancelled", "stopped_early"])
def test_a_job_that_is_given_up_on_its_way_ends_there(busy, gate: Gate, status: str) -> None:
    """It has not begun; one that had a checkpoint keeps the adapter of that."""
    worker, told, root = busy
    worker.obey(GiveUp("late", "enough", status))
    worker.obey(Detach("late"))
    gate.let_in()
    # So that the neighbour is not through with its steps before.
    let_others_arrive()
    work_until(worker, lambda: told.of(Ended, "late"))
    [ended] = told.of(Ended, "late")
    assert (ended.result["status"], ended.result["reason"]) == (status, "enough")
    assert ended.result["steps"] == 0 and ended.result["adapter"] is None
    assert not told.of(Attached, "late") and not told.of(Detached, "late")
    assert json.loads((root / "late" / "result.json").read_text())["status"] == status
    assert "here" in worker.drivers


def test_a_job_that_is_given_up_on_its_way_back_keeps_what_it_had(busy, gate: Gate) -> None:
    worker, told, root = busy
    gate.let_in()
    work_until(worker, lambda: steps(told, "late") >= 3)
    worker.obey(Detach("late"))
    [gone] = told.of(Detached, "late")
    worker.obey(Attach("late", 1.0, BUCKET))
    worker.obey(GiveUp("late", "enough", "cancelled"))
    work_until(worker, lambda: told.of(Ended, "late"))
    [ended] = told.of(Ended, "late")
    assert (ended.result["status"], ended.result["steps"]) == ("cancelled", gone.step)
    assert (root / "late" / "adapter" / "adapter_model.safetensors").is_file()
    assert len(told.of(Attached, "late")) == 1


def test_a_worker_that_stops_leaves_who_was_on_its_way_to_others(busy, gate: Gate) -> None:
    """Nothing is said of it, and nothing on disk says that it is over."""
    worker, told, root = busy
    began = time.monotonic()
    worker.obey(Stop())
    assert worker.stopped and not worker.has_work
    assert time.monotonic() - began < PATIENCE_S / 2
    assert not (told.of(Attached, "late") or told.of(Ended, "late") or told.of(Detached, "late"))
    assert not (root / "late" / "result.json").exists()
    gate.let_in()
    other, heard = new_worker(root)
    for job in ("here", "late"):
        other.obey(Attach(job, 1.0, BUCKET))
    work_until(other, lambda: heard.of(Ended, "here") and heard.of(Ended, "late"))
    assert {each.result["status"] for each in heard if isinstance(each, Ended)} == {"completed"}
    assert heard.of(Attached, "here")[0].step > 0


def test_what_is_tuned_or_said_again_on_its_way_is_what_it_comes_with(busy, gate: Gate) -> None:
    """A second command to attach it is no second job."""
    worker, told, _ = busy
    worker.obey(Tune(64, {"here": 2.0, "late": 3.0}))
    gate.let_in()
    work_until(worker, lambda: told.of(Attached, "late"))
    assert worker.drivers["late"].spec.train.weight == 3.0
    assert worker.engine.budget_tokens == 64
    worker.obey(Detach("late"))
    worker.obey(Attach("late", 1.0, BUCKET))
    worker.obey(Attach("late", 5.0, 128))
    work_until(worker, lambda: len(told.of(Attached, "late")) == 2)
    assert worker.drivers["late"].spec.train.weight == 5.0
    assert worker.engine.budget_tokens == 128
    work_until(worker, lambda: told.of(Ended, "late"))
    assert len(told.of(Attached, "late")) == 2


def test_a_trial_without_memory_waits_if_others_are_there(new_run, monkeypatch) -> None:
    """Alone it fails."""
    start = arriving.adapter_start

    def full(job, model):
        if job.name == "late":
            raise torch.OutOfMemoryError("no room")
        return start(job, model)

    monkeypatch.setattr(arriving, "adapter_start", full)
    spec, root = new_run("here", "late", max_steps=6)
    jobs = [replace(job, eval=replace(job.eval, split=2, steps=2)) for job in spec.jobs]
    (root / "resolved.yaml").write_text(dump_spec(replace(spec, jobs=tuple(jobs))))
    worker, told = new_worker(root, asks=True)
    worker.obey(Attach("late", 1.0, BUCKET))
    work_until(worker, lambda: told.of(Ended, "late"))
    assert "out of memory" in told.of(Ended, "late")[0].result["reason"]
    worker.obey(Attach("here", 1.0, BUCKET))
    work_until(worker, lambda: told.of(Attached, "here"))
    worker.obey(Attach("late", 1.0, BUCKET))
    work_until(worker, lambda: told.of(NoRoom, "late"))
    assert len(told.of(Ended, "late")) == 1


def test_a_job_that_was_given_up_on_its_way_is_so_at_a_stop(busy, gate: Gate, monkeypatch) -> None:
    worker, told, root = busy
    worker.obey(GiveUp("late", "a person cancelled it", "cancelled"))
    take = arriving.Arrivals.take_dismissed

    def let_in_and_take(self) -> list:
        gate.let_in()
        return take(self)

    monkeypatch.setattr(arriving.Arrivals, "take_dismissed", let_in_and_take)
    monkeypatch.setattr(arriving, "LEAVE_S", PATIENCE_S)
    worker.obey(Stop())
    [ended] = told.of(Ended, "late")
    assert (ended.result["status"], ended.result["steps"]) == ("cancelled", 0)
    assert json.loads((root / "late" / "result.json").read_text())["status"] == "cancelled"
