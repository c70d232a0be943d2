"""What is measured for fidelity.py beside the runs that it compares: the profile of as many
processes at once, and groups of other jobs than the compared ones, through the same workers.

A machine that others share is not as fast in one minute as in the next. So the calibration's
workers stay, and a round of it is run before every real run and after the last: a run is simulated
at the speeds that the machine had in the rounds around it.
"""

import math
import multiprocessing
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fidelity_overheads import GroupRate, Overheads, fit_overheads

from tlora.config import dump_spec, load_spec
from tlora.core.assets import DEMO
from tlora.core.job import RunSpec
from tlora.core.request import JobRequest
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
    ([7], 2),
    ([1, 4], 8),
    ([6, 7], 2),
    ([2, 5, 7, 8], 4),
    ([0, 1, 3, 8, 9, 11], 8),
    ([0, 3, 6, 9, 10, 11], 2),
    (list(range(2, 12)), 1),
)
"""Numbers of jobs that are calibrated together, and what part of the profile's budget their
nano-batches have: few jobs and many, each with few tokens and with many."""


class Span(NamedTuple):
    """Of the monotonic clock."""

    begin: float
    end: float


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

        self.spans: list[Span] = []
        """When each round was."""

        self._attaches: list[float] = []
        self._ended = endings(self._workers, workers, bucket)

    def run_round(self) -> float:
        """Every group once, in an order of its own. How much slower all were than in the first
        round, in percent."""
        found: dict[tuple[int, int], float] = {}
        began = time.monotonic()
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
        self.spans.append(Span(began, time.monotonic()))
        return (statistics.mean(found[key] / self._seen[0][key] for key in found) - 1) * 100

    @property
    def rounds(self) -> int:
        return len(self._seen)

    def slowness(self, number: int) -> list[float]:
        """Of each worker in this round, against its mean over all rounds: 0.1 is a tenth slower."""
        mean = self._means()
        seen = self._seen[number]
        return [
            statistics.mean(seen[key] / mean[key] for key in seen if key[1] == device) - 1
            for device in range(self._count)
        ]

    def overheads(self, profile: Profile) -> Overheads:
        """Over all rounds so far."""
        return fit_overheads(
            profile,
            [
                GroupRate(
                    jobs=tuple(
                        self._requests[f"c{device}-{number}"] for number in GROUPS[place][0]
                    ),
                    bucket=self._bucket // GROUPS[place][1],
                    token_s=token_s,
                )
                for (place, device), token_s in self._means().items()
            ],
            attach_s=statistics.median(self._attaches),
            end_s=statistics.median(self._ended),
        )

    def _means(self) -> dict[tuple[int, int], float]:
        """Not medians: real runs are slowed by whatever slows a machine."""
        return {key: statistics.mean(seen[key] for seen in self._seen) for key in self._seen[0]}

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
