"""How fast the machine is while fidelity.py's workers have it: a process with an engine of its own
trains one nano-batch twice a second and counts the processor time that it takes.

Waiting for a turn is no processor time, so how many share the machine does not count; what counts
is how far a turn goes: clocks, and caches that neighbours on the same host fill. The work is a
worker's own, for other work is slowed by other things: small operators and products in a loop
followed the workers less well.
"""

import json
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from fidelity_calibration import BATCHES, NEVER, RANKS, Span, new_job, new_spec, run_directory

from tlora.runtime.executors.messages import Attach
from tlora.runtime.executors.worker import Worker, WorkerSettings

PERIOD_S = 0.5
JOBS = 4
BUCKET = 256
"""Tokens of a nano-batch, which takes some 30 ms."""

WARM = 20
"""Nano-batches that do not count."""


class Probe:
    def __init__(self, work: Path) -> None:
        jobs = [
            new_job(f"p{n}", n, rank=RANKS[n], batch=BATCHES[n], steps=NEVER) for n in range(JOBS)
        ]
        root = run_directory(new_spec(jobs), work / "probe")
        self._samples: list[tuple[float, float]] = []
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=measure, args=(theirs, str(root)), daemon=True)
        self._process.start()
        theirs.close()
        self._connection.recv_bytes()

    def seconds(self, span: Span) -> float:
        """What a nano-batch took on average: not a median, for runs are slowed by whatever slows a
        machine. To be asked when the probe is closed."""
        return statistics.mean(took for at, took in self._samples if span.begin <= at <= span.end)

    def close(self) -> None:
        self._connection.send_bytes(b"enough")
        self._samples = [(at, took) for at, took in json.loads(self._connection.recv_bytes())]
        self._process.join()


def measure(connection: Connection, root: str) -> None:
    """The life of the process: until it is told something, or nobody is there to tell it."""
    torch.set_num_threads(1)
    worker = Worker(WorkerSettings(Path(root), "cpu"), lambda message: None)
    for number in range(JOBS):
        worker.obey(Attach(f"p{number}", 1.0, BUCKET))
    for _ in range(WARM):
        train_one(worker)
    connection.send_bytes(b"ready")
    samples: list[tuple[float, float]] = []
    while not connection.poll(PERIOD_S):
        began = time.thread_time()
        train_one(worker)
        samples.append((time.monotonic(), time.thread_time() - began))
    connection.send_bytes(json.dumps(samples).encode())


def train_one(worker: Worker) -> None:
    asked = iter((False, True))
    worker.work(lambda: next(asked))


class Run(Protocol):
    @property
    def round_before(self) -> int: ...

    @property
    def span(self) -> Span: ...


class Rounds(Protocol):
    """Of the calibration."""

    @property
    def spans(self) -> Sequence[Span]: ...

    def slowness(self, number: int) -> list[float]: ...


class Work(Protocol):
    """A probe."""

    def seconds(self, span: Span) -> float: ...


class Speeds:
    """How slow the machine was in each real run, against its mean over all rounds of the
    calibration: a line through what the workers took in the rounds, over what the probe took there,
    read at what the probe took during the run. No outcome of a run is used for it."""

    def __init__(self, calibration: Rounds, probe: Work) -> None:
        self._calibration, self._probe = calibration, probe
        self._taken = np.log([probe.seconds(span) for span in calibration.spans])
        numbers = range(len(calibration.spans))
        self._workers = np.log1p([statistics.mean(calibration.slowness(i)) for i in numbers])
        self._mean = float(self._taken.mean())
        beyond = self._taken - self._mean
        self._slope = float(beyond @ self._workers / (beyond @ beyond))
        self._left = self._workers - self._slope * beyond

    def around(self, run: Run) -> list[float]:
        """As the rounds next to the run say, without the probe."""
        numbers = (run.round_before, run.round_before + 1)
        return [slower for number in numbers for slower in self._calibration.slowness(number)]

    def during(self, run: Run) -> list[float]:
        """On the line, and as far from it as each of the rounds was."""
        seen = np.log(self._probe.seconds(run.span)) - self._mean
        return list(map(float, np.expm1(self._slope * seen + self._left)))

    @property
    def as_json(self) -> dict[str, Any]:
        """Milliseconds of each round, how well they follow what the workers took there, and how far
        the rounds are from the line."""
        return {
            "rounds_ms": [float(each) for each in np.exp(self._taken) * 1e3],
            "correlation": float(np.corrcoef(self._taken, self._workers)[0, 1]),
            "slope": self._slope,
            "left_pct": [float(each) for each in np.expm1(self._left) * 100],
        }
