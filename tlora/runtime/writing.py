"""Files in the background: training hands an order over and goes on.

One thread carries the orders out one at a time, in their order, so that what one job's files say of
another file is true: a best adapter is there before the checkpoint that knows of it, an adapter
before its result. What came of an order is told to the training loop when it asks.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

IN_FLIGHT_BYTES = 2 << 30
"""From here on training waits before it takes the next snapshot: a disk that does not keep up must
not fill the memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    job: str
    write: Callable[[], None]
    """Called by the writer's thread."""

    then: Callable[[Exception | None], None]
    """Called by whoever settles, with what kept it from the disk."""

    num_bytes: int = 0
    """Memory that it holds until it is carried out."""

    replaceable: bool = False
    """A newer such order of the same job makes it void while it waits: it is never told of then."""


Over = tuple[Callable[[Exception | None], None], Exception | None]
"""Whom to tell of an order, and what kept it from the disk."""


class Writer:
    def __init__(self, in_flight_bytes: int = IN_FLIGHT_BYTES) -> None:
        self._limit = in_flight_bytes
        self._waiting: deque[Order] = deque()
        self._current: Order | None = None
        self._over: deque[Over] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="files", daemon=True)
        self._thread.start()

    def make_room(self, *, replacing: str | None = None) -> None:
        """Wait until another order may hold memory. With `replacing`, what that job's new order
        will make void does not count; it stays until then, for the new one may never come."""

        def has_room() -> bool:
            void = sum(each.num_bytes for each in self._waiting if _is_void(each, replacing))
            return self._in_flight - void < self._limit

        with self._changed:
            self._changed.wait_for(has_room)

    def submit(self, order: Order) -> None:
        with self._changed:
            if order.replaceable:
                self._drop(order.job)
            self._waiting.append(order)
            self._changed.notify_all()

    def settle(self) -> None:
        """Tell what came of the orders that are over, in their order. If telling one raises, the
        others are told all the same, and the first such error is raised then."""
        raised: list[Exception] = []
        while told := self._next_over():
            then, error = told
            try:
                then(error)
            except Exception as caught:
                raised.append(caught)
        if raised:
            raise raised[0]

    def flush(self) -> None:
        """Wait until all that was handed over is on disk or has failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and self._current is None)

    def close(self) -> None:
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    @property
    def _in_flight(self) -> int:
        held = self._current.num_bytes if self._current else 0
        return held + sum(order.num_bytes for order in self._waiting)

    def _drop(self, job: str) -> None:
        self._waiting = deque(each for each in self._waiting if not _is_void(each, job))

    def _work(self) -> None:
        while order := self._next():
            error: Exception | None = None
            try:
                order.write()
            except Exception as caught:
                error = caught.with_traceback(None)
            except BaseException as caught:
                # Whatever it is: a thread that died here would leave the run waiting for ever.
                error = RuntimeError(f"{type(caught).__name__}: {caught}")
            with self._changed:
                # Without what was written: its memory is free from here on.
                self._over.append((order.then, error))
                self._current = None
                self._changed.notify_all()
            del order

    def _next_over(self) -> Over | None:
        with self._changed:
            return self._over.popleft() if self._over else None

    def _next(self) -> Order | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._current = self._waiting.popleft() if self._waiting else None
            return self._current


def _is_void(waiting: Order, replacing: str | None) -> bool:
    """Once there is a newer checkpoint of this job."""
    return waiting.replaceable and waiting.job == replacing
