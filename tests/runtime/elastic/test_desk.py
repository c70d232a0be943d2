"""A desk with a floor that only takes notes: what is asked, answered, kept and done again."""

import json
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.asking import answers, put, submission
from support.runs import job_file, write_rows
from support.waiting import PATIENCE_S

from tlora.config import dump_spec, load_spec
from tlora.core.errors import DataError
from tlora.core.job import RunSpec
from tlora.runtime.directory import RunDirectory
from tlora.runtime.elastic import desk as desks
from tlora.runtime.elastic.desk import Desk
from tlora.runtime.executors.worker import no_result
from tlora.store.requests import Requests


class Floor:
    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    def admit(self, job, data) -> None:
        self.done.append(("admit", job.name))

    def waits(self, job) -> bool:
        return False

    def dismiss(self, job) -> None:
        self.done.append(("dismiss", job))


@pytest.fixture
def spec(base: Path, tmp_path: Path) -> RunSpec:
    data = {"path": str(write_rows(tmp_path / "rows.jsonl", 4))}
    return load_spec(job_file(base, *({"name": name, "data": data} for name in "abc")))


class Prepared:
    """Data without rows."""

    class report:
        @staticmethod
        def lines() -> list[str]:
            return ["no rows"]


def opened(root: Path, run: RunSpec, running: str, prepare=None, *, in_turns=False) -> Desk:
    root.mkdir(exist_ok=True)
    if not (root / "run.json").exists():
        (root / "resolved.yaml").write_text(dump_spec(run))
        (root / "run.json").write_text(json.dumps({"jobs": [job.name for job in run.jobs]}))
    found: Any = prepare or (lambda jobs: {job.name: Prepared for job in jobs})
    return Desk(root, run, running, prepare=found, say=lambda *lines: None, in_turns=in_turns)


def ended(root: Path, desk: Desk, job: str, status: str) -> None:
    result = replace(no_result(job, "so"), status=status, steps=7, adapter=f"{job}/adapter")
    directory = RunDirectory(root)
    directory.write_result(result)
    desk.ended(result)


def test_a_cancelled_job_is_answered_when_its_files_are_on_disk(
    spec: RunSpec, tmp_path: Path
) -> None:
    """Who asked in the same breath that it go on has it then, and not before; one that came to its
    own end first was too late."""
    root, floor = tmp_path / "run", Floor()
    desk = opened(root, spec, "abc")
    put(root, ("cancel", "a", {}), ("cancel", "b", {}), ("resume", "a", {}))
    desk.serve(floor)
    assert floor.done == [("dismiss", "a"), ("dismiss", "b")]
    assert answers(root) == [None, None, None]
    assert not desk.is_asked(now=True)
    ended(root, desk, "a", "cancelled")
    ended(root, desk, "b", "completed")
    assert answers(root)[:2] == [
        "cancelled after 7 steps; its adapter is kept",
        "error: b is over: completed",
    ]
    put(root, ("resume", "b", {}), ("resume", "c", {}))
    desk.serve(floor, now=True)
    assert floor.done[2:] == [("admit", "a")]
    assert answers(root)[2:] == [
        "goes on after step 7",
        "error: b is over: completed",
        "error: c is at work",
    ]
    assert not (root / "a" / "result.json").exists()
    desk.close()


def test_what_was_kept_and_not_answered_is_done_again(spec: RunSpec, tmp_path: Path) -> None:
    """A process that ends between the record and the answer, and one that loses its ranks."""
    root, floor = tmp_path / "run", Floor()
    first = replace(spec, jobs=spec.jobs[:2])

    class Gone(Floor):
        def admit(self, job, data) -> None:
            raise KeyboardInterrupt

    desk = opened(root, first, "ab")
    put(root, ("submit", "", submission(spec)))
    with pytest.raises(KeyboardInterrupt):
        desk.serve(Gone())
    desk.close()
    assert answers(root) == [None]
    assert json.loads((root / "run.json").read_text())["submitted"] == ["c"]
    desk = opened(root, load_spec(root / "resolved.yaml"), "abc")
    desk.serve(floor)
    assert floor.done == [] and answers(root) == ["at work: a, b, c"]
    put(root, ("cancel", "c", {}))
    desk.serve(floor)
    desk.begin_again()
    desk.serve(floor)
    assert floor.done == [("dismiss", "c")] * 2
    desk.close()


def test_data_that_are_wrong_are_answered_and_nothing_is_kept(
    spec: RunSpec, tmp_path: Path
) -> None:
    """Neither on record nor on the floor."""

    def bad(jobs):
        raise DataError("no such file", job=jobs[0].name, path="gone.jsonl")

    root, floor = tmp_path / "run", Floor()
    desk = opened(root, replace(spec, jobs=spec.jobs[:1]), "a", bad)
    before = (root / "resolved.yaml").read_text()
    put(root, ("submit", "", submission(spec)))
    desk.serve(floor)
    assert answers(root) == ["error: job 'b': gone.jsonl: no such file"]
    assert floor.done == [] and (root / "resolved.yaml").read_text() == before
    desk.close()


