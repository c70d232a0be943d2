"""Jobs that are held on their way into an engine, each in the thread that brings it."""

import threading

import pytest

from tlora.runtime import arriving

PATIENCE_S = 20.0
"""A test that waits for itself fails after this, and does not hang."""


class Gate:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, *jobs: str) -> None:
        """Jobs of other names are not held."""
        self._gates = {job: threading.Event() for job in jobs}
        self.reached: list[str] = []
        resumption = arriving.resumption

        def held(directory, job):
            if job.name in self._gates:
                self.reached.append(job.name)
                self._gates[job.name].wait(PATIENCE_S)
            return resumption(directory, job)

        monkeypatch.setattr(arriving, "resumption", held)

    def let_in(self, *jobs: str) -> None:
        for job in jobs or self._gates:
            self._gates[job].set()
