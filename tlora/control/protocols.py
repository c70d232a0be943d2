"""What the loop needs of the world: time (core/clock.py), somebody who runs groups, and somebody
who remembers. Real and simulated worlds differ in these alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tlora.core.decision import Decision, decision_of_json
from tlora.core.event import Event, event_of_json
from tlora.core.records import as_json


class Executor(Protocol):
    """Runs groups somewhere, and tells what happens to their jobs."""

    def wait(self, until: float) -> Sequence[Event]:
        """Blocks until something happened or the clock shows `until`; then what happened, in
        order, maybe nothing. Arrivals come from here too: from a trace, a file or a queue. The
        clock never shows more than `until` when nothing happened before. Completed, exited and
        failed jobs are detached by the executor itself before it tells."""
        ...

    def progress(self) -> dict[str, float]:
        """Steps done of every job that is now in a group, and of those that lost their group in
        an event of the last wait (after a failure: what the last checkpoint has)."""
        ...

    def apply(self, decision: Decision) -> None:
        """Carries it out, or begins to. What goes wrong with a job is told as an event by a later
        `wait`, never raised."""
        ...

    @property
    def idle(self) -> bool:
        """Nothing will happen any more unless something is decided."""
        ...

    def close(self) -> None:
        """Stops all groups at the end of a batch, their jobs checkpointed."""
        ...


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the loop: all that a replay needs, and what was decided."""

    number: int
    time: float
    events: tuple[Event, ...]
    progress: dict[str, float]
    decisions: tuple[Decision, ...]
    decided_s: float
    """Seconds of processor time that the policy took; not part of what a replay compares."""

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "time": self.time,
            "events": [as_json(event) for event in self.events],
            "progress": self.progress,
            "decisions": [as_json(decision) for decision in self.decisions],
            "decided_s": self.decided_s,
        }


def turn_of_json(data: dict[str, Any]) -> Turn:
    return Turn(
        number=data["number"],
        time=data["time"],
        events=tuple(event_of_json(event) for event in data["events"]),
        progress=dict(data["progress"]),
        decisions=tuple(decision_of_json(decision) for decision in data["decisions"]),
        decided_s=data["decided_s"],
    )


class Store(Protocol):
    """Remembers turns. What `record` was given survives the process, if the store is durable, from
    the moment it returns; the loop calls it before decisions are carried out."""

    def record(self, turn: Turn) -> None: ...

    def turns(self) -> Iterable[Turn]:
        """From the first one."""
        ...
