"""How a leader tells that a process of its own hangs: it has stopped beating.

A leader that is stopped and let go on, as by Ctrl-Z and fg, has heard nobody meanwhile, and those
that it leads were most often stopped with it. That time does not count.
"""

import time
from collections.abc import Callable

BEAT_S = 1.0

AWAY_S = 2.0
"""From one look to the next: whoever takes longer was away. Beats that came meanwhile are still
there to be read."""


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
