"""What workers cost beyond a machine's profile, for fidelity.py: the profile of as many processes
at once, the jobs that are run, a calibration on groups of other jobs through the same workers.

A machine that others share is not as fast in one minute as in the next. So the calibration's
workers stay, and a round of it is run before every real run: what the simulation is told is the
mean of the time in which the real runs were.
"""

import math
import multiprocessing
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tlora.config import dump_spec, load_spec
from tlora.core.assets import DEMO
from tlora.core.cluster import uniform_cluster
from tlora.core.job import RunSpec
from tlora.core.plan import Plan
from tlora.core.request import JobRequest
from tlora.costs.fit import non_negative_least_squares
from tlora.costs.groups import Costs
from tlora.costs.profile import Profile, read_profile, write_profile
from tlora.model.loading import load_shape
from tlora.model.targets import find_targets
from tlora.runtime.checking import prepare_jobs
from tlora.runtime.executors.messages import (
    Attach,
    Attached,
    Detach,
    Detached,
    Ended,
    Lost,
    Message,
    Noted,
    Ready,
)
from tlora.runtime.executors.processes import WorkerProcesses
from tlora.runtime.executors.worker import WorkerSettings
from tlora.runtime.profiling.profiling import run_profile
from tlora.runtime.profiling.settings import Settings as ProfileSettings
from tlora.runtime.requests import requests_of

BASE = str(DEMO / "base")
DATASETS = ("count", "extract", "haiku", "pirate", "polite", "reverse", "sentiment", "sql")
COLUMNS = {"sql": {"prompt": "question", "completion": "query"}}
RANKS = (2, 4, 8, 16)
BATCHES = (1, 2, 4, 8)
WARM_TOKENS = 1024
NEVER = 1_000_000
"""Steps of jobs that are stopped before."""

GROUPS = (
    ([0], 16),
    ([3], 8),
    ([6], 1),
    ([1, 4], 8),
    ([2, 5, 7, 8], 4),
    ([0, 3, 6, 9, 10, 11], 2),
    (list(range(2, 12)), 1),
)
"""Numbers of jobs that are calibrated together, and what part of the profile's budget their
nano-batches have: policies choose small ones for few jobs."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """What workers add to a profile."""

    factor: float
    """On all times of the profile."""

    round_s: float
    """More for every nano-batch."""

    job_s: float
    """More for every job that steps after it."""

    attach_s: float
    end_s: float
    worst_pct: float
    """The largest error of a calibration group's rate with these."""

    @property
    def line(self) -> str:
        pauses = {"attach": self.attach_s, "end": self.end_s}
        return (
            f"workers: x {self.factor:.3f} + {self.round_s * 1e3:.2f} ms a nano-batch + "
            f"{self.job_s * 1e3:.2f} ms a step (worst group {self.worst_pct:+.1f} %), "
            + ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in pauses.items())
        )

    def on(self, profile: Profile) -> Profile:
        times = profile.time
        scaled = {
            name: getattr(times, name) * self.factor
            for name in ("fixed_s", "segment_s", "flat_s", "row_s", "square_s", "lora_s", "rank_s")
        }
        scaled["fixed_s"] += self.round_s
        steps = profile.steps
        return replace(
            profile,
            time=replace(times, **scaled),
            steps=replace(
                steps,
                pass_s=steps.pass_s * self.factor,
                job_s=steps.job_s * self.factor + self.job_s,
                parameter_s=steps.parameter_s * self.factor,
            ),
            # A group's end is the end of its last job, whose adapter is written while its device
            # does nothing else; a start pays for it, for in a simulation an end is free.
            load_s=self.end_s,
            warmup_s=0.0,
            attach_s=self.attach_s,
            detach_s=self.end_s,
        )


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def measure_profile(workers: int, seconds: float, work: Path) -> Profile:
    """Of the first of as many processes as there are workers, all measuring."""
    context = multiprocessing.get_context("spawn")
    say(f"profiling in {workers} processes")
    paths = [work / f"profile-{number}.json" for number in range(workers)]
    processes = [context.Process(target=profile_into, args=(str(p), seconds)) for p in paths]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return read_profile(paths[0])


