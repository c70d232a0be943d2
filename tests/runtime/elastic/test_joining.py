"""A job on its way into a run of one process holds nobody up, and can still be called back."""

import json
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.arriving import Gate, bringing, let_others_arrive, wait_held, what_is_brought
from support.asking import Asking, answers, put, submission
from support.kills import adapter_bytes, same_end
from support.runs import job_file, write_rows
from support.waiting import PATIENCE_S, until

import tlora
from tlora.core.job import JobSpec, RunSpec
from tlora.runtime import arriving, training
from tlora.runtime.elastic import checking

STEPS = 24
HALF = STEPS // 2
Steps = dict[tuple[str, int], Callable[[], object]]
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def spec(base: Path, rows: Path) -> RunSpec:
    """To the bit the same in any company."""
    data = {"path": str(rows)}
    jobs = [
        {"name": "here", "data": data, "train": {"max_steps": STEPS}},
        {"name": "late", "data": data, "train": {"seed": 3, "max_steps": 6}},
        {"name": "slow", "data": data, "train": {"seed": 5, "max_steps": 4}},
    ]
    engine = {"device": "cpu", "isolation": "exact", "nano_batch_tokens": 128}
    return tlora.load_spec(job_file(base, *jobs, engine=engine), ["save.steps=2"])


@pytest.fixture(scope="module")
def together(spec: RunSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("together") / "run"
    assert not tlora.train(spec, output=output).failed
    return output


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch, "late", "slow")
    yield gate
    gate.let_in()


def only(spec: RunSpec, *names: str) -> RunSpec:
    return replace(spec, jobs=tuple(job for job in spec.jobs if job.name in names))


def submit(spec: RunSpec, *names: str) -> tuple[str, str, dict]:
    return ("submit", "", submission(only(spec, *names)))


class Looking(Asking):
    """Also does something at a step, and knows how far others were when a job joined. In its second
    half `here` is in no hurry: after each step whoever is on its way comes as far as it can, and no
    thread has to be fast for it to be in time."""

    def __init__(self, root: Path, asked: dict, then: Steps | None = None) -> None:
        super().__init__(root, asked)
        self.then = then or {}
        self.steps: dict[str, int] = {}
        self.joined: list[tuple[str, dict[str, int]]] = []

    def join(self, driver) -> None:
        super().join(driver)
        self.joined.append((driver.name, dict(self.steps)))

    def on_step(self, driver, done) -> None:
        self.steps[done.job] = done.step
        super().on_step(driver, done)
        self.then.pop((done.job, done.step), lambda: None)()
        if done.job == "here" and done.step >= HALF:
            let_others_arrive()

    @property
    def said(self) -> str:
        return self.out.getvalue()  # type: ignore[attr-defined]


def events(root: Path, kind: str) -> list[dict]:
    lines = (root / "events.jsonl").read_text().splitlines()
    return [each for each in map(json.loads, lines) if each["kind"] == kind]


def test_neighbours_train_while_a_job_comes(
    spec: RunSpec, together: Path, tmp_path: Path, gate: Gate
) -> None:
    """It is let through in the middle of a neighbour's training, and attached after that; how long
    the neighbour stood still for it is on record."""
    output = tmp_path / "run"
    view = Looking(
        output, {("here", 2): [submit(spec, "late")]}, {("here", HALF): lambda: gate.let_in("late")}
    )
    result = tlora.train(only(spec, "here"), output=output, progress=view)
    assert {job.status for job in result.jobs.values()} == {"completed"}
    [(name, steps)] = view.joined
    assert name == "late" and HALF <= steps["here"] < STEPS
    assert same_end(output, together, "here") and same_end(output, together, "late")
    [joined] = events(output, "joined")
    assert 0 < joined["paused_ms"] < 1e3 * PATIENCE_S / 2


