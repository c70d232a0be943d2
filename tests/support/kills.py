"""Runs that are killed and go on (support/kill_runner.py), from a test, and what they leave."""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

RUNNER = Path(__file__).parent / "kill_runner.py"


def carry_out(
    folder: Path, files: dict[str, dict], *, threads: int = 1, **runs: dict[str, object]
) -> dict[str, dict]:
    """Train the job file of each run in `folder / NAME`; the outcomes by name. `runs` has the
    runner's settings of each (kills, seed, nano_batches, leaks)."""
    plan = []
    for name, file in files.items():
        job_file = folder / f"{name}.yaml"
        job_file.write_text(yaml.safe_dump(file))
        plan.append({"job_file": str(job_file), "output": str(folder / name), **runs.get(name, {})})
    (folder / "plan.json").write_text(json.dumps({"threads": threads, "runs": plan}))
    done = subprocess.run(
        [sys.executable, RUNNER, folder / "plan.json"],
        capture_output=True,
        text=True,
        # Two threads that wait for each other busily take turns at a core that others want too.
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
    )
    assert done.returncode == 0, done.stderr
    outcomes = dict(zip(files, json.loads(done.stdout.splitlines()[-1]), strict=True))
    assert not any(outcome["status"] for outcome in outcomes.values()), done.stderr
    return outcomes


def curves(output: Path, job: str) -> list[tuple]:
    """What was logged, without the clock."""
    lines = (output / job / "metrics.jsonl").read_text().splitlines()
    keys = ("kind", "step", "epoch", "loss", "lr", "grad_norm", "tokens_seen", "sequences_seen")
    return [tuple(json.loads(line)[key] for key in keys) for line in lines]


def adapter_bytes(output: Path, job: str, name: str = "adapter") -> bytes:
    return (output / job / name / "adapter_model.safetensors").read_bytes()


def same_end(output: Path, other: Path, job: str) -> bool:
    """The same curves and, to the bit, the same adapter."""
    return curves(output, job) == curves(other, job) and (
        adapter_bytes(output, job) == adapter_bytes(other, job)
    )
