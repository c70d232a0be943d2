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
from tlora.runtime.sweeps.tasks import tune_on_devices
from tlora.runtime.sweeps.view import View
from tlora.store.study import StudyLog, StudyTurn
from tlora.tuning.events import Added, Evaluated, Exit
from tlora.tuning.results import TaskStudies

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
    return tune_on_devices(
        load_tasks(file), output=output, devices=2, view=view or lines(), **more
    )


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
