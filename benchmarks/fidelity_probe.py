"""How fast the machine is while fidelity.py's workers have it: a thread does the same small work a
few times a second and counts the processor time that it takes.

Waiting for a turn is no processor time, so how many share the machine does not count; what counts
is how far a turn goes: clocks, and caches that neighbours on the same host fill. The work is what a
worker's is: mostly calls of small operators, and some products.
"""

import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

PERIOD_S = 0.2
CALLS = 150
"""Of small operators; with the products some 3 ms."""


class Span(NamedTuple):
    """Of the monotonic clock."""

    begin: float
    end: float


class Probe:
    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._over = threading.Event()
        generator = torch.Generator().manual_seed(0)
        self._small = torch.randn(8, 32, generator=generator)
        self._rows = torch.randn(256, 128, generator=generator)
        self._weight = torch.randn(128, 384, generator=generator)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(PERIOD_S):
            began = time.thread_time()
            self._work()
            self._samples.append((time.monotonic(), time.thread_time() - began))

    def _work(self) -> None:
        value = self._small
        for _ in range(CALLS):
            value = torch.nn.functional.silu(value * 1.01) + 0.01
        for _ in range(4):
            (self._rows @ self._weight).relu_()

    def seconds(self, span: Span) -> float:
        """What the work took on average: not a median, for runs are slowed by whatever slows a
        machine."""
        return statistics.mean(took for at, took in self._samples if span.begin <= at <= span.end)

    def close(self) -> None:
        self._over.set()
        self._thread.join()


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


class Speeds:
    """How slow the machine was in each real run, against its mean over all rounds of the
    calibration: what a worker took in the rounds before and after it, times how much longer than in
    that round the probe's work took during the run. No outcome of a run is used for it."""

    def __init__(self, calibration: Rounds, probe: Probe) -> None:
        self._calibration, self._probe = calibration, probe

    def around(self, run: Run) -> list[float]:
        """As the rounds alone say."""
        numbers = (run.round_before, run.round_before + 1)
        return [slower for number in numbers for slower in self._calibration.slowness(number)]

    def during(self, run: Run) -> list[float]:
        seconds = self._probe.seconds(run.span)
        return [
            (1 + slower) * seconds / self._probe.seconds(self._calibration.spans[number]) - 1
            for number in (run.round_before, run.round_before + 1)
            for slower in self._calibration.slowness(number)
        ]

    @property
    def as_json(self) -> dict[str, Any]:
        """Milliseconds of each round, and how well they follow what the workers took there."""
        spans = self._calibration.spans
        taken = [self._probe.seconds(span) * 1e3 for span in spans]
        workers = [statistics.mean(self._calibration.slowness(i)) for i in range(len(spans))]
        return {"rounds_ms": taken, "correlation": float(np.corrcoef(taken, workers)[0, 1])}