def profile_into(path: str, seconds: float) -> None:
    settings = ProfileSettings(
        output=Path(path), shape="demo", seconds=seconds, threads=1, device="cpu"
    )
    command = shlex.join(["python", *sys.argv])
    write_profile(run_profile(settings, command, lambda text: None), Path(path))


def new_spec(jobs: Sequence[dict[str, Any]], *, warm: int = 0) -> RunSpec:
    """With as many jobs more as workers are to be warmed."""
    more = [new_job(f"warm-{i}", i, rank=8, batch=8, steps=10) for i in range(warm)]
    return load_spec({"base": {"model": BASE}, "engine": {"device": "cpu"}, "jobs": [*jobs, *more]})


def new_job(name: str, number: int, *, rank: int, batch: int, steps: int) -> dict[str, Any]:
    dataset = DATASETS[number % len(DATASETS)]
    data: dict[str, Any] = {"path": str(DEMO / "data" / f"{dataset}.jsonl")}
    if dataset in COLUMNS:
        data["columns"] = COLUMNS[dataset]
    return {
        "name": name,
        "data": data,
        "lora": {"r": rank, "lora_alpha": 16},
        "train": {
            "batch_size": batch,
            "max_steps": steps,
            "learning_rate": 1e-3,
            "max_length": 128,
            "logging_steps": 20,
            "seed": number,
        },
        "save": {"steps": None},
    }


def requests_for(spec: RunSpec) -> list[JobRequest]:
    targets = find_targets(load_shape(spec.base))
    return requests_of(spec, prepare_jobs(spec, limit=None), targets, base=BASE)


def run_directory(spec: RunSpec, root: Path) -> Path:
    root.mkdir(parents=True)
    (root / "resolved.yaml").write_text(dump_spec(spec))
    return root


def ready_workers(root: Path, count: int) -> WorkerProcesses:
    """Base loaded and warm, nothing attached: what a process does once in its life is no matter of
    scheduling."""
    workers = WorkerProcesses([WorkerSettings(root, "cpu")] * count)

    def wait_for(kind: type[Message]) -> None:
        waited = set(range(count))
        while waited:
            for device, message in workers.receive(60.0):
                assert not isinstance(message, Lost), message
                if isinstance(message, kind):
                    waited.discard(device)

    wait_for(Ready)
    for device in range(count):
        workers.send(device, Attach(f"warm-{device}", 1.0, WARM_TOKENS))
    wait_for(Ended)
    return workers


