"""Two tasks over worker processes: a file, a run of it, and what two runs of it must share."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.kills import curves
from support.runs import job_file, write_rows
from tlora.config import load_tasks
from tlora.runtime.sweeps.tasks import tune_on_devices
from tlora.runtime.sweeps.view import View
from tlora.store.study import StudyLog, StudyTurn
from tlora.tuning.events import Added, Evaluated, Exit
from tlora.tuning.results import TaskStudies

STEPS = 16
ADAPTER = Path("adapter") / "adapter_model.safetensors"


def tasks_file(base: Path, folder: Path) -> dict[str, Any]:
    """Two tasks of four trials; exact, so that bits can be compared."""
    file: dict[str, Any] = job_file(base)
    del file["jobs"]
    file["defaults"]["train"] |= {"max_steps": STEPS}
    file["defaults"] |= {"eval": {"split": 4, "steps": 2}, "save": {"steps": 3}}
    file["engine"] = {"device": "cpu", "isolation": "exact", "nano_batch_tokens": 128}
    file["tasks"] = [
        {"name": name, "data": {"path": str(write_rows(folder / f"{name}.jsonl", 20, seed=seed))}}
        for seed, name in enumerate(("one", "two"))
    ]
    file["search"] = {"space": {"lora.r": [2, 4], "train.learning_rate": [1e-4, 1e-2]}}
    # So that the published gap of a tenth does not end every trial of a toy.
    file["early_exit"] = {"warmup": 0.1, "keep": 0.5, "overfitting_gap": 9.0}
    return file


def lines() -> View:
    return View(io.StringIO())


def said(view: View) -> str:
    assert isinstance(view.out, io.StringIO)
    return view.out.getvalue()


def run(
    file: Mapping[str, Any], output: Path, view: View | None = None, *, devices: int = 2, **more
) -> TaskStudies:
    specs = load_tasks(file)
    return tune_on_devices(specs, output=output, devices=devices, view=view or lines(), **more)


def study_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "study.json").read_text())


def turns_of(output: Path) -> list[StudyTurn]:
    log = StudyLog(output / "state.sqlite")
    try:
        return log.turns()
    finally:
        log.close()


def same_end(output: Path, other: Path) -> None:
    """Trials, decisions, winners and their bits."""
    ours, theirs = study_of(output), study_of(other)
    assert ours["trials"] == theirs["trials"]
    for one, two in zip(ours["tasks"], theirs["tasks"], strict=True):
        assert one["best"] == two["best"]
        path = Path("winner") / one["name"] / ADAPTER
        assert (output / path).read_bytes() == (other / path).read_bytes()
        name = one["best"]["name"]
        assert curves(output, name) == curves(other, name)


def told_once(output: Path) -> None:
    """No trial is made twice, evaluated twice at a step, or given up twice."""
    turns = turns_of(output)
    added = [plan.name for t in turns if isinstance(t.event, Added) for plan in t.event.plans]
    evaluations = [(t.event.trial, t.event.step) for t in turns if isinstance(t.event, Evaluated)]
    exits = [a.trial for turn in turns for a in turn.actions if isinstance(a, Exit)]
    for each in (added, evaluations, exits):
        assert len(each) == len(set(each)) > 0
