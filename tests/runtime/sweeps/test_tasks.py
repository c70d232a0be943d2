"""Several tasks over worker processes: as on one device, whatever happens to the workers."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.kills import adapter_bytes, curves
from support.runs import job_file, write_rows

import tlora
from tlora.config import load_tasks
from tlora.core.errors import SpecError
from tlora.runtime.executors.processes import WorkerProcesses
from tlora.runtime.sweeps.tasks import tune_on_devices
from tlora.runtime.sweeps.view import View
from tlora.store.study import StudyLog, StudyTurn
from tlora.tuning.events import Added, Evaluated, Exit
from tlora.tuning.results import TaskStudies

pytestmark = pytest.mark.multi_process

STEPS = 16
RUNNER = Path(__file__).parents[2] / "support" / "tasks_runner.py"


def lines() -> View:
    return View(io.StringIO())


@pytest.fixture(scope="module")
def file(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two tasks of four trials; exact, so that bits can be compared."""
    data = tmp_path_factory.mktemp("data")
    file = job_file(base)
    del file["jobs"]
    file["defaults"]["train"] |= {"max_steps": STEPS}
    file["defaults"] |= {"eval": {"split": 4, "steps": 2}, "save": {"steps": 3}}
    file["engine"] = {"device": "cpu", "isolation": "exact", "nano_batch_tokens": 128}
    file["tasks"] = [
        {"name": name, "data": {"path": str(write_rows(data / f"{name}.jsonl", 20, seed=seed))}}
        for seed, name in enumerate(("one", "two"))
    ]
    file["search"] = {"space": {"lora.r": [2, 4], "train.learning_rate": [1e-4, 1e-2]}}
    # So that the published gap of a tenth does not end every trial of a toy.
    file["early_exit"] = {"warmup": 0.1, "keep": 0.5, "overfitting_gap": 9.0}
    return file


def run(file: Mapping[str, Any], output: Path, view: View | None = None, **more) -> TaskStudies:
    return tune_on_devices(load_tasks(file), output=output, devices=2, view=view or lines(), **more)


def turns_of(output: Path) -> list[StudyTurn]:
    log = StudyLog(output / "state.sqlite")
    try:
        return log.turns()
    finally:
        log.close()


@pytest.fixture(scope="module")
def done(file, tmp_path_factory) -> Path:
    """An undisturbed run with early exit."""
    output = tmp_path_factory.mktemp("done") / "run"
    found = run(file, output)
    assert not found.interrupted and set(found.studies) == {"one", "two"}
    return output


def test_without_early_exit_every_trial_is_the_job_alone(file, tmp_path):
    """The law of isolation over tasks and devices, bit for bit; another trial's bits are not
    these."""
    root = tmp_path / "all"
    found = run({**file, "early_exit": "none"}, root)
    trials = [trial for study in found.studies.values() for trial in study.trials]
    assert {trial.status for trial in trials} == {"completed"} and len(trials) == 8
    whole = tlora.load_spec(root / "resolved.yaml")
    for name in ("one-01", "two-02"):
        jobs = tuple(job for job in whole.jobs if job.name == name)
        alone = type(whole)(base=whole.base, jobs=jobs, engine=whole.engine)
        tlora.train(alone, output=tmp_path / name)
        assert curves(tmp_path / name, name) == curves(root, name)
        assert adapter_bytes(tmp_path / name, name) == adapter_bytes(root, name)
        others = [trial.name for trial in trials if trial.name != name]
        assert all(adapter_bytes(root, each) != adapter_bytes(root, name) for each in others)
    events = [json.loads(line) for line in (root / "events.jsonl").read_text().splitlines()]
    assert {each["device"] for each in events if each["kind"] == "nano_batch"} == {0, 1}


def test_each_task_decides_as_it_does_by_itself_on_one_device(file, done, tmp_path):
    """The same trials given up, on the same numbers, and the same winners."""
    study = json.loads((done / "study.json").read_text())
    assert study["over"] and len(study["trials"]) == 8
    for task in file["tasks"]:
        single = {key: value for key, value in file.items() if key != "tasks"} | {"task": task}
        output = tmp_path / task["name"]
        tlora.tune(tlora.load_sweep(single), output=output, view=lines())
        alone = json.loads((output / "study.json").read_text())
        own = [each for each in study["trials"] if each["task"] == task["name"]]
        assert own == [{**each, "task": task["name"]} for each in alone["trials"]]
        (told,) = [each for each in study["tasks"] if each["name"] == task["name"]]
        assert told["best"] == alone["best"]
        path = Path("adapter") / "adapter_model.safetensors"
        ours = done / "winner" / task["name"] / path
        assert ours.read_bytes() == (output / "winner" / path).read_bytes()


def same_end(output: Path, other: Path) -> None:
    """Trials, decisions, winners and their bits."""
    ours, theirs = (json.loads((each / "study.json").read_text()) for each in (output, other))
    assert ours["trials"] == theirs["trials"]
    for one, two in zip(ours["tasks"], theirs["tasks"], strict=True):
        assert one["best"] == two["best"]
        path = Path("winner") / one["name"] / "adapter" / "adapter_model.safetensors"
        assert (output / path).read_bytes() == (other / path).read_bytes()
        name = one["best"]["name"]
        assert curves(output, name) == curves(other, name)


