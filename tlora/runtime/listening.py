"""How a leader tells that a process of its own hangs: it has stopped beating.

A leader that is stopped and let go on, as by Ctrl-Z and fg, has heard nobody meanwhile, and those
that it leads were most often stopped with it. That time does not count.
"""

import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

BEAT_S = 1.0

AWAY_S = 2.0
"""From one look to the next: whoever takes longer was away. Beats that came meanwhile are still
there to be read."""


class Voice:
    """Of a process, to whoever leads it: what its threads write, and a beat once a second whatever
    it is about."""

    def __init__(self, connection: Connection, alone: Callable[[], object]) -> None:
        """`alone` is called when nobody hears it any more, by the thread that finds out."""
        self._connection = connection
        self._alone = alone
        self._lock = threading.Lock()
        threading.Thread(target=self._beat, daemon=True).start()

    def write(self, data: bytes) -> None:
        try:
            with self._lock:
                self._connection.send_bytes(data)
        except OSError:
            self._alone()

    def _beat(self) -> None:
        while True:
            self.write(b"")
            time.sleep(BEAT_S)


class Listener:
    """Somebody who looks several times a second."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._looked_at = now()

    def away_s(self) -> float:
        """For how long nobody listened since this was last asked."""
        before, self._looked_at = self._looked_at, self._now()
        passed = self._looked_at - before
        return passed if passed > AWAY_S else 0.0


class LastHeard:
    """Of one process that beats."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._at = now()

    def hear(self) -> None:
        self._at = self._now()

    def silent_s(self, away_s: float) -> float:
        """While somebody listened; `away_s` of the time since this was last asked nobody did."""
        now = self._now()
        self._at = min(now, self._at + away_s)
        return now - self._at
