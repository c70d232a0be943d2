"""Trains job files in forked children that are killed with SIGKILL, again and again, until they are
done.

A process of its own: it only imports before it forks, so that no thread of torch is forked with it.

    python kill_runner.py PLAN

PLAN is a JSON file: `{"threads": 1, "runs": [{"job_file", "output", "kills", "seed",
"nano_batches", "saves", "leaks", "sweep"}, ...]}`; with `sweep` the file is a sweep's. A quarter of
the kills come in a life's first half second; the others some milliseconds after as many
nano-batches as the seed says, up to `nano_batches`: counted and not timed, so that a fast machine
is not through before and a slow one gets on. With `saves`, the name of a job, every other life also
reaches a checkpoint more of it, and training waits for the disk in it: a slow one would have the
first when all is over. A thread of the child's own does the killing: on a busy machine it gets on
as the child does, where another process would look too late. What is printed last is a JSON list
with an `Outcome` for each run.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from tlora.config import load_spec, load_sweep
from tlora.core.job import RunSpec
from tlora.core.sweep import SweepSpec
from tlora.runtime import training
from tlora.runtime.sweeps.tune import tune
from tlora.runtime.writing import Order, Writer
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


def let_disk_keep_up() -> None:
    hand_over = Writer.submit

    def submit(self: Writer, order: Order) -> None:
        hand_over(self, order)
        self.flush()

    Writer.submit = submit


def start(
    spec: RunSpec | SweepSpec,
    output: Path,
    *,
    threads: int,
    leaks: bool,
    waits: bool = False,
    until: Callable[[], None] | None = None,
) -> int:
    """A child; when `until` returns, it is killed."""
    child = os.fork()
    if child:
        return child
    handle = os.open(f"{output}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    status = 1
    try:
        torch.set_num_threads(threads)
        if until is not None:
            threading.Thread(target=kill_after, args=[until], daemon=True).start()
        if leaks:
            let_leak()
        if waits:
            let_disk_keep_up()
        if isinstance(spec, SweepSpec):
            status = int(tune(spec, output=output).best is None)
        else:
            status = len(training.train(spec, output=output).failed)
    finally:
        os._exit(status)


def kill_after(until: Callable[[], None]) -> None:
    until()
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and not condition():
        time.sleep(0.002)


def checkpoints_of(output: Path, job: str) -> set[Path]:
    return set((output / job / "checkpoints").glob("step-*"))


def end_of_life(
    generator: random.Random, output: Path, *, nano_batches: int, saves: str | None
) -> Callable[[], None]:
    """Returns when the next life is to end; `saves`: after a checkpoint of this job, others may be
    steps ahead of it."""
    if generator.random() < 0.25:
        early = generator.uniform(0.0, START_SECONDS)
        return lambda: time.sleep(early)
    wanted = generator.randint(0, nano_batches)
    later = generator.uniform(0.0, LATER_SECONDS)
    events = output / "events.jsonl"
    size = events.stat().st_size if events.exists() else 0
    saved = checkpoints_of(output, saves) if saves else set()

    def has_written() -> bool:
        return events.exists() and events.read_bytes()[size:].count(b'"nano_batch"') >= wanted

    def until() -> None:
        wait_for(has_written)
        if saves:
            wait_for(lambda: bool(checkpoints_of(output, saves) - saved))
        time.sleep(later)

    return until


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
    outcome = Outcome()
    started = time.monotonic()

    def live(until: Callable[[], None] | None = None, *, waits: bool = False) -> int:
        leaks = run.get("leaks", False)
        return start(spec, output, threads=threads, leaks=leaks, waits=waits, until=until)

    while outcome.killed < run.get("kills", 0):
        saves = run.get("saves") if outcome.killed % 2 == 0 else None
        until = end_of_life(generator, output, nano_batches=run["nano_batches"], saves=saves)
        _, status = os.waitpid(live(until, waits=saves is not None), 0)
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
