"""Several tasks over worker processes: as on one device, whatever happens to the workers."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from support.kills import adapter_bytes, curves
from support.task_faults import EVALUATED, slow_to_tell
from support.tasks import lines, run, said, same_end, told_once, turns_of

import tlora
from tlora.config import load_tasks
from tlora.core.errors import SpecError
from tlora.runtime.executors.processes import WorkerProcesses
from tlora.runtime.sweeps.tasks import tune_on_devices
from tlora.runtime.sweeps.view import View
from tlora.tuning.events import Evaluated

pytestmark = pytest.mark.multi_process

RUNNER = Path(__file__).parents[2] / "support" / "tasks_runner.py"


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


def test_it_says_who_goes_where_and_shows_it(file, done, tmp_path):
    """The plan before it begins; the report has a bar for each task, and each task a report."""
    view = lines()
    run(file, tmp_path / "run", view)
    told = said(view)
    assert "plan for 2 devices" in told and "predicted: all done in" in told
    assert "one: device" in told and "4 trials, about 2 to the end" in told
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
            [sys.executable, RUNNER, tmp_path / "sweep.yaml", root, str(turns + 2)],
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
    assert {turn.task for turn in turns_of(root)} == {"one", "two"}


def test_a_leader_killed_before_it_hears_of_an_evaluation_loses_nothing(file, done, tmp_path):
    """Workers that have evaluated trials find nobody to tell it: they end and save nothing, and the
    trials are evaluated again."""
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(dict(file)))
    root = tmp_path / "run"
    command = [sys.executable, RUNNER, tmp_path / "sweep.yaml", root, "1", slow_to_tell.__name__]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    while not (root / EVALUATED).exists():
        assert leader.poll() is None
        time.sleep(0.01)
    leader.kill()
    leader.communicate()
    assert not any(isinstance(turn.event, Evaluated) for turn in turns_of(root))
    assert not list(root.glob("*/checkpoints/step-*"))
    run(file, root)
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
    assert "device 1 was lost" in said(view)
    same_end(tmp_path / "run", done)
    told_once(tmp_path / "run")


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