def told_once(output: Path) -> None:
    """No trial is made twice, evaluated twice at a step, or given up twice."""
    turns = turns_of(output)
    assert {turn.task for turn in turns} == {"one", "two"}
    added = [plan.name for t in turns if isinstance(t.event, Added) for plan in t.event.plans]
    evaluations = [(t.event.trial, t.event.step) for t in turns if isinstance(t.event, Evaluated)]
    exits = [a.trial for turn in turns for a in turn.actions if isinstance(a, Exit)]
    for each in (added, evaluations, exits):
        assert len(each) == len(set(each)) > 0


def test_it_says_who_goes_where_and_shows_it(file, done, tmp_path):
    """The plan before it begins; the report has a bar for each task, and each task a report."""
    view = lines()
    run(file, tmp_path / "run", view)
    assert isinstance(view.out, io.StringIO)
    said = view.out.getvalue()
    assert "plan for 2 devices" in said and "predicted: all done in" in said
    assert "one: device" in said and "4 trials, about 2 to the end" in said
    page = (done / "report.html").read_text()
    assert "Who trained where" in page and "makespan" in page
    assert "one on device" in page and "two on device" in page
    own = (done / "winner" / "two" / "report.html").read_text()
    assert "two-03" in own and "one-03" not in own


def test_kill_and_restart_loses_nothing(file, done, tmp_path):
    """The leading process killed with SIGKILL in the warm-up and later: no trial lost, none run
    twice, the same winners bit for bit."""
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(dict(file)))
    root = tmp_path / "run"
    for turns in (4, 9):
        leader = subprocess.Popen(
            [sys.executable, RUNNER, tmp_path / "sweep.yaml", root],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert leader.stdout is not None
        for line in leader.stdout:
            turns -= line.startswith("turn evaluated")
            if turns == 0:
                break
        leader.kill()
        leader.wait()
        # The pipe of its output closes when the last process that holds it is gone.
        leader.stdout.read()
        assert not json.loads((root / "study.json").read_text())["over"]
    found = run(file, root)
    assert not found.interrupted
    same_end(root, done)
    told_once(root)


class Killing(View):
    """Ends a worker when so many evaluations have been told."""

    def __init__(self, workers: list[WorkerProcesses], after: int) -> None:
        super().__init__(io.StringIO())
        self.workers, self.left = workers, after

    def on_turn(self, state, event, actions) -> None:
        super().on_turn(state, event, actions)
        self.left -= isinstance(event, Evaluated)
        if self.left == 0:
            self.left = -1
            os.kill(self.workers[0].pid(1), signal.SIGKILL)


def test_a_worker_that_dies_costs_nothing_but_time(file, done, tmp_path, monkeypatch):
    """Its trials go on from their checkpoints, there or elsewhere, to the same bits."""
    workers: list[WorkerProcesses] = []

    class Known(WorkerProcesses):
        def __init__(self, *args, **options) -> None:
            super().__init__(*args, **options)
            workers.append(self)

    monkeypatch.setattr("tlora.runtime.sweeps.tasks.WorkerProcesses", Known)
    view = Killing(workers, after=5)
    run(file, tmp_path / "run", view)
    assert isinstance(view.out, io.StringIO) and "device 1 was lost" in view.out.getvalue()
    same_end(tmp_path / "run", done)
    told_once(tmp_path / "run")


class Asking(View):
    """Somebody at another terminal, after the first evaluation."""

    def __init__(self, output: Path) -> None:
        super().__init__(io.StringIO())
        self.output, self.asked = output, False

    def on_turn(self, state, event, actions) -> None:
        super().on_turn(state, event, actions)
        if isinstance(event, Evaluated) and not self.asked:
            self.asked = True
            log = StudyLog(self.output / "state.sqlite")
            log.request("stop", "one-00", {})
            log.request("clone", "two-01", {"train.learning_rate": 2e-3})
            log.request("stop", "three-00", {})
            log.close()


def test_people_can_stop_and_clone_trials_of_any_task(file, tmp_path):
    """While it runs, through the store; what cannot be done is answered."""
    view = Asking(tmp_path / "run")
    run(file, tmp_path / "run", view)
    study = json.loads((tmp_path / "run" / "study.json").read_text())
    found = {each["name"]: each for each in study["trials"]}
    assert found["one-00"]["rule"] == "person"
    assert found["two-01.1"]["status"] == "completed" and found["two-01.1"]["task"] == "two"
    assert isinstance(view.out, io.StringIO)
    assert "there is no trial 'three-00'" in view.out.getvalue()


def test_other_tasks_or_too_many_devices_are_refused_by_name(file, done):
    """In one message, and nothing is changed."""
    with pytest.raises(SpecError) as caught:
        tune_on_devices(load_tasks(file), output=done, devices=9, view=lines())
    assert caught.value.field == "--devices" and "8 trials" in str(caught.value)
    renamed = {**file, "tasks": [{**file["tasks"][0], "name": "uno"}, file["tasks"][1]]}
    with pytest.raises(SpecError) as caught:
        run(renamed, done)
    assert caught.value.field == "tasks" and "one, two" in str(caught.value)
    with pytest.raises(SpecError) as caught:
        run({**file, "early_exit": {"keep": 0.3}}, done)
    assert caught.value.field is not None and caught.value.field.startswith("early_exit")