def test_what_a_job_came_with_is_let_go_before_anybody_trains(
    spec: RunSpec, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the job's rows by then; of one that was cancelled nobody wants it. As it begins, and
    as it comes back with its moments."""
    output = tmp_path / "run"
    gate.let_in("late", "slow")
    brought, held = what_is_brought(monkeypatch), list[bool]()

    def look() -> None:
        assert brought
        # A thread may be kept waiting for a core between its last word and its end.
        until(lambda: not bringing())
        held.append(any(each() is not None for each in brought))

    asked = {
        ("here", 2): [submit(spec, "late")],
        ("late", 3): [("cancel", "late", {})],
        ("here", HALF): [("resume", "late", {})],
        # Asked here and read after the look: how far it comes before its end is its own matter.
        ("late", 5): [submit(spec, "slow"), ("cancel", "slow", {})],
    }
    then: Steps = dict.fromkeys((("late", 2), ("late", 5), ("here", STEPS - 1)), look)
    view = Looking(output, asked, then)
    tlora.train(only(spec, "here"), output=output, progress=view)
    assert [name for name, _ in view.joined] == ["late", "late"]
    assert held == [False] * 3


def test_so_is_what_those_came_with_who_were_there_from_the_start(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, held, draw = list[weakref.ref](), list[bool](), training.adapter_start

    def start(job, model):
        made = draw(job, model)
        drawn.extend(weakref.ref(each) for pair in made.values() for each in (pair.a, pair.b))
        return made

    monkeypatch.setattr(training, "adapter_start", start)
    output = tmp_path / "run"
    look: Steps = {("here", 1): lambda: held.append(any(each() is not None for each in drawn))}
    tlora.train(only(spec, "here"), output=output, progress=Looking(output, {}, look))
    assert drawn and held == [False]


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The data of newcomers are not, before it is set."""
    ready, prepare = threading.Event(), checking.prepare_jobs

    def held(*about, **more):
        wait_held(ready)
        return prepare(*about, **more)

    monkeypatch.setattr(checking, "prepare_jobs", held)
    yield ready
    ready.set()


@pytest.mark.parametrize("alone", [False, True])
def test_neighbours_train_while_data_are_prepared(
    spec: RunSpec, together: Path, tmp_path: Path, ready: threading.Event, alone: bool
) -> None:
    """And with nobody left to train the run waits for them."""
    output = tmp_path / "run"

    class Last(Looking):
        def on_end(self, result) -> None:
            super().on_end(result)
            if alone:
                ready.set()

    then = {} if alone else {("here", HALF): ready.set}
    view = Last(output, {("here", 2): [submit(spec, "late")]}, then)
    tlora.train(only(spec, "here"), output=output, progress=view)
    [(_, steps)] = view.joined
    assert steps["here"] == STEPS if alone else HALF <= steps["here"] < STEPS
    assert answers(output) == ["at work: late"]
    assert same_end(output, together, "here") and same_end(output, together, "late")


def test_who_is_ready_does_not_wait_for_who_is_slow(
    spec: RunSpec, together: Path, tmp_path: Path, gate: Gate
) -> None:
    output = tmp_path / "run"
    gate.let_in("late")
    view = Looking(
        output,
        {("here", 2): [submit(spec, "slow"), submit(spec, "late")]},
        {("late", 3): lambda: gate.let_in("slow")},
    )
    tlora.train(only(spec, "here"), output=output, progress=view)
    assert [name for name, _ in view.joined] == ["late", "slow"]
    assert view.joined[1][1]["late"] >= 3
    for job in ("here", "late", "slow"):
        assert same_end(output, together, job)


def test_a_run_does_not_end_while_a_job_comes(
    spec: RunSpec, together: Path, tmp_path: Path, gate: Gate
) -> None:
    """Nobody else is left; that the last one has ended is told meanwhile."""
    output = tmp_path / "run"

    class Last(Looking):
        def on_end(self, result) -> None:
            super().on_end(result)
            if result.job == "here":
                gate.let_in("late")

    view = Last(output, {("here", 2): [submit(spec, "late")]})
    began = time.monotonic()
    result = tlora.train(only(spec, "here"), output=output, progress=view)
    assert time.monotonic() - began < PATIENCE_S / 2
    assert view.joined == [("late", {"here": STEPS})]
    assert result.jobs["late"].status == "completed" and not result.interrupted
    assert same_end(output, together, "late")


def test_a_job_that_is_cancelled_on_its_way_never_comes(
    spec: RunSpec, together: Path, tmp_path: Path, gate: Gate
) -> None:
    """It has not begun; asked to, it begins."""
    output = tmp_path / "run"
    asked = {("here", 2): [submit(spec, "late")], ("here", 5): [("cancel", "late", {})]}
    view = Looking(output, asked, {("here", HALF): lambda: gate.let_in("late")})
    result = tlora.train(only(spec, "here"), output=output, progress=view)
    late = result.jobs["late"]
    assert (late.status, late.reason, late.steps) == ("cancelled", "a person cancelled it", 0)
    assert late.adapter is None and not (output / "late" / "adapter").exists()
    assert view.joined == [] and events(output, "joined") == []
    assert [each["status"] for each in events(output, "ended") if each["job"] == "late"] == [
        "cancelled"
    ]
    assert answers(output)[1] == "cancelled after 0 steps; it has not begun"
    assert same_end(output, together, "here")
    assert tlora.train(only(spec, "here"), output=output).jobs["late"].status == "cancelled"
    put(output, ("resume", "late", {}))
    assert tlora.train(only(spec, "here"), output=output).jobs["late"].status == "completed"
    assert same_end(output, together, "late")


def let_in_when_dismissed(gate: Gate, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is looked at first, however long that takes."""
    dismiss = arriving.Arrival.dismiss

    def dismissed(self, *verdict) -> None:
        dismiss(self, *verdict)
        gate.let_in(job)

    monkeypatch.setattr(arriving.Arrival, "dismiss", dismissed)


def test_a_job_that_is_cancelled_as_it_comes_back_keeps_what_it_had(
    spec: RunSpec, together: Path, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter of its checkpoint, though the file of its first leave was spoilt."""
    output = tmp_path / "run"
    both = only(spec, "here", "late")
    view = Looking(output, {("late", 3): [("cancel", "late", {})]})
    left = tlora.train(both, output=output, progress=view).jobs["late"]
    kept = adapter_bytes(output, "late")
    (output / "late" / "adapter" / WEIGHTS).write_bytes(b"nothing")
    (output / "here" / "result.json").unlink()
    put(output, ("resume", "late", {}))
    asked = {("here", STEPS): [("cancel", "late", {})]}
    let_in_when_dismissed(gate, "late", monkeypatch)
    again = tlora.train(both, output=output, progress=Looking(output, asked)).jobs["late"]
    assert again.status == "cancelled" and 0 < again.steps == left.steps
    assert again.loss == left.loss and adapter_bytes(output, "late") == kept
    put(output, ("resume", "late", {}))
    gate.let_in("late")
    tlora.train(both, output=output)
    assert same_end(output, together, "late")


def _unreadable(start: Path) -> None:
    (start / WEIGHTS).write_bytes(b"nothing")


def _infinite(start: Path) -> None:
    tensors = load_file(start / WEIGHTS)
    next(iter(tensors.values()))[0, 0] = torch.inf
    save_file(tensors, start / WEIGHTS)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(_unreadable, "cut short"), (_infinite, "that are not finite numbers")],
)
def test_a_job_that_cannot_come_fails_alone(
    spec: RunSpec, together: Path, tmp_path: Path, gate: Gate, spoil, reason: str
) -> None:
    """What it starts from is spoilt after it was looked at."""
    output, start = tmp_path / "run", tmp_path / "start"
    start.mkdir()
    for file in (together / "late" / "adapter").iterdir():
        (start / file.name).write_bytes(file.read_bytes())
    [late] = only(spec, "late").jobs
    asked = submission(replace(spec, jobs=(replace(late, init_from=str(start)),)))

    def let_in() -> None:
        spoil(start)
        gate.let_in("late")

    view = Looking(output, {("here", 2): [("submit", "", asked)]}, {("here", HALF + 4): let_in})
    result = tlora.train(only(spec, "here"), output=output, progress=view)
    failed = result.jobs["late"]
    assert failed.status == "failed" and reason in str(failed.reason)
    assert json.loads((output / "late" / "result.json").read_text())["reason"] == failed.reason
    assert result.jobs["here"].status == "completed" and view.joined == []
    assert same_end(output, together, "here")


