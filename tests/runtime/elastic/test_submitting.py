"""Somebody submits jobs to a run that ends meanwhile: what is said agrees with what is on disk."""

import json
import re
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.asking import answers
from support.runs import job_file, write_rows
from support.waiting import PATIENCE_S

from tlora.config import dump_spec, load_spec
from tlora.core.errors import SpecError
from tlora.core.job import RunSpec
from tlora.runtime import directory
from tlora.runtime.directory import RunDirectory
from tlora.runtime.elastic import asking
from tlora.runtime.elastic.roll import command_to_go_on, enrol
from tlora.runtime.executors.worker import no_result
from tlora.store.requests import Requests


class Ending:
    """A run that ends as soon as it is asked; `last` is the last it does."""

    def __init__(self, base: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        data = {"path": str(write_rows(root / "rows.jsonl", 4))}
        self.asked = load_spec(job_file(base, *({"name": name, "data": data} for name in "ab")))
        self.run: RunSpec = replace(self.asked, jobs=self.asked.jobs[:1])
        self.root = root
        (root / "resolved.yaml").write_text(dump_spec(self.run))
        (root / "run.json").write_text(json.dumps({"jobs": ["a"]}))
        monkeypatch.setattr(asking, "_check", lambda spec: None)
        monkeypatch.setattr(asking, "put_and_wait", self._put)
        self.last: Callable[[int], object] = lambda number: None
        self.directory = RunDirectory(root)
        self.directory.take()

    def _put(self, requests: Requests, root, kind, job, body, *, patience_s):
        number = requests.request(kind, job, body)
        self.last(number)
        self.directory.close()
        return number, None

    def answer(self, number: int, text: str) -> None:
        requests = Requests(self.root / "state.sqlite")
        requests.answer(number, text)
        requests.close()

    def submit(self) -> str:
        return " ".join(asking.submit(self.root, self.asked, patience_s=1.0))


@pytest.fixture
def ending(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ending:
    return Ending(base, tmp_path, monkeypatch)


def test_what_a_run_did_not_look_at_is_withdrawn(ending: Ending) -> None:
    """And refused, with the command that goes on with the run."""
    again = re.escape(command_to_go_on(ending.root))
    with pytest.raises(SpecError, match=f"nobody is at work in .*; go on with it by {again}, and"):
        ending.submit()
    assert answers(ending.root) == [asking.WITHDRAWN]


def test_an_answer_with_the_last_breath_stays(ending: Ending) -> None:
    """Whatever it says."""
    ending.last = lambda number: ending.answer(number, "at work: a, b")
    assert "at work: a, b" in ending.submit()
    assert answers(ending.root) == ["at work: a, b"]
    ending.directory.take()
    ending.last = lambda number: ending.answer(number, "error: no memory")
    with pytest.raises(SpecError, match="no memory"):
        ending.submit()
    assert answers(ending.root)[1] == "error: no memory"


def test_jobs_that_are_on_record_are_not_refused(ending: Ending) -> None:
    """The run was killed before it could answer: it has them, and the request stays for it."""
    ending.last = lambda number: enrol(ending.root, ending.run, ending.asked.jobs)
    assert "has them when it goes on: tlora train" in ending.submit()
    assert answers(ending.root) == [None]


def test_another_who_submits_is_not_taken_for_the_run(
    ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the lock for a moment; a run that holds it on is busy."""
    other = RunDirectory(ending.root)
    patience_s = directory.PATIENCE_S
    monkeypatch.setattr(directory, "PATIENCE_S", PATIENCE_S)

    def hold(number: int) -> None:
        ending.directory.close()
        other.take()
        threading.Timer(0.2, other.close).start()

    ending.last = hold
    with pytest.raises(SpecError, match="nobody is at work"):
        ending.submit()
    monkeypatch.setattr(directory, "PATIENCE_S", patience_s)
    ending.directory.take()
    ending.last = lambda number: (ending.directory.close(), other.take())
    assert "the run is busy" in ending.submit()
    other.close()


def test_of_a_run_that_is_over_nobody_is_sent_to_go_on_with_it(ending: Ending) -> None:
    """It would end at once, and take nothing in."""
    (ending.root / "a").mkdir()
    result = replace(no_result("a", ""), status="completed")
    (ending.root / "a" / "result.json").write_text(json.dumps({"v": 1, **asdict(result)}))
    with pytest.raises(SpecError, match="its jobs are over; train these with tlora train"):
        ending.submit()
    assert answers(ending.root) == [asking.WITHDRAWN]
