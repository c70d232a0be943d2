"""A small sweep that really trains, and what is asked of one that was."""

import io
import json
import os
import signal
from pathlib import Path
from typing import Any

from support.kills import curves
from support.runs import job_file
from tlora.runtime.sweeps.view import View
from tlora.store.study import StudyLog

STEPS = 20


def sweep_file(base: Path, rows: Path, *, exact: bool = True, **changes: Any) -> dict[str, Any]:
    """Eight trials of twenty steps, evaluated every second one; two at a time."""
    file = job_file(base)
    del file["jobs"]
    file["defaults"]["train"]["max_steps"] = STEPS
    file["defaults"] |= {"eval": {"split": 4, "steps": 2}, "save": {"steps": 3}}
    file["engine"] = {
        "device": "cpu",
        "isolation": "exact" if exact else "default",
        "nano_batch_tokens": 128,
    }
    file["task"] = {"name": "t", "data": {"path": str(rows)}}
    file["search"] = {
        "space": {
            "lora.r": [2, 4],
            "train.learning_rate": [1e-5, 1e-3, 1e-2, 3e-2],
        },
        "max_parallel": 2,
    }
    # So that the published gap of a tenth does not end every trial of a toy.
    file["early_exit"] = {"warmup": 0.1, "overfitting_gap": 9.0}
    for key, value in changes.items():
        file[key] = {**file.get(key, {}), **value} if isinstance(value, dict) else value
    return file


def lines() -> View:
    return View(io.StringIO())


def said(view: View) -> str:
    assert isinstance(view.out, io.StringIO)
    return view.out.getvalue()


def log_of(output: Path) -> list:
    log = StudyLog(output / "state.sqlite")
    try:
        return log.turns()
    finally:
        log.close()


class StopAfter(View):
    """A person who presses Ctrl-C after some nano-batches."""

    def __init__(self, nano_batches: int) -> None:
        super().__init__(io.StringIO())
        self.left = nano_batches

    def on_nano_batch(self, outcome) -> None:
        super().on_nano_batch(outcome)
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


def same_end(output: Path, other: Path) -> None:
    study, expected = (json.loads((each / "study.json").read_text()) for each in (output, other))
    assert study["best"] == expected["best"] and study["trials"] == expected["trials"]
    name = study["best"]["name"]
    assert curves(output, name) == curves(other, name)
    path = Path("winner") / "adapter" / "adapter_model.safetensors"
    assert (output / path).read_bytes() == (other / path).read_bytes()
