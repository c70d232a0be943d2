"""Tests that wait for something to happen, and not for some time. No torch."""

import threading
import time
from collections.abc import Callable
from typing import Self

PATIENCE_S = 300.0
"""A test that waits for itself fails after this, and does not hang. What is to happen soon happens
within some part of it: a busy machine has pauses of many seconds."""


def until(happened: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


class Stalls:
    """While entered: how much later than it wanted to a thread of this process got its turns, in
    all. By so much a busy machine may exceed a limit that is tight."""

    EVERY_S = 0.05

    def __init__(self) -> None:
        self.seconds = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()

    def _look(self) -> None:
        began = time.monotonic()
        while not self._closed.wait(self.EVERY_S):
            now = time.monotonic()
            self.seconds += now - began - self.EVERY_S
            began = now
