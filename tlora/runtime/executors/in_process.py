"""Workers in this process, which take turns: for tests, for one device, and where processes are not
to be had. Each has a base of its own, as on devices of their own."""

import time
from collections.abc import Sequence

from tlora.runtime.executors.messages import URGENT, Command, Message, Stop
from tlora.runtime.executors.worker import Worker, WorkerSettings

SLICE_S = 0.05
"""A worker's turn, if there are others; it ends with a nano-batch."""


class InThisProcess:
    def __init__(self, settings: Sequence[WorkerSettings]) -> None:
        self._inbox: list[tuple[int, Message]] = []
        self._urgent = False
        self._workers = [
            Worker(each, lambda message, device=device: self._told(device, message))
            for device, each in enumerate(settings)
        ]

    def __len__(self) -> int:
        return len(self._workers)

    def send(self, device: int, command: Command) -> None:
        self._workers[device].obey(command)

    def receive(self, timeout_s: float) -> list[tuple[int, Message]]:
        end = time.monotonic() + timeout_s
        self._urgent = any(isinstance(message, URGENT) for _, message in self._inbox)
        while not self._urgent and time.monotonic() < end:
            busy = [worker for worker in self._workers if worker.has_work]
            if not busy:
                time.sleep(max(0.0, end - time.monotonic()))
            for worker in busy:
                until = min(end, time.monotonic() + SLICE_S) if len(busy) > 1 else end
                worker.work(lambda until=until: self._urgent or time.monotonic() >= until)
        told, self._inbox = self._inbox, []
        return told

    def restart(self, device: int) -> None:
        raise AssertionError("a worker of this process is not lost alone")

    def close(self) -> list[tuple[int, Message]]:
        for worker in self._workers:
            worker.obey(Stop())
        told, self._inbox = self._inbox, []
        return told

    def _told(self, device: int, message: Message) -> None:
        self._inbox.append((device, message))
        self._urgent = self._urgent or isinstance(message, URGENT)
