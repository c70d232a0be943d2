"""Several tasks over worker processes, when something comes in between: a person, another number of
devices, a sampler that learns, trials that fail."""

import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.task_faults import NEEDS_ALL, TOO_LARGE, without_memory
from support.tasks import ADAPTER, lines, run, said, same_end, study_of, told_once, turns_of

import tlora
from tlora.core.errors import TloraError
from tlora.runtime.executors import processes
from tlora.runtime.sweeps import conductor
from tlora.runtime.sweeps.view import View
from tlora.store.study import StudyLog
from tlora.training.checkpoint import checkpoints
from tlora.tuning.events import Evaluated

pytestmark = pytest.mark.multi_process


class After(View):
    """Does something once so many evaluations have been told."""

    def __init__(self, evaluations: int, then: Callable[[], None]) -> None:
        super().__init__(io.StringIO())
        self.left, self.then = evaluations, then

    def on_turn(self, state, event, actions) -> None:
        super().on_turn(state, event, actions)
        self.left -= isinstance(event, Evaluated)
        if self.left == 0:
            self.left = -1
            self.then()


def ctrl_c(evaluations: int) -> View:
    return After(evaluations, lambda: os.kill(os.getpid(), signal.SIGINT))


def without_tasks(file: dict, task: dict) -> dict:
    return {key: value for key, value in file.items() if key != "tasks"} | {"task": task}


def test_a_sweep_goes_on_under_other_numbers_of_devices(file, done, tmp_path):
    """Stopped by Ctrl-C on two devices in the warm-up, on three after it, ended on one: nobody is
    lost, nobody told twice, the same winners bit for bit."""
    root = tmp_path / "run"
    first = run(file, root, ctrl_c(3))
    assert first.interrupted and not study_of(root)["over"]
    # An orderly end: whoever has trained has saved it.
    trained = {turn.event.trial for turn in turns_of(root) if isinstance(turn.event, Evaluated)}
    assert trained and all(checkpoints(root / name / "checkpoints") for name in trained)
    second = ctrl_c(7)
    assert run(file, root, second, devices=3).interrupted
    assert "goes on: 0 of 4 trials are over" in said(second)
    last = lines()
    assert not run(file, root, last, devices=1).interrupted
    same_end(root, done)
    told_once(root)


def test_one_task_goes_on_where_it_was_begun_or_elsewhere(file, tmp_path):
    """From two workers into one process and back: the trials and the winner's bits of a sweep that
    never left its process."""
    single = without_tasks(file, file["tasks"][0])
    spec = tlora.load_sweep(single)
    tlora.tune(spec, output=tmp_path / "still", view=lines())
    root = tmp_path / "moved"
    assert run(single, root, ctrl_c(3)).interrupted
    assert tlora.tune(spec, output=root, view=ctrl_c(3)).interrupted
    assert not run(single, root).interrupted
    still = study_of(tmp_path / "still")
    assert study_of(root)["trials"] == still["trials"]
    assert study_of(root)["best"] == still["best"]
    path = Path("winner") / ADAPTER
    assert (root / path).read_bytes() == (tmp_path / "still" / path).read_bytes()
    told_once(root)


def test_a_trial_without_memory_fails_and_the_rest_goes_on(file, tmp_path, monkeypatch):
    """In a worker: one that has none beside others waits until it is alone, one that has none by
    itself fails with the reason; the other task does not notice."""
    monkeypatch.setattr(processes, "serve", without_memory)
    view = lines()
    run({**file, "early_exit": "none"}, tmp_path / "run", view)
    found = {each["name"]: each for each in study_of(tmp_path / "run")["trials"]}
    failed = found.pop(TOO_LARGE)
    assert failed["status"] == "failed" and "out of memory: no room" in failed["reason"]
    assert {each["status"] for each in found.values()} == {"completed"}
    assert f"{NEEDS_ALL}: no memory beside the others" in said(view)


