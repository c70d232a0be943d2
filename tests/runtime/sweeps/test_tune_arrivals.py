"""Trials of a sweep on one device that come while others train."""

import json
import os
import signal
from collections.abc import Callable, Iterator

import pytest
from support.arriving import Gate, let_others_arrive, rows_were_waiting
from support.sweeps import lines, sweep_file

import tlora
from tlora.runtime.sweeps import running
from tlora.runtime.sweeps.running import SweepRunner
from tlora.store.study import StudyLog


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    monkeypatch.setattr(running, "comes_meanwhile", lambda engine: True)
    gate = Gate(monkeypatch, "t-01")
    yield gate
    gate.let_in()


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    """Of the first trial, while others come as far as they can."""
    own = SweepRunner.on_step

    def on_step(self, driver, done) -> None:
        own(self, driver, done)
        if (done.job, done.step) == ("t-00", step):
            let_others_arrive()
            act()
            let_others_arrive()

    monkeypatch.setattr(SweepRunner, "on_step", on_step)


def sweep(base, rows):
    file = sweep_file(base, rows, exact=False, early_exit={"method": "none"})
    file["search"] |= {"space": {"train.learning_rate": [1e-3, 2e-3, 3e-3]}, "max_parallel": 2}
    return tlora.load_sweep(file)


def test_a_trial_trains_while_another_comes(base, rows, tmp_path, monkeypatch, gate) -> None:
    """Which is attached when it is let through, in rows that were found meanwhile, and comes to the
    same end."""
    waiting = rows_were_waiting(monkeypatch)
    at_step(monkeypatch, 3, lambda: gate.let_in("t-01"))
    study = tlora.tune(sweep(base, rows), output=tmp_path / "run", view=lines())
    assert {trial.status for trial in study.trials} == {"completed"}
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    come = next(
        at for at, each in enumerate(events) if each["kind"] == "joined" and each["job"] == "t-01"
    )
    before = [each for each in events[:come] if each["kind"] == "nano_batch"]
    assert len(before) >= 3 and all(set(each["tokens"]) == {"t-00"} for each in before)
    assert events[come]["paused_ms"] > 0
    assert waiting[1], "of the second that came"


def test_a_sweep_that_is_stopped_while_a_trial_comes_goes_on_with_it(
    base, rows, tmp_path, monkeypatch, gate
) -> None:
    at_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    study = tlora.tune(sweep(base, rows), output=tmp_path / "run", view=lines())
    assert study.interrupted and gate.reached == ["t-01"]
    gate.let_in()
    study = tlora.tune(sweep(base, rows), output=tmp_path / "run", view=lines())
    assert not study.interrupted and {trial.status for trial in study.trials} == {"completed"}


def test_a_trial_that_a_person_stops_on_its_way_never_comes(
    base, rows, tmp_path, monkeypatch, gate
) -> None:
    """Let through when the others go on: they come to their ends without it."""
    monkeypatch.setattr(running, "LOOK_EVERY_S", 0.0)
    output = tmp_path / "run"

    def ask() -> None:
        log = StudyLog(output / "state.sqlite")
        log.request("stop", "t-01", {})
        log.close()

    at_step(monkeypatch, 3, ask)
    at_step(monkeypatch, 6, lambda: gate.let_in("t-01"))
    study = tlora.tune(sweep(base, rows), output=output, view=lines())
    found = {trial.name: trial.status for trial in study.trials}
    assert found == {"t-00": "completed", "t-01": "exited", "t-02": "completed"}
    events = [json.loads(line) for line in (output / "events.jsonl").open()]
    assert "t-01" not in {each["job"] for each in events if each["kind"] in ("joined", "attached")}
