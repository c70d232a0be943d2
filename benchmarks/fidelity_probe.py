"""How fast the machine is while fidelity.py's workers have it: a thread does the same small work a
few times a second and counts the processor time that it takes.

Waiting for a turn is no processor time, so how many share the machine does not count; what counts
is how far a turn goes: clocks, and caches that neighbours on the same host fill. The work is what a
worker's is: mostly calls of small operators, and some products.
"""

import statistics
import threading
import time
from typing import NamedTuple

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
