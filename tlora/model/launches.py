"""How much of a nano-batch's time the host takes to launch it: from a share on it is worth
capturing."""

from collections.abc import Iterable
from dataclasses import dataclass, field

WARM_UP = 2
"""Runs of a shape that say nothing: they compile."""

MEASURED = 2

BOUND = 0.3
"""Of the device's time. A host that takes as long as this to launch everything is late at the start
of a nano-batch; at a tenth it would not matter."""


@dataclass(slots=True)
class Launches:
    """Of one shape of nano-batch."""

    trains: bool = True
    rows: int = 0
    runs: int = 0
    seconds: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """(until the host had launched all, until the device was through)."""

    def add(self, host: float, device: float) -> None:
        self.runs += 1
        if self.runs > WARM_UP:
            self.seconds.append((host, device))

    @property
    def decided(self) -> bool:
        return len(self.seconds) >= MEASURED

    @property
    def bound(self) -> bool:
        """In every run that counts."""
        return self.decided and all(host > BOUND * device for host, device in self.seconds)

    def bound_among(self, shapes: Iterable["Launches"]) -> bool:
        """By its own runs; or, before they are enough, by those of a shape that launches as much
        and keeps the device busy at least as long."""
        if self.decided or self.runs < WARM_UP:
            return self.bound
        return any(
            each.bound and each.trains == self.trains and each.rows >= self.rows for each in shapes
        )