class Calibration:
    """Groups of one to ten jobs, the same on all workers at once, over and over."""

    def __init__(self, workers: int, bucket: int, seconds: float, work: Path) -> None:
        """Each group trains for so many seconds in a round."""
        jobs = [
            new_job(
                f"c{device}-{number}",
                number + 3,
                rank=RANKS[number % 4],
                batch=BATCHES[(number // 2) % 4],
                steps=NEVER,
            )
            for device in range(workers)
            for number in range(12)
        ]
        ends = [
            new_job(f"e{device}-{number}", number, rank=8, batch=2, steps=4)
            for device in range(workers)
            for number in range(4)
        ]
        spec = new_spec([*jobs, *ends], warm=workers)
        self._requests = {request.name: request for request in requests_for(spec)}
        self._count, self._bucket, self._seconds = workers, bucket, seconds
        self._workers = ready_workers(run_directory(spec, work / "calibration"), workers)
        self._generator = np.random.Generator(np.random.PCG64(1))
        self._seen: list[dict[tuple[int, int], float]] = []
        """Round by round, seconds per token of each group on each worker."""

        self._attaches: list[float] = []
        self._ended = endings(self._workers, workers, bucket)

    def run_round(self) -> float:
        """Every group once, in an order of its own. How much slower all were than in the first
        round, in percent."""
        found: dict[tuple[int, int], float] = {}
        for place in self._generator.permutation(len(GROUPS)).tolist():
            names = [
                [f"c{device}-{number}" for number in GROUPS[place][0]]
                for device in range(self._count)
            ]
            bucket = self._bucket // GROUPS[place][1]
            heard = conversation(self._workers, names, bucket, self._seconds)
            self._attaches += [each.seconds for _, _, each in heard if isinstance(each, Attached)]
            for device in range(self._count):
                found[place, device] = 1 / tokens_per_s(heard, device)
        self._seen.append(found)
        return (statistics.mean(found[key] / self._seen[0][key] for key in found) - 1) * 100

    def overheads(self, profile: Profile) -> Overheads:
        """Over all rounds so far. Means, for real runs are slowed by whatever slows a machine."""
        costs = Costs({BASE: profile}, uniform_cluster(self._count))
        keys = list(self._seen[0])
        rows: list[tuple[float, ...]] = []
        for place, device in keys:
            numbers, part = GROUPS[place]
            together = [self._requests[f"c{device}-{number}"] for number in numbers]
            weights = [1.0] * len(together)
            tier = costs.cluster.tier([device])
            found = costs.predict(together, weights, Plan(bucket=self._bucket // part), tier)
            rounds = 1 / sum(found.tokens)
            rows.append(
                (found.round_s * rounds, rounds, sum(found.steps_per_s) / found.tokens_per_s)
            )
        measured = np.array([statistics.mean(seen[key] for seen in self._seen) for key in keys])
        features = np.array(rows)
        # Relative errors, so that small groups count as much as large ones.
        fitted = non_negative_least_squares(features / measured[:, None], np.ones(len(measured)))
        errors = (features @ fitted / measured - 1) * 100
        return Overheads(
            factor=float(fitted[0]),
            round_s=float(fitted[1]),
            job_s=float(fitted[2]),
            attach_s=statistics.median(self._attaches),
            end_s=statistics.median(self._ended),
            worst_pct=float(max(errors, key=abs)),
        )

    def close(self) -> None:
        self._workers.close()


Heard = list[tuple[float, int, Message]]


def conversation(
    devices: WorkerProcesses, names: list[list[str]], bucket: int, seconds: float
) -> Heard:
    """Attach, train for so long, detach; all that was said, and when it was heard."""
    heard: Heard = []

    def listen(count: int, kind: type[Message], until: float = math.inf) -> None:
        while count and time.monotonic() < until:
            for device, message in devices.receive(0.2):
                heard.append((time.monotonic(), device, message))
                count -= isinstance(message, kind)

    total = sum(len(each) for each in names)
    for device, each in enumerate(names):
        for name in each:
            devices.send(device, Attach(name, 1.0, bucket))
    listen(total, Attached)
    listen(-1, Ready, time.monotonic() + seconds)
    for device, each in enumerate(names):
        for name in each:
            devices.send(device, Detach(name))
    listen(total, Detached)
    return heard


def tokens_per_s(heard: Heard, device: int) -> float:
    """Of a worker while all of its jobs were there, with everything around nano-batches."""
    said = [message for _, where, message in heard if where == device]
    attached = max(i for i, each in enumerate(said) if isinstance(each, Attached))
    gone = min(i for i, each in enumerate(said) if isinstance(each, Detached))
    batches = [
        each
        for each in said[attached:gone]
        if isinstance(each, Noted) and each.what == "nano_batch"
    ]
    # The first ones warm up.
    batches = batches[len(batches) // 10 :]
    tokens = sum(sum(each.fields["tokens"].values()) for each in batches[1:])
    return tokens / (batches[-1].time - batches[0].time)


def endings(devices: WorkerProcesses, workers: int, bucket: int) -> list[float]:
    """Seconds between a job's last nano-batch and what is said of its end."""
    found: list[float] = []
    for number in range(4):
        for device in range(workers):
            devices.send(device, Attach(f"e{device}-{number}", 1.0, bucket))
        last: dict[int, float] = {}
        over = 0
        while over < workers:
            for device, message in devices.receive(0.2):
                if isinstance(message, Noted) and message.what == "nano_batch":
                    last[device] = message.time
                elif isinstance(message, Noted) and message.what == "ended":
                    found.append(message.time - last[device])
                over += isinstance(message, Ended)
    return found
