"""Jobs join and leave a group of ranks, or workers on several devices, and everybody trains as
alone."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support import group_faults, task_faults
from support.asking import Asking, answers, put, submission
from support.kills import curves, same_end
from support.runs import job_file

import tlora
from tlora.core.job import RunSpec
from tlora.core.plan import Plan
from tlora.runtime.elastic import desk
from tlora.runtime.executors import processes
from tlora.runtime.group import supervisor
from tlora.runtime.group.running import train_in_group
from tlora.runtime.group.supervisor import Ranks
from tlora.runtime.scheduled import train_on_devices
from tlora.runtime.training import RunResult

pytestmark = pytest.mark.multi_process

STEPS = {"plain": 60, "wide": 150, "late": 90}
"""Enough for a request to come through while others still train, where ranks and workers take their
time until it has (support.group_faults, support.task_faults)."""

ROUNDING = 1e-4
"""Of losses after so many steps, where sums have another order: 1.6e-7 was the most between eight
sizes of nano-batches."""


@pytest.fixture(scope="module")
def spec(base: Path, rows: Path) -> RunSpec:
    data = {"path": str(rows)}
    jobs = [
        {"name": "plain", "data": data, "lora": {"lora_dropout": 0.2}},
        {"name": "wide", "data": data, "lora": {"r": 4}},
        {"name": "late", "data": data, "train": {"seed": 3}},
    ]
    engine = {"device": "cpu", "isolation": "exact", "nano_batch_tokens": 128}
    settings = [f"jobs.{job}.train.max_steps={steps}" for job, steps in STEPS.items()]
    settings += ["train.learning_rate=1e-3", "save.steps=20"]
    return tlora.load_spec(job_file(base, *jobs, engine=engine), settings)


@pytest.fixture(scope="module")
def together(spec: RunSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same jobs on one device, none of them disturbed."""
    output = tmp_path_factory.mktemp("together") / "run"
    assert not tlora.train(spec, output=output).failed
    return output


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests in a row may take longer than a job that has a device to itself."""
    monkeypatch.setattr(desk, "LOOK_EVERY_S", 0.1)


def first(spec: RunSpec) -> RunSpec:
    return replace(spec, jobs=spec.jobs[:2])


def loose(spec: RunSpec) -> RunSpec:
    """Not to the bit: nothing has to be shown before."""
    return replace(spec, engine=replace(spec.engine, isolation="default"))


class Person(Asking):
    """Submits `late`, cancels `wide` when that trains, and does something once `wide` has left."""

    def __init__(self, root: Path, spec: RunSpec, then: Callable[[], object] = lambda: None):
        late = submission(replace(spec, jobs=spec.jobs[2:]))
        submit, cancel = ("submit", "", late), ("cancel", "wide", {})
        super().__init__(root, {("plain", 3): [submit], ("late", 3): [cancel]})
        self.then: Callable[[], object] | None = then

    def on_end(self, result) -> None:
        super().on_end(result)
        if result.job == "wide" and self.then is not None:
            then, self.then = self.then, None
            assert result.status == "cancelled"
            then()


def statuses(result: RunResult) -> dict[str, str]:
    return {name: job.status for name, job in result.jobs.items()}


def same_losses(output: Path, together: Path, job: str, steps: int) -> None:
    """Up to where it came, to rounding."""
    ours = [each[3] for each in curves(output, job)]
    theirs = [each[3] for each in curves(together, job)]
    assert len(ours) == steps <= len(theirs)
    assert ours == pytest.approx(theirs[:steps], rel=ROUNDING), job


def events(root: Path) -> list[dict]:
    """About jobs."""
    lines = map(json.loads, (root / "events.jsonl").read_text().splitlines())
    return [each for each in lines if "job" in each]


def test_jobs_come_and_go_in_a_group_that_loses_a_rank(
    spec: RunSpec, together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is submitted, one cancelled, then a rank is killed with SIGKILL: those that are left have
    the bits of an undisturbed run on one device, and the one that left is as it was there."""
    monkeypatch.setattr(supervisor, "serve", group_faults.unhurried_to_the_end)
    ranks: list[Ranks] = []
    view = Person(tmp_path, spec, lambda: os.kill(ranks[0].pids[0], signal.SIGKILL))
    plan = Plan(bucket=128, replicas=2, adapters="rank_local")
    result = train_in_group(
        first(spec), output=tmp_path, plan=plan, progress=view, on_start=ranks.append
    )
    assert len(ranks) == 2
    assert statuses(result) == {"plain": "completed", "wide": "cancelled", "late": "completed"}
    left = result.jobs["wide"]
    assert answers(tmp_path) == [
        "at work: late",
        f"cancelled after {left.steps} steps; its adapter is kept",
    ]
    for job in ("plain", "late"):
        assert same_end(tmp_path, together, job), job
    assert 0 < left.steps < STEPS["wide"] and left.adapter is not None
    assert curves(tmp_path, "wide") == curves(together, "wide")[: left.steps]
    joined = [
        each for each in events(tmp_path) if (each["kind"], each["job"]) == ("joined", "late")
    ]
    assert joined and all(each["paused_ms"] > 0 for each in joined)


def test_jobs_that_span_ranks_come_and_go_on_all_of_them_at_once(
    spec: RunSpec, together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In shards: one joins both ranks, one leaves both, and every curve is that of one device."""
    monkeypatch.setattr(supervisor, "serve", group_faults.unhurried)
    plan = Plan(bucket=128, fsdp=2, adapters="data_parallel")
    spec = loose(spec)
    view = Person(tmp_path, spec)
    result = train_in_group(first(spec), output=tmp_path, plan=plan, progress=view)
    assert statuses(result) == {"plain": "completed", "wide": "cancelled", "late": "completed"}
    assert result.jobs["wide"].adapter is not None
    for job, each in result.jobs.items():
        same_losses(tmp_path, together, job, each.steps)


def test_jobs_come_and_go_over_devices(
    spec: RunSpec, together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the scheduler: an arrival like any. The one that was cancelled goes on where it left, and
    every curve is that of one device. The same command has nothing left to do."""
    monkeypatch.setattr(processes, "serve", task_faults.waits_to_be_left)
    spec = loose(spec)
    view = Person(tmp_path, spec, lambda: put(tmp_path, ("resume", "wide", {})))
    result = train_on_devices(first(spec), output=tmp_path, devices=2, progress=view)
    assert statuses(result) == dict.fromkeys(STEPS, "completed")
    for job, steps in STEPS.items():
        same_losses(tmp_path, together, job, steps)
    submitted, cancelled, resumed = answers(tmp_path)
    assert submitted == "at work: late"
    assert "cancelled after" in str(cancelled) and "goes on after step" in str(resumed)
    again = train_on_devices(first(spec), output=tmp_path, devices=2, progress=Asking(tmp_path, {}))
    assert statuses(again) == statuses(result)