def test_the_store_is_looked_at_no_more_than_once_a_second(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it is asked; and one that cannot be read stops nobody."""
    monkeypatch.setattr(desks, "LOOK_EVERY_S", 1.0)
    looks: list[None] = []

    def look(self) -> list:
        looks.append(None)
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(Requests, "open_requests", look)
    now = [100.0]
    monkeypatch.setattr(desks.time, "monotonic", lambda: now[0])
    desk = opened(tmp_path / "run", spec, "abc")
    for _ in range(100):
        assert not desk.is_asked()
        now[0] += 0.025
    assert len(looks) == 3
    desk.close()


def test_data_are_prepared_while_whoever_serves_does_something_else(
    spec: RunSpec, tmp_path: Path
) -> None:
    """What is asked after that waits for its turn; data that are wrong are answered then."""
    root, floor, ready = tmp_path / "run", Floor(), threading.Event()

    def prepare(jobs) -> dict:
        assert ready.wait(PATIENCE_S)
        if jobs[0].name == "c":
            raise DataError("no rows", job="c")
        return {job.name: Prepared for job in jobs}

    one = replace(spec, jobs=spec.jobs[:1])
    desk = opened(root, one, "a", prepare, in_turns=True)
    put(
        root,
        ("submit", "", submission(replace(spec, jobs=spec.jobs[1:2]))),
        ("cancel", "b", {}),
        ("submit", "", submission(replace(spec, jobs=spec.jobs[2:]))),
    )
    desk.serve(floor)
    desk.wait(0.01)
    assert desk.is_preparing and not desk.is_asked(now=True)
    desk.serve(floor, now=True)
    assert floor.done == [] and answers(root) == [None] * 3 and desk.running == {"a"}
    ready.set()
    desk.wait(PATIENCE_S)
    assert desk.is_asked()
    desk.serve(floor)
    assert floor.done == [("admit", "b"), ("dismiss", "b")]
    desk.wait(PATIENCE_S)
    desk.serve(floor)
    assert not desk.is_preparing and desk.running == {"a", "b"}
    assert answers(root) == ["at work: b", None, "error: job 'c': no rows"]


def test_others_leave_while_data_are_prepared(spec: RunSpec, tmp_path: Path) -> None:
    """Who is submitted may take minutes; who is to leave has no part in it. What was asked of a job
    before it is to leave comes first."""
    root, floor, ready = tmp_path / "run", Floor(), threading.Event()

    def prepare(jobs) -> dict:
        assert ready.wait(PATIENCE_S)
        return {job.name: Prepared for job in jobs}

    two = replace(spec, jobs=spec.jobs[:2])
    desk = opened(root, two, "ab", prepare, in_turns=True)
    put(root, ("submit", "", submission(replace(spec, jobs=spec.jobs[2:]))))
    desk.serve(floor)
    put(root, ("cancel", "c", {}), ("cancel", "a", {}), ("resume", "b", {}), ("cancel", "b", {}))
    assert desk.is_preparing and desk.is_asked(now=True)
    desk.serve(floor, now=True)
    assert floor.done == [("dismiss", "a")] and desk.is_preparing
    assert not desk.is_asked(now=True), "the others wait"
    ready.set()
    desk.wait(PATIENCE_S)
    desk.serve(floor, now=True)
    assert floor.done == [("dismiss", "a"), ("admit", "c"), ("dismiss", "c"), ("dismiss", "b")]
    assert answers(root) == ["at work: c", None, None, "error: b is at work", None]


def test_data_that_are_prepared_while_requests_are_read_are_not_lost(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was submitted first comes first, and the second after that."""
    root, floor, ready = tmp_path / "run", Floor(), threading.Event()

    def prepare(jobs) -> dict:
        assert ready.wait(PATIENCE_S)
        return {job.name: Prepared for job in jobs}

    desk = opened(root, replace(spec, jobs=spec.jobs[:1]), "a", prepare, in_turns=True)
    put(root, *(("submit", "", submission(replace(spec, jobs=(job,)))) for job in spec.jobs[1:]))
    desk.serve(floor)
    look = Requests.open_requests

    def meanwhile(self):
        found = look(self)
        ready.set()
        desk.wait(PATIENCE_S)
        return found

    monkeypatch.setattr(Requests, "open_requests", meanwhile)
    for _ in range(4):
        desk.serve(floor, now=True)
        desk.wait(PATIENCE_S)
    assert floor.done == [("admit", "b"), ("admit", "c")]
    assert answers(root) == ["at work: b", "at work: c"]


def test_nobody_leaves_before_it_has_come(spec: RunSpec, tmp_path: Path) -> None:
    """A job on record that is submitted again and then cancelled, while another is prepared."""
    root, floor, ready = tmp_path / "run", Floor(), threading.Event()

    def prepare(jobs) -> dict:
        assert ready.wait(PATIENCE_S)
        return {job.name: Prepared for job in jobs}

    desk = opened(root, replace(spec, jobs=spec.jobs[:2]), "a", prepare, in_turns=True)
    third, second = (replace(spec, jobs=(spec.jobs[at],)) for at in (2, 1))
    put(
        root,
        ("submit", "", submission(third)),
        ("submit", "", submission(second)),
        ("cancel", "b", {}),
    )
    desk.serve(floor)
    desk.serve(floor, now=True)
    assert floor.done == []
    ready.set()
    for _ in range(3):
        desk.wait(PATIENCE_S)
        desk.serve(floor, now=True)
    assert floor.done == [("admit", "c"), ("admit", "b"), ("dismiss", "b")]