def test_a_job_whose_data_have_changed_fails_alone(
    spec: RunSpec, together: Path, tmp_path: Path, gate: Gate
) -> None:
    """When it comes back."""
    output, own = tmp_path / "run", write_rows(tmp_path / "own.jsonl", 12)

    def with_own(job: JobSpec) -> JobSpec:
        return replace(job, data=replace(job.data, path=str(own)))

    [here, late] = only(spec, "here", "late").jobs
    both = replace(spec, jobs=(here, with_own(late)))
    asked = {("late", 3): [("cancel", "late", {})], ("here", STEPS - 8): [("resume", "late", {})]}
    then = {("here", STEPS - 9): lambda: write_rows(own, 12, seed=7)}
    gate.let_in("late")
    result = tlora.train(both, output=output, progress=Looking(output, asked, then))
    assert result.jobs["late"].status == "failed"
    assert "its data have changed since it was saved" in str(result.jobs["late"].reason)
    assert same_end(output, together, "here")


@pytest.mark.parametrize("alone", [False, True])
def test_a_run_is_stopped_while_a_job_comes_and_goes_on_with_it(
    spec: RunSpec, together: Path, tmp_path: Path, gate: Gate, alone: bool
) -> None:
    """Within a moment, whether others train or nobody does."""
    output = tmp_path / "run"
    stopped: list[float] = []

    def stop() -> None:
        stopped.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    class Stopping(Looking):
        def on_end(self, result) -> None:
            super().on_end(result)
            if alone:
                threading.Timer(0.3, stop).start()

    then = {} if alone else {("here", HALF + 4): stop}
    view = Stopping(output, {("here", 2): [submit(spec, "late")]}, then)
    result = tlora.train(only(spec, "here"), output=output, progress=view)
    assert time.monotonic() - stopped[0] < PATIENCE_S / 4
    assert result.interrupted and "late: comes in when the run goes on" in view.said
    assert gate.reached == ["late"] and view.joined == []
    gate.let_in()
    assert not tlora.train(only(spec, "here"), output=output).interrupted
    assert same_end(output, together, "here") and same_end(output, together, "late")


