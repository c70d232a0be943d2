"""`tlora train --devices`: over processes, as on one device."""

import json
import os
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
import torch
from markupsafe import escape
from safetensors.torch import load_file
from support import task_faults
from support.runs import job_file, write_rows

from tlora.config import dump_spec, load_spec
from tlora.control import Turn
from tlora.control.protocols import turn_of_json
from tlora.control.replay import replay
from tlora.core.cluster import uniform_cluster
from tlora.core.job import RunSpec
from tlora.core.state import State
from tlora.costs.groups import Costs
from tlora.runtime.checking import prepare_jobs
from tlora.runtime.directory import RunDirectory
from tlora.runtime.executors import processes
from tlora.runtime.executors.messages import Lost, Noted, Ready
from tlora.runtime.planning import choose_profile
from tlora.runtime.progress import ProgressLines
from tlora.runtime.run_log import read_run
from tlora.runtime.scheduled import SETTINGS, Lead, train_on_devices
from tlora.runtime.training import train
from tlora.schedule import make_policy
from tlora.store.sqlite import SqliteStore

pytestmark = pytest.mark.multi_process

LEAD_RUNNER = Path(__file__).parents[1] / "support" / "lead_runner.py"


@pytest.fixture(scope="module")
def spec(base: Path, tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    data = tmp_path_factory.mktemp("data")
    rows = [str(write_rows(data / f"{n}.jsonl", 16, seed=n)) for n in range(4)]
    jobs = [
        {"name": "a", "data": {"path": rows[0]}, "eval": {"split": 4, "steps": 4}},
        {"name": "b", "data": {"path": rows[1]}, "lora": {"r": 4}, "train": {"batch_size": 1}},
        {"name": "c", "data": {"path": rows[2]}, "train": {"batch_size": 8, "seed": 3}},
        # Its updates are too large for float32.
        {"name": "wild", "data": {"path": rows[3]}, "train": {"learning_rate": 1e38}},
    ]
    return load_spec(job_file(base, *jobs))


@pytest.fixture(scope="module")
def alone(spec: RunSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("alone")
    train(spec, output=output, progress=ProgressLines(StringIO()))
    return output


def assert_same_results(spec: RunSpec, root: Path, alone: Path, *, tolerance: float = 1e-3) -> None:
    """Sums over other nano-batches differ by rounding, which Adam's first steps magnify where a
    gradient is nearly zero: 2e-5 of the largest weight was seen."""
    for job in spec.jobs:
        ours, theirs = (
            json.loads((each / job.name / "result.json").read_text()) for each in (root, alone)
        )
        for name in ("status", "steps", "tokens_seen", "best_step", "adapter", "best_adapter"):
            assert ours[name] == theirs[name], (job.name, name)
        files = sorted(path.name for path in (alone / job.name).iterdir())
        assert sorted(path.name for path in (root / job.name).iterdir()) == files
        if ours["adapter"] is None:
            continue
        weights = "adapter/adapter_model.safetensors"
        trained = load_file(root / job.name / weights)
        for key, expected in load_file(alone / job.name / weights).items():
            error = (trained[key] - expected).abs().max() / expected.abs().max()
            assert error <= tolerance, (job.name, key)


def test_a_run_begins_before_its_first_job_joins(spec: RunSpec, tmp_path: Path) -> None:
    """Even where the worker took the job in before it was heard to be ready."""
    early = time.time() - 1.0
    lead = Lead(
        spec, prepare_jobs(spec, limit=None), RunDirectory(tmp_path), ProgressLines(StringIO())
    )
    lead.begin(64)
    lead.hear(0, Ready(1.0))
    for job in ("a", "b"):
        lead.hear(0, Noted("attached", early, {"job": job}))
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    began, *joined = (json.loads(line) for line in lines)
    assert [began["kind"], *(line["job"] for line in joined)] == ["began", "a", "b"]
    assert all(line["time"] >= began["time"] > early for line in joined)


def test_a_lost_device_is_said_and_on_record_with_its_cause(spec: RunSpec, tmp_path: Path) -> None:
    seen = StringIO()
    lead = Lead(spec, prepare_jobs(spec, limit=None), RunDirectory(tmp_path), ProgressLines(seen))
    lead.begin(64)
    lead.hear(1, Lost("its process was ended by SIGKILL"))
    assert "device 1 was lost: its process was ended by SIGKILL; its jobs go on" in seen.getvalue()
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert (event["kind"], event["device"]) == ("device_lost", 1)
    assert event["cause"] == "its process was ended by SIGKILL"


def test_two_devices_leave_what_one_leaves(
    spec: RunSpec, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, results and adapters of every job; one that fails, fails alone. The store's turns
    replay, the report can be made, and what happened says on which device."""
    seen = StringIO()
    root = tmp_path / "run"
    hear, loaded = Lead.hear, []

    def noted(self, device, message) -> None:
        if isinstance(message, Ready):
            loaded.append(time.time())
        hear(self, device, message)

    monkeypatch.setattr(Lead, "hear", noted)
    result = train_on_devices(spec, output=root, devices=2, progress=ProgressLines(seen))
    assert result.failed == ["wild"]
    assert not result.interrupted
    assert_same_results(spec, root, alone)
    said = seen.getvalue()
    assert "2 devices, policy tlora" in said
    assert "wild: failed" in said
    log = read_run(root)
    assert len(log.sessions.wall) == 1
    assert {job for batch in log.nano_batches for job in batch.tokens} == {"a", "b", "c", "wild"}
    events = [json.loads(line) for line in (root / "events.jsonl").read_text().splitlines()]
    assert {event["device"] for event in events if event["kind"] == "nano_batch"} == {0, 1}
    assert {each.device for each in log.attendance} == {0, 1}
    report = (root / "report.html").read_text()
    assert "Who trained where" in report
    assert log.placed and all(each.at < log.seconds for each in log.placed)
    assert str(escape(log.placed[0].sentence)) in report
    # Workers load the base before the run's time begins.
    first = min(event["time"] for event in events if event["kind"] == "joined")
    (began,) = [event["time"] for event in events if event["kind"] == "began"]
    assert loaded[0] <= began <= first

    store: SqliteStore[Turn] = SqliteStore(root / "state.sqlite", decode=turn_of_json)
    assert {row.name: row.status for row in store.jobs()} == {
        "a": "completed",
        "b": "completed",
        "c": "completed",
        "wild": "failed",
    }
    cluster = uniform_cluster(2, per_node=2)
    profile = choose_profile(spec, None, torch.device("cpu")).profile
    policy = make_policy("tlora", Costs({spec.base.model: profile}, cluster), SETTINGS)
    assert replay(store.turns(), state=State(cluster), policy=policy) is None
    again = train_on_devices(spec, output=root, devices=2, progress=ProgressLines(StringIO()))
    assert set(again.jobs) == {"a", "b", "c", "wild"}


class Impatient(ProgressLines):
    """Presses Ctrl-C after so many steps."""

    def __init__(self, steps: int) -> None:
        super().__init__(StringIO())
        self.left = steps

    def on_step(self, driver, done) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_run_goes_on_with_the_same_command(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it stopped, on another number of devices; no step is logged twice."""
    rows = str(write_rows(tmp_path / "rows.jsonl", 16))
    jobs = [
        {"name": name, "data": {"path": rows}, "train": {"max_steps": 150, "seed": seed}}
        for seed, name in enumerate("ab")
    ]
    # With exact isolation, so that even the bits are those of a run that was never stopped.
    engine = {"device": "cpu", "isolation": "exact", "nano_batch_tokens": 128}
    spec = load_spec(job_file(base, *jobs, engine=engine))
    train(spec, output=tmp_path / "alone", progress=ProgressLines(StringIO()))
    root = tmp_path / "run"
    with monkeypatch.context() as patch:
        # They are not through before they hear of it.
        patch.setattr(processes, "serve", task_faults.waits_for_words)
        first = train_on_devices(spec, output=root, devices=2, progress=Impatient(10))
    assert first.interrupted
    assert not (root / "a" / "result.json").exists()
    seen = StringIO()
    second = train_on_devices(spec, output=root, devices=3, progress=ProgressLines(seen))
    assert not second.interrupted and not second.failed
    assert "goes on after step" in seen.getvalue()
    assert_same_results(spec, root, tmp_path / "alone", tolerance=0.0)
    steps = [json.loads(line)["step"] for line in (root / "a" / "metrics.jsonl").open()]
    assert steps == list(range(1, 151))


def test_workers_end_with_a_leader_that_is_killed(base: Path, tmp_path: Path) -> None:
    """With SIGKILL; the store has whole turns, and the same command gives the bits of a run that
    was never killed."""
    rows = str(write_rows(tmp_path / "rows.jsonl", 16))
    jobs = [
        {"name": name, "data": {"path": rows}, "train": {"max_steps": 150, "seed": seed}}
        for seed, name in enumerate("ab")
    ]
    engine = {"device": "cpu", "isolation": "exact", "nano_batch_tokens": 128}
    spec = load_spec(job_file(base, *jobs, engine=engine), ["save.steps=10"])
    train(spec, output=tmp_path / "alone", progress=ProgressLines(StringIO()))
    file, root = tmp_path / "jobs.yaml", tmp_path / "run"
    file.write_text(dump_spec(spec))
    leader = subprocess.Popen(
        [sys.executable, str(LEAD_RUNNER), str(file), str(root), "60"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert leader.stdout is not None
    assert any(line.startswith("step") and line.endswith(" 30\n") for line in leader.stdout)
    leader.kill()
    leader.wait()
    # The pipe of its output closes when the last process that holds it is gone.
    leader.stdout.read()
    store: SqliteStore[Turn] = SqliteStore(root / "state.sqlite", decode=turn_of_json)
    assert {row.status for row in store.jobs()} == {"running"}
    store.close()
    again = train_on_devices(spec, output=root, devices=2, progress=ProgressLines(StringIO()))
    assert not again.failed
    assert_same_results(spec, root, tmp_path / "alone", tolerance=0.0)
