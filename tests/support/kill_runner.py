"""Trains job files in forked children and kills them with SIGKILL, again and again, until they are
done.

A process of its own: it only imports before it forks, so that no thread of torch is forked with it.

    python kill_runner.py PLAN

PLAN is a JSON file: `{"threads": 1, "runs": [{"job_file", "output", "kills", "seed",
"nano_batches", "saves", "leaks", "sweep"}, ...]}`; with `sweep` the file is a sweep's. A quarter of
the kills come in a life's first half second; the others some milliseconds after as many
nano-batches as the seed says, up to `nano_batches`: counted and not timed, so that a fast machine
is not through before and a slow one gets on. With `saves`, the name of a job, every other life also
reaches a checkpoint more of it, however slow the disk is. What is printed last is a JSON list with
an `Outcome` for each run.
"""

import json
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from tlora.config import load_spec, load_sweep
from tlora.core.job import RunSpec
from tlora.core.sweep import SweepSpec
from tlora.runtime import training
from tlora.runtime.sweeps.tune import tune
from tlora.training.exactness import Exactness

PATIENCE_SECONDS = 120.0
START_SECONDS = 0.5
LATER_SECONDS = 0.03


@dataclass
class Outcome:
    status: int = 0
    """Of the last life, as waitpid gives it."""

    killed: int = 0
    seconds: float = 0.0
    found: list[dict[str, str]] = field(default_factory=list)
    """After every kill, what was there of each job: `start`, `step N` or `over`."""

    torn: int = 0
    """Kills that left a half-written checkpoint behind."""


def let_leak() -> None:
    """Break exact isolation, behind the back of the proof: sums are cut by job, attention and head
    by what is there."""

    def unproved(model, spec, data, budget) -> Exactness:
        model.routing.per_sequence = False
        return Exactness(budget, 0, [], 0.0)

    training.show_exact = unproved


def start(spec: RunSpec | SweepSpec, output: Path, *, threads: int, leaks: bool) -> int:
    child = os.fork()
    if child:
        return child
    handle = os.open(f"{output}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    status = 1
    try:
        torch.set_num_threads(threads)
        if leaks:
            let_leak()
        if isinstance(spec, SweepSpec):
            status = int(tune(spec, output=output).best is None)
        else:
            status = len(training.train(spec, output=output).failed)
    finally:
        os._exit(status)


def over(child: int) -> bool:
    """It has exited; its status is left to be collected."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait_for_nano_batches(child: int, events: Path, size: int, wanted: int) -> None:
    """Until this life has written so many beyond the first `size` bytes, or has exited."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and not over(child):
        if events.exists() and events.read_bytes()[size:].count(b'"nano_batch"') >= wanted:
            return
        time.sleep(0.002)


def checkpoints_of(output: Path, job: str) -> set[Path]:
    return set((output / job / "checkpoints").glob("step-*"))


def wait_for_a_checkpoint(child: int, output: Path, job: str, before: set[Path]) -> None:
    """Of this job: others may be steps ahead of it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and not over(child):
        if checkpoints_of(output, job) - before:
            return
        time.sleep(0.002)


def found_of(output: Path, job: str) -> str:
    if (output / job / "result.json").exists():
        return "over"
    steps = sorted(path.name for path in checkpoints_of(output, job))
    return f"step {int(steps[-1].removeprefix('step-'))}" if steps else "start"


def carry_out(run: dict, threads: int) -> Outcome:
    generator = random.Random(run.get("seed", 0))
    output = Path(run["output"])
    spec = load_sweep(run["job_file"]) if run.get("sweep") else load_spec(run["job_file"])
    jobs = [] if isinstance(spec, SweepSpec) else [job.name for job in spec.jobs]
    events = output / "events.jsonl"
    waits_for = run.get("saves")
    outcome = Outcome()
    started = time.monotonic()

    def live() -> int:
        return start(spec, output, threads=threads, leaks=run.get("leaks", False))

    while outcome.killed < run.get("kills", 0):
        size = events.stat().st_size if events.exists() else 0
        saved = checkpoints_of(output, waits_for) if waits_for else set()
        child = live()
        if generator.random() < 0.25:
            time.sleep(generator.uniform(0.0, START_SECONDS))
        else:
            wanted = generator.randint(0, run["nano_batches"])
            wait_for_nano_batches(child, events, size, wanted)
            if waits_for and outcome.killed % 2 == 0:
                wait_for_a_checkpoint(child, output, waits_for, saved)
            time.sleep(generator.uniform(0.0, LATER_SECONDS))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            break
        outcome.killed += 1
        outcome.found.append({job: found_of(output, job) for job in jobs})
        outcome.torn += any(output.glob("*/checkpoints/.step-*"))
    _, outcome.status = os.waitpid(live(), 0)
    outcome.seconds = round(time.monotonic() - started, 1)
    if outcome.status:
        sys.stderr.write(Path(f"{output}.log").read_text()[-3000:])
    return outcome


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    outcomes = [carry_out(run, plan["threads"]) for run in plan["runs"]]
    print(json.dumps([asdict(outcome) for outcome in outcomes]))


if __name__ == "__main__":
    main()