def stop() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_run_that_is_stopped_while_data_are_prepared_has_more_to_do(
    spec: RunSpec, together: Path, tmp_path: Path, ready: threading.Event
) -> None:
    """Though all that trained are over."""
    output = tmp_path / "run"

    class Stopping(Looking):
        def on_end(self, result) -> None:
            super().on_end(result)
            threading.Timer(0.3, stop).start()

    view = Stopping(output, {("here", 2): [submit(spec, "late")]})
    result = tlora.train(only(spec, "here"), output=output, progress=view)
    assert result.interrupted and answers(output) == [None]
    assert "what was asked last is done when the run goes on" in view.said
    ready.set()
    tlora.train(only(spec, "here"), output=output)
    assert same_end(output, together, "late")


def test_a_job_that_is_cancelled_on_its_way_is_so_at_a_stop(
    spec: RunSpec, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not taken in when the run goes on."""
    output = tmp_path / "run"
    asked = {("here", 2): [submit(spec, "late")], ("here", 5): [("cancel", "late", {})]}

    take = arriving.Arrivals.take_dismissed

    def let_in_and_take(self) -> list:
        # The loop has come to its end.
        gate.let_in("late")
        return take(self)

    monkeypatch.setattr(arriving.Arrivals, "take_dismissed", let_in_and_take)
    monkeypatch.setattr(arriving, "LEAVE_S", PATIENCE_S)
    view = Looking(output, asked, {("here", HALF + 4): stop})
    result = tlora.train(only(spec, "here"), output=output, progress=view)
    late = result.jobs["late"]
    assert (late.status, late.steps, late.adapter) == ("cancelled", 0, None)
    assert "late: comes in" not in view.said
    again = Looking(output, {})
    assert tlora.train(only(spec, "here"), output=output, progress=again).jobs["late"] == late
    assert answers(output)[1] == "cancelled after 0 steps; it has not begun"


def test_a_job_that_is_on_its_way_back_is_not_reported_by_its_old_end(
    spec: RunSpec, together: Path, tmp_path: Path, gate: Gate
) -> None:
    """It is asked for when it is known to have left, and the run is stopped when it is on its
    way."""
    output = tmp_path / "run"

    class View(Looking):
        is_stopped = False

        def on_end(self, result) -> None:
            super().on_end(result)
            if result.job == "late" and not gate.reached:
                put(output, ("resume", "late", {}))

        def on_step(self, driver, done) -> None:
            super().on_step(driver, done)
            if done.job != "here" or "late" not in self.steps:
                return
            if not gate.reached:
                time.sleep(0.05)
            elif not self.is_stopped:
                self.is_stopped = True
                stop()

    here, late = only(spec, "here", "late").jobs
    here = replace(here, train=replace(here.train, max_steps=4 * STEPS))
    both = replace(spec, jobs=(here, late))
    view = View(output, {("late", 3): [("cancel", "late", {})]})
    result = tlora.train(both, output=output, progress=view)
    assert result.interrupted and gate.reached == ["late"]
    assert "late" not in result.jobs and "late: comes in when the run goes on" in view.said
    gate.let_in()
    tlora.train(both, output=output)
    assert same_end(output, together, "late")


def test_an_error_of_any_kind_on_its_way_is_the_jobs_own(
    spec: RunSpec, together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumption = arriving.resumption

    def odd(directory, job):
        return resumption(directory, job) if job.name != "late" else {}["nothing"]

    monkeypatch.setattr(arriving, "resumption", odd)
    output = tmp_path / "run"
    view = Looking(output, {("here", 2): [submit(spec, "late")]})
    result = tlora.train(only(spec, "here"), output=output, progress=view)
    assert result.jobs["late"].status == "failed"
    assert "KeyError: 'nothing'" in str(result.jobs["late"].reason)
    assert same_end(output, together, "here")


def test_an_error_of_any_kind_with_data_is_the_requests_own(
    spec: RunSpec, together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def odd(*about, **more):
        raise RuntimeError("a reader broke")

    monkeypatch.setattr(checking, "prepare_jobs", odd)
    output = tmp_path / "run"
    view = Looking(output, {("here", 2): [submit(spec, "late")]})
    result = tlora.train(only(spec, "here"), output=output, progress=view)
    [said] = answers(output)
    assert "data cannot be prepared: RuntimeError: a reader broke" in said
    assert list(result.jobs) == ["here"] and same_end(output, together, "here")


def test_what_was_put_off_until_the_last_job_has_left_is_done(
    spec: RunSpec, together: Path, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run does not end before."""
    output = tmp_path / "run"
    twice = [("cancel", "late", {}), ("resume", "late", {})]
    asked = {("here", 2): [submit(spec, "late")], ("here", STEPS): twice}
    let_in_when_dismissed(gate, "late", monkeypatch)
    result = tlora.train(only(spec, "here"), output=output, progress=Looking(output, asked))
    assert result.jobs["late"].status == "completed"
    assert answers(output)[1:] == [
        "cancelled after 0 steps; it has not begun",
        "goes on after step 0",
    ]
    assert same_end(output, together, "late")


def test_others_train_between_two_that_come(spec: RunSpec, tmp_path: Path, gate: Gate) -> None:
    """Though both are ready: their pauses do not add up."""
    output = tmp_path / "run"

    def let_in() -> None:
        assert sorted(gate.reached) == ["late", "slow"]
        gate.let_in()

    asked = {("here", 2): [submit(spec, "late"), submit(spec, "slow")]}
    # The run stands still until both are here.
    view = Looking(output, asked, {("here", HALF + 4): let_in})
    tlora.train(only(spec, "here"), output=output, progress=view)
    kinds = [
        each["kind"]
        for each in map(json.loads, (output / "events.jsonl").read_text().splitlines())
        if each["kind"] in ("joined", "nano_batch")
    ]
    first = kinds.index("joined")
    assert kinds[first + 1] == "nano_batch" and kinds.count("joined") == 2
