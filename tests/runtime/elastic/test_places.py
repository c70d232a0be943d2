"""Jobs that have no place yet wait for one: who comes when, and that they train as alone."""

import io
import json
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.arriving import let_others_arrive
from support.asking import Asking, answers, put, submission
from support.kills import same_end
from support.runs import job_file
from support.tiny import spec as tiny_spec

import tlora
from tlora.core.errors import JobFailed, SpecError
from tlora.core.job import RunSpec
from tlora.model.loading import load_shape
from tlora.model.targets import find_targets
from tlora.runtime import arriving, training
from tlora.runtime.directory import RunDirectory
from tlora.runtime.elastic.one_device import OneDevice
from tlora.runtime.elastic.places import Places
from tlora.runtime.elastic.standing import standings
from tlora.runtime.opening import Opening
from tlora.runtime.progress import ProgressLines
from tlora.runtime.resuming import saved_steps
from tlora.runtime.scheduled import train_on_devices
from tlora.training.engine import Engine

NAMES = ("first", "second", "third", "fourth")
STEPS = {"first": 9, "second": 4, "third": 6, "fourth": 3}
NO_DATA: Any = None


def places(*ranks: int, room: float | None = None, most: int | None = None) -> Places:
    """Jobs named by their number that wait, of the size of their ranks."""
    found = Places(lambda job: float(job.lora.r), room_bytes=room, most=most)
    for number, rank in enumerate(ranks):
        found.wait(tiny_spec(f"j{number}", lora={"r": rank}), NO_DATA)
    return found


def names(called: list) -> list[str]:
    return [each.job.name for each in called]


def test_as_many_come_as_have_room_in_their_order() -> None:
    """A small one does not pass a large one, which would wait for ever behind others like it."""
    books = places(4, 2, 8, 1, room=10.0)
    assert names(books.call([])) == ["j0", "j1"] and books.names == ["j2", "j3"]
    assert not books.is_next(["j0", "j1"]) and books.call(["j0", "j1"]) == []
    assert not books.is_next(["j0"]), "4 and 8 are more than 10"
    assert names(books.call(["j1"])) == ["j2"]
    assert names(books.call(["j2"])) == ["j3"] and not books


def test_a_number_bounds_them_too() -> None:
    books = places(1, 1, 1, most=2)
    assert names(books.call([])) == ["j0", "j1"]
    assert books.call(["j0", "j1"]) == []
    assert names(books.call(["j1"])) == ["j2"]


def test_nobody_waits_for_an_empty_device() -> None:
    """That a job does not fit at all is found out there."""
    books = places(50, 1, room=10.0)
    assert names(books.call([])) == ["j0"] and books.names == ["j1"]
    assert not books.is_next(["j0"]) and books.is_next([])


def test_one_that_did_not_fit_waits_until_somebody_leaves() -> None:
    books = places(4, 4, 2)
    second = books.call([])[1]
    books.is_full(["j0", "j2"])
    books.wait(second.job, NO_DATA, again=True)
    assert not books.is_next(["j0", "j2"]), "4 and 2 is what fitted"
    assert not books.is_next(["j0"]), "another 4 is more"
    assert names(books.call(["j2"])) == ["j1"]


def test_those_that_did_not_fit_keep_their_order() -> None:
    """Several were on their way together, and found no memory one after the other."""
    books = places(4, 4, 4, 4)
    called = books.call([])
    books.wait(tiny_spec("late"), NO_DATA)
    there = names(called)
    for each in called[1:]:
        there.remove(each.job.name)
        books.is_full(there)
        books.wait(each.job, NO_DATA, again=True)
    assert books.names == ["j1", "j2", "j3", "late"]


@given(
    ranks=st.lists(st.integers(1, 64), min_size=1, max_size=12),
    room=st.none() | st.integers(1, 100),
    most=st.none() | st.integers(1, 5),
    leaving=st.randoms(use_true_random=False),
)
def test_everybody_comes_once_in_order_and_bounds_hold(ranks, room, most, leaving) -> None:
    books = places(*ranks, room=room, most=most)
    there, came = list[str](), list[str]()
    while books or there:
        called = names(books.call(there))
        there, came = there + called, came + called
        used = sum(ranks[int(name[1:])] for name in there)
        assert len(there) == 1 or room is None or used <= room
        assert most is None or len(there) <= most
        assert there, "somebody always trains"
        there.remove(leaving.choice(there))
    assert came == [f"j{number}" for number in range(len(ranks))]