def test_a_task_of_which_every_trial_fails_costs_the_other_nothing(file, done, tmp_path):
    """It ends without a winner and with reasons; the other has the winner it always has."""
    one, two = file["tasks"]
    view = lines()
    hopeless = {**file, "tasks": [{**one, "lora": {"lora_alpha": 1e38}}, two]}
    found = run(hopeless, tmp_path / "run", view)
    assert found.studies["one"].best is None and found.studies["one"].winner is None
    assert {trial.status for trial in found.studies["one"].trials} == {"failed"}
    assert all("norm is inf" in str(trial.reason) for trial in found.studies["one"].trials)
    path = Path("winner") / "two" / ADAPTER
    assert (tmp_path / "run" / path).read_bytes() == (done / path).read_bytes()
    assert "no winner: no trial came to a value; one-00: the gradient norm is inf" in said(view)


class Asking(View):
    """Somebody at another terminal, who asks for the next thing when the last one is answered."""

    def __init__(self, output: Path, *requests: tuple[str, str, dict]) -> None:
        super().__init__(io.StringIO())
        self.output, self.requests = output, list(requests)
        self.last: int | None = None
        self.answers: list[str] = []

    def on_turn(self, state, event, actions) -> None:
        super().on_turn(state, event, actions)
        if isinstance(event, Evaluated):
            self.ask()

    def ask(self) -> None:
        log = StudyLog(self.output / "state.sqlite")
        answer = None if self.last is None else log.answer_to(self.last)
        if answer is not None:
            self.answers.append(answer)
        if self.requests and (self.last is None or answer is not None):
            self.last = log.request(*self.requests.pop(0))
        elif answer is not None:
            self.last = None
        log.close()


def test_people_stop_resume_and_clone_trials_of_any_task(file, tmp_path, monkeypatch):
    """While it runs, through the store; what cannot be done is answered."""
    monkeypatch.setattr(conductor, "LOOK_EVERY_S", 0.01)
    view = Asking(
        tmp_path / "run",
        ("stop", "one-00", {}),
        ("resume", "one-00", {}),
        ("clone", "two-01", {"train.learning_rate": 2e-3}),
        ("stop", "two-00", {}),
        ("stop", "three-00", {}),
    )
    run(file, tmp_path / "run", view)
    found = {each["name"]: each for each in study_of(tmp_path / "run")["trials"]}
    assert found["one-00"]["status"] == "completed" and found["two-00"]["rule"] == "person"
    assert found["two-01.1"]["status"] == "completed" and found["two-01.1"]["task"] == "two"
    assert "there is no trial 'three-00'" in said(view)
    told_once(tmp_path / "run")


def test_optuna_asks_and_hears_over_devices(file, tmp_path):
    """A sampler for each task, stopped once: every trial is asked for once, in each task; there are
    winners."""
    pytest.importorskip("optuna", reason="an extra: pip install 'tlora[tune]'")
    search = {"sampler": "tpe", "trials": 6, "max_parallel": 2}
    search["space"] = {"lora.r": [2, 4], "train.learning_rate": {"log": [1e-4, 1e-1]}}
    learning = {**file, "search": search}
    assert run(learning, tmp_path / "run", ctrl_c(5)).interrupted
    found = run(learning, tmp_path / "run")
    for task, study in found.studies.items():
        assert [trial.name for trial in study.trials] == [f"{task}-{at:02}" for at in range(6)]
        assert len({str(trial.params) for trial in study.trials}) == 6
        assert study.winner is not None
    told_once(tmp_path / "run")


def test_a_sweep_whose_workers_do_not_come_up_ends(file, tmp_path, monkeypatch):
    """With the reason, and no trial is told as failed: once they do, it goes on."""
    monkeypatch.setattr(processes, "serve", json.loads)
    with pytest.raises(TloraError, match="no device is left: its process ended with code 1"):
        run(file, tmp_path / "run")
    monkeypatch.undo()
    assert {each["status"] for each in study_of(tmp_path / "run")["trials"]} <= {
        "waiting",
        "running",
    }
    found = run(file, tmp_path / "run")
    assert all(study.best is not None for study in found.studies.values())
