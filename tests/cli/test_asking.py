"""`tlora submit`, `cancel`, `resume` and `status` of a run, as they are typed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from support.kills import curves
from support.models import save_base
from support.runs import job_file, write_rows
from support.waiting import PATIENCE_S

STEPS = 10_000_000
"""More than a run makes while it is asked for things, however long that takes."""


def write(name: str, base: Path, **steps: int) -> None:
    jobs = [
        {
            "name": job,
            "data": {"path": "rows.jsonl"},
            "train": {"max_steps": each},
            "save": {"steps": 5},
        }
        for job, each in steps.items()
    ]
    # To the bit the same in any company, wherever it joins.
    engine = {"device": "cpu", "isolation": "exact", "nano_batch_tokens": 64}
    Path(name).write_text(yaml.safe_dump(job_file(base, *jobs, engine=engine)))


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tlora.cli.asking.PATIENCE_S", PATIENCE_S)
    write_rows(Path("rows.jsonl"), 12)
    return save_base(tmp_path / "base")


def wait_for(path: Path, process: subprocess.Popen) -> None:
    until = time.monotonic() + 300
    while not path.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    assert path.exists()


def test_a_run_is_asked_killed_and_gone_on_with(base, tlora_command, capsys):
    """From another process, with SIGKILL: what was submitted is there, as if it had been in the
    file, and ends as alone."""
    write("jobs.yaml", base, long=STEPS)
    write("more.yaml", base, long=STEPS, late=8)
    more = yaml.safe_load(Path("more.yaml").read_text())
    # It means that of the run.
    del more["base"]
    Path("more.yaml").write_text(yaml.safe_dump(more))
    command = [sys.executable, "-m", "tlora", "train", "jobs.yaml"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as run:
        try:
            wait_for(Path("runs/jobs/long/metrics.jsonl"), run)
            assert tlora_command("submit", "more.yaml", "--run", "runs/jobs") == 0
            assert "runs/jobs: at work: long, late" in capsys.readouterr().out
            assert tlora_command("status", "--run", "runs/jobs") == 0
            said = capsys.readouterr().out
            assert re.search(rf"^long +training +\d+/{STEPS} +\d", said, re.M) and "at work" in said
            assert tlora_command("cancel", "long", "--run", "runs/jobs") == 0
            assert re.search(r"long: cancelled after \d+ steps", capsys.readouterr().out)
        finally:
            os.kill(run.pid, signal.SIGKILL)
    assert tlora_command("submit", "more.yaml", "--run", "runs/jobs") == 2
    said = " ".join(capsys.readouterr().err.split())
    again = "tlora train runs/jobs/resolved.yaml --output runs/jobs"
    # What was submitted may be over by now.
    assert "nobody is at work in runs/jobs" in said
    assert tlora_command("train", "jobs.yaml") == 0
    assert tlora_command("status", "--run", "runs/jobs") == 0
    said = capsys.readouterr().out
    assert re.search(r"^long +cancelled", said, re.M) and re.search(r"^late +completed", said, re.M)
    write("late.yaml", base, late=8)
    assert tlora_command("train", "late.yaml") == 0
    found, alone = (curves(Path(root), "late") for root in ("runs/jobs", "runs/late"))
    assert found == alone
    capsys.readouterr()
    assert tlora_command("resume", "long", "--run", "runs/jobs") == 0
    assert f"noted: nobody is at work, and it is done when the run goes on: {again}" in " ".join(
        capsys.readouterr().out.split()
    )


def test_what_cannot_be_asked_of_a_run_is_one_message_and_exit_code_2(base, tlora_command, capsys):
    """No run there, no such job, a job with other settings, a sweep's verb, a wrong file."""
    write("jobs.yaml", base, a=2)
    assert tlora_command("train", "jobs.yaml") == 0
    write("other.yaml", base, a=3)
    Path("baseless.yaml").write_text("jobs: [{name: a, data: rows.jsonl}]")
    capsys.readouterr()
    for words, said in (
        (("submit", "jobs.yaml", "--run", "nowhere"), "nowhere is not there"),
        (("submit", "other.yaml"), "runs/other is not there"),
        (("submit", "baseless.yaml"), "runs/baseless is not there"),
        (("submit", "other.yaml", "--run", "runs/jobs"), "job 'a': train.max_steps: differs from"),
        (("resume", "a", "--run", "runs/jobs"), "a is over: completed"),
        (("cancel", "a", "--run", "runs/jobs"), "a is over: completed"),
        (("submit", "jobs.yaml"), "nobody is at work in runs/jobs"),
        (("submit", "jobs.yaml", "-o", "base.dtype=bfloat16"), "base.dtype: is bfloat16"),
        (("submit", "jobs.yaml", "-o", "train.max_step=3"), "max_step"),
        (("cancel", "b", "--run", "runs/jobs"), "runs/jobs has no job 'b'; there are a"),
        (("resume", "b", "--run", "runs/jobs"), "runs/jobs has no job 'b'"),
        (("clone", "a", "--run", "runs/jobs", "-o", "lr=1e-3"), "runs/jobs is not a sweep"),
        (("status", "--run", "runs"), "did you mean runs/jobs?"),
    ):
        assert tlora_command(*words) == 2, words
        found = " ".join(capsys.readouterr().err.split())
        assert said in found and "Traceback" not in found, (words, found)