@pytest.fixture(scope="module")
def spec(base: Path, rows: Path) -> RunSpec:
    """Four jobs that differ, to the bit the same in any company."""
    data = {"path": str(rows)}
    jobs = [
        {"name": "first", "data": data, "lora": {"lora_dropout": 0.2}},
        {"name": "second", "data": data, "lora": {"r": 8}, "train": {"batch_size": 5}},
        {"name": "third", "data": data, "train": {"seed": 3}, "eval": {"split": 4, "steps": 2}},
        {"name": "fourth", "data": data, "lora": {"r": 8}, "train": {"seed": 4}},
    ]
    engine = {"device": "cpu", "isolation": "exact", "nano_batch_tokens": 128}
    steps = [f"jobs.{name}.train.max_steps={steps}" for name, steps in STEPS.items()]
    return tlora.load_spec(job_file(base, *jobs, engine=engine), [*steps, "save.steps=2"])


def limited(spec: RunSpec, most: int | None) -> RunSpec:
    return replace(spec, engine=replace(spec.engine, max_parallel=most))


def only(spec: RunSpec, *names: str) -> RunSpec:
    return replace(spec, jobs=tuple(job for job in spec.jobs if job.name in names))


@pytest.fixture(scope="module")
def together(spec: RunSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them at once."""
    output = tmp_path_factory.mktemp("together") / "run"
    assert not tlora.train(spec, output=output).failed
    return output


def events(root: Path, *kinds: str) -> list[tuple[str, str]]:
    lines = map(json.loads, (root / "events.jsonl").read_text().splitlines())
    return [(each["kind"], each["job"]) for each in lines if each["kind"] in kinds]


def at_once(root: Path) -> int:
    """The most jobs in a nano-batch: all that are there have rows that wait."""
    lines = map(json.loads, (root / "events.jsonl").read_text().splitlines())
    return max(len(each["tokens"]) for each in lines if each["kind"] == "nano_batch")


@pytest.mark.parametrize("most", [1, 2])
def test_jobs_take_turns_and_train_as_all_at_once(
    spec: RunSpec, together: Path, tmp_path: Path, most: int
) -> None:
    output, view = tmp_path / "run", ProgressLines(out=(said := io.StringIO()))
    result = tlora.train(limited(spec, most), output=output, progress=view)
    assert {job.status for job in result.jobs.values()} == {"completed"}
    assert not result.interrupted and set(result.jobs) == set(NAMES)
    for job in NAMES:
        assert same_end(output, together, job)
    began = [job for kind, job in events(output, "attached", "joined")]
    assert began == list(NAMES) and at_once(output) == most
    waited = [job for _, job in events(output, "waits")]
    assert waited == list(NAMES[most:])
    assert f"{4 - most} more in turn" in said.getvalue()
    assert "fourth: joins, 3 steps to go" in said.getvalue()
    assert (output / "report.html").exists()


class Unhurried(Asking):
    """Whoever is on its way comes as far as it can while `first` trains."""

    def on_step(self, driver, done) -> None:
        super().on_step(driver, done)
        if done.job == "first" and done.step >= 4:
            let_others_arrive()


def test_who_has_begun_goes_on_first(spec: RunSpec, together: Path, tmp_path: Path) -> None:
    """A run that was killed while the second and third were at work: they have places again, though
    the fourth stands before them in the file by now."""
    output = tmp_path / "run"

    class Killed(BaseException):
        """As SIGKILL: nothing is saved on the way out."""

    class View(Unhurried):
        def on_step(self, driver, done) -> None:
            super().on_step(driver, done)
            if (done.job, done.step) == ("third", 3):
                raise Killed

    with pytest.raises(Killed):
        tlora.train(limited(spec, 2), output=output, progress=View(output, {}))
    assert (output / "third" / "metrics.jsonl").exists() and not (output / "fourth").exists()
    fourth, others = only(spec, "fourth"), only(spec, "first", "second", "third")
    turned = replace(spec, jobs=(*fourth.jobs, *others.jobs))
    result = tlora.train(limited(turned, 1), output=output)
    assert {job.status for job in result.jobs.values()} == {"completed"}
    for job in NAMES:
        assert same_end(output, together, job)
    last = [job for kind, job in events(output, "attached", "joined")][-1]
    assert last == "fourth"
    assert set(tlora.train(limited(turned, 1), output=output).jobs) == set(NAMES)


def test_a_stop_leaves_who_waits_for_the_next_command(
    spec: RunSpec, together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, said = tmp_path / "run", io.StringIO()
    run = OneDevice.run

    def stopped(self, desk, should_stop):
        steps = iter(range(3))
        return run(self, desk, lambda: next(steps, None) is None)

    monkeypatch.setattr(OneDevice, "run", stopped)
    result = tlora.train(limited(spec, 1), output=output, progress=ProgressLines(out=said))
    assert result.interrupted and not result.jobs
    assert "fourth: has its turn when the run goes on" in said.getvalue()
    standing = {each.job: each.status for each in standings(output, at_work=False)}
    assert standing == dict.fromkeys(NAMES, "stopped")
    monkeypatch.setattr(OneDevice, "run", run)
    assert not tlora.train(limited(spec, 1), output=output).interrupted
    for job in NAMES:
        assert same_end(output, together, job)


def test_one_that_began_and_waits_is_shown_at_its_step(
    spec: RunSpec, together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, shown = tmp_path / "run", list[tuple[str, int, str]]()
    run, three = OneDevice.run, only(spec, "first", "second", "third")

    def stopped(self, desk, should_stop):
        return run(self, desk, lambda: any(driver.step >= 3 for driver in self.drivers.values()))

    class Later(ProgressLines):
        def start(self, drivers, budget_tokens) -> None:
            shown.extend((each.name, each.step, each.status.value) for each in drivers)

    monkeypatch.setattr(OneDevice, "run", stopped)
    assert tlora.train(limited(three, 2), output=output).interrupted
    monkeypatch.setattr(OneDevice, "run", run)
    at = saved_steps(RunDirectory(output), "second")
    assert not tlora.train(limited(three, 1), output=output, progress=Later(io.StringIO())).failed
    assert at > 0 and shown[1:] == [("second", at, "waiting"), ("third", 0, "waiting")]
    for job in ("first", "second", "third"):
        assert same_end(output, together, job)


def test_one_that_waits_may_be_cancelled_and_one_that_comes_may_wait(
    spec: RunSpec, together: Path, tmp_path: Path
) -> None:
    """`third` waits and is let go, never having begun; `fourth` is submitted and has its turn."""
    output = tmp_path / "run"
    asked = {
        ("first", 2): [
            ("resume", "third", {}),
            ("submit", "", submission(only(spec, "fourth"))),
            ("cancel", "third", {}),
        ]
    }
    here = limited(only(spec, "first", "second", "third"), 1)
    result = tlora.train(here, output=output, progress=Asking(output, asked))
    assert result.jobs["third"].status == "cancelled" and result.jobs["third"].steps == 0
    assert answers(output) == [
        "error: third waits for a place",
        "waiting for a place: fourth",
        "cancelled after 0 steps; it has not begun",
    ]
    for job in ("first", "second", "fourth"):
        assert same_end(output, together, job)
    assert [job for _, job in events(output, "waits")] == ["second", "third", "fourth"]


def test_one_that_is_cancelled_as_it_waits_is_not_brought_to_the_device(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However fast the thread is that would bring it."""
    output, brought = tmp_path / "run", list[str]()

    def at_once(act, name: str) -> Future:
        done = Future()
        done.set_result(act())
        return done

    bring = arriving.bring_weights

    def bringing(model, job, weights):
        brought.append(job)
        return bring(model, job, weights)

    monkeypatch.setattr(arriving, "in_background", at_once)
    monkeypatch.setattr(arriving, "bring_weights", bringing)
    three = limited(only(spec, "first", "second", "third"), 1)
    view = Asking(output, {("first", 2): [("cancel", "second", {})]})
    result = tlora.train(three, output=output, progress=view)
    assert result.jobs["second"].status == "cancelled" and brought == ["third"]


def test_one_that_goes_on_where_there_is_no_place_is_said_to_wait(
    spec: RunSpec, together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are there, and so are its data, long before the other job is over."""
    desk = Opening.desk
    at_once = {"in_turns": False}
    monkeypatch.setattr(Opening, "desk", lambda *about, **how: desk(*about, **how | at_once))
    output = tmp_path / "run"

    class View(Asking):
        ended = False

        def on_step(self, driver, done) -> None:
            super().on_step(driver, done)
            if done.job == "second" and not self.ended:
                # Its end is told between nano-batches, when its files are there.
                time.sleep(0.05)

        def on_end(self, result) -> None:
            super().on_end(result)
            if result.job == "first" and not self.ended:
                self.ended = True
                put(output, ("resume", "first", {}))

    first, second = only(spec, "first", "second").jobs
    second = replace(second, train=replace(second.train, max_steps=60))
    two = limited(replace(spec, jobs=(first, second)), 1)
    view = View(output, {("first", 2): [("cancel", "first", {})]})
    result = tlora.train(two, output=output, progress=view)
    steps = int((answers(output)[0] or "").split()[2])
    assert answers(output)[1] == f"waits for a place, then goes on after step {steps}"
    assert {job.status for job in result.jobs.values()} == {"completed"}
    assert same_end(output, together, "first")


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_views_do_not_show_as_waiting_who_ended_without_a_place(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """In lines and on a screen alike, which count by the drivers that they were given."""
    output, shown = tmp_path / "run", list[list[tuple[str, str]]]()

    class View(Asking):
        def on_end(self, result) -> None:
            super().on_end(result)
            shown.append([(each.name, each.status.value) for each in self._drivers])
            if result.job == "second":
                line = self._line(time.perf_counter())
                assert "waiting" not in line and "second" not in line

    def broken(*_):
        raise JobFailed("its checkpoint cannot be read", job="second")

    if how == "failed":
        monkeypatch.setattr(arriving, "resumption", broken)
    asked = {("first", 2): [("cancel", "second", {})]} if how == "cancelled" else {}
    two = limited(only(spec, "first", "second"), 1)
    result = tlora.train(two, output=output, progress=View(output, asked))
    assert result.jobs["second"].status == how
    assert shown[-1] == [("first", result.jobs["first"].status), ("second", how)]


def test_a_job_without_memory_beside_others_waits(
    spec: RunSpec, together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is submitted, does not fit with those who are there, and comes when one has left."""
    attach, there = Engine.attach, list[int]()

    def full(self, name, *rest, **settings) -> None:
        if name == "fourth":
            there.append(len(self.jobs))
            if len(there) == 1:
                raise torch.OutOfMemoryError("the device is full")
        attach(self, name, *rest, **settings)

    monkeypatch.setattr(Engine, "attach", full)
    output = tmp_path / "run"
    asked = {("first", 2): [("submit", "", submission(only(spec, "fourth")))]}
    view = Unhurried(output, asked)
    result = tlora.train(only(spec, "first", "second"), output=output, progress=view)
    assert answers(output) == ["at work: fourth"] and not result.failed
    for job in ("first", "second", "fourth"):
        assert same_end(output, together, job)
    before, after = there
    assert before >= 1 and after < before
    said = view.out.getvalue()  # type: ignore[attr-defined]
    assert "fourth: waits for a place: no memory beside the others" in said


@pytest.mark.parametrize("alone", [False, True])
def test_a_job_without_memory_when_the_run_begins_waits_too(
    spec: RunSpec,
    together: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    alone: bool,
) -> None:
    """There was room by the estimate, and on the device there is not. Who is the first of all has
    nobody to wait for."""
    attach, refused = Engine.attach, "first" if alone else "second"
    there = list[int]()

    def full(self, name, *rest, **settings) -> None:
        if name == refused:
            there.append(len(self.jobs))
            if len(there) == 1:
                raise torch.OutOfMemoryError("the device is full")
        attach(self, name, *rest, **settings)

    monkeypatch.setattr(Engine, "attach", full)
    output = tmp_path / "run"
    result = tlora.train(only(spec, "first", "second", "third"), output=output)
    assert result.failed == (["first"] if alone else [])
    if alone:
        assert result.jobs["first"].reason == "out of memory: the device is full"
    else:
        assert ("waits", "second") in events(output, "waits")
    for job in {"first", "second", "third"} - set(result.failed):
        assert same_end(output, together, job)


def test_a_job_that_fits_nowhere_fails_alone(
    spec: RunSpec, together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is there whose end it could wait for."""
    attach = Engine.attach

    def full(self, name, *rest, **settings) -> None:
        if name == "second":
            raise torch.OutOfMemoryError("the device is full")
        attach(self, name, *rest, **settings)

    monkeypatch.setattr(Engine, "attach", full)
    output = tmp_path / "run"
    result = tlora.train(limited(only(spec, "first", "second", "third"), 1), output=output)
    assert result.failed == ["second"]
    assert result.jobs["second"].reason == "out of memory: the device is full"
    for job in ("first", "third"):
        assert same_end(output, together, job)


def test_memory_decides_how_many_train_at_once(
    spec: RunSpec, together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a device says how much there is, and nobody a number: the pool is made for those who
    come first."""
    reserved = list[int]()
    load = training.load_super_model

    def loaded(spec, device, *, reserve_rows):
        reserved.append(reserve_rows)
        return load(spec, device, reserve_rows=reserve_rows)

    monkeypatch.setattr(training, "load_super_model", loaded)
    monkeypatch.setattr(training, "adapter_bytes", lambda job, targets: float(job.lora.r))
    monkeypatch.setattr(training, "room_bytes", lambda *_, **__: 11.0)
    output = tmp_path / "run"
    result = tlora.train(spec, output=output)
    assert {job.status for job in result.jobs.values()} == {"completed"}
    for job in NAMES:
        assert same_end(output, together, job)
    ranks = [job.lora.r for job in spec.jobs]
    assert reserved == [ranks[0] + ranks[1]] and sum(ranks[:3]) > 11
    assert [job for _, job in events(output, "waits")] == ["third", "fourth"]
    assert at_once(output) == 2 and at_once(together) > 2
    assert set(tlora.train(spec, output=output).jobs) == set(NAMES)
    assert reserved[1:] == [max(ranks)], "all are over, and never had room together"


def test_the_pool_of_those_who_come_first_has_room(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that adapts few linears has rows on all of them."""
    taken = list[int]()
    load = training.load_super_model

    def loaded(*about, **settings):
        model = load(*about, **settings)
        matrices = [rows for pool in model.pools for rows in pool.matrices]
        taken.append(sum(tensor.nbytes for rows in matrices for tensor in rows.tensors))
        return model

    few = [
        replace(job, lora=replace(job.lora, r=4, target_modules=("q_proj",))) for job in spec.jobs
    ]
    room = 2.5 * training.adapter_bytes(few[0], find_targets(load_shape(spec.base)))
    monkeypatch.setattr(training, "load_super_model", loaded)
    monkeypatch.setattr(training, "room_bytes", lambda *_, **__: room)
    tlora.train(replace(spec, jobs=tuple(few)), output=tmp_path / "run")
    assert room / 2 < taken[0] <= room


def test_nano_batches_keep_their_room(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a fair size, of the one that was asked for, and no smaller than the longest row."""
    asked = list[int]()
    monkeypatch.setattr(
        training, "room_bytes", lambda *_, budget_tokens, **__: asked.append(budget_tokens)
    )

    def room(tokens: int | str, longest: int, budget: int) -> int:
        lengths = SimpleNamespace(lengths=torch.tensor([3, longest]))
        data: Any = {"a": SimpleNamespace(train=lengths, evaluation=None)}
        engine = replace(spec.engine, isolation="default", nano_batch_tokens=tokens)
        training.room_beside(replace(spec, engine=engine), NO_DATA, NO_DATA, data, budget)
        return asked[-1]

    assert room("auto", 100, 8192) == training.FAIR_TOKENS
    assert room("auto", 6000, 8192) == 6000
    assert room("auto", 100, 1024) == 1024
    assert room(8192, 100, 8192) == 8192


def test_what_is_wrong_with_a_job_that_waits_is_told_before_anybody_trains(
    spec: RunSpec, tmp_path: Path
) -> None:
    """Only the model itself says that the output head carries no adapter."""
    first, second = only(spec, "first", "second").jobs
    wrong = replace(second, lora=replace(second.lora, target_modules=r".*q_proj|lm_head"))
    output = tmp_path / "run"
    with pytest.raises(SpecError, match=r"'second'.*lm_head is the output head"):
        tlora.train(limited(replace(spec, jobs=(first, wrong)), 1), output=output)
    assert not (output / "first").exists()


@pytest.mark.parametrize("most", [0, -1])
def test_a_number_below_one_is_refused(base: Path, rows: Path, most: int) -> None:
    file = job_file(base, {"name": "a", "data": {"path": str(rows)}}, engine={"max_parallel": most})
    with pytest.raises(SpecError, match=r"engine\.max_parallel: must be at least 1"):
        tlora.load_spec(file)


def test_over_several_devices_the_number_is_refused(spec: RunSpec, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"engine.max_parallel: is for a run on one device"):
        train_on_devices(limited(spec, 2), output=tmp_path / "run", devices=2)
