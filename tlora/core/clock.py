"""The time of a run: seconds since it began. Read here and passed down; nobody else looks at a
clock."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the run began; never goes back."""
        ...


class WallClock:
    """Real time, from where an earlier part of the run left off."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._zero = time.monotonic() - start_s

    def now(self) -> float:
        return time.monotonic() - self._zero


class ManualClock:
    """Time that whoever holds it moves: simulations and replays."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now = start_s

    def now(self) -> float:
        return self._now

    def move_to(self, now: float) -> None:
        assert now >= self._now, f"time went back from {self._now} to {now}"
        self._now = now
