"""Recorded turns through the same loop: the decisions must be the same, one for one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tlora.control.loop import Loop
from tlora.control.protocols import Turn
from tlora.core.clock import ManualClock
from tlora.core.decision import Decision
from tlora.core.event import Event
from tlora.core.state import State
from tlora.schedule.policy import Policy


@dataclass(frozen=True, slots=True)
class Difference:
    turn: int
    recorded: tuple[Decision, ...]
    replayed: tuple[Decision, ...]

    def __str__(self) -> str:
        recorded = "; ".join(map(str, self.recorded)) or "nothing"
        replayed = "; ".join(map(str, self.replayed)) or "nothing"
        return f"turn {self.turn}: recorded: {recorded}; replayed: {replayed}"


def replay(turns: Iterable[Turn], *, state: State, policy: Policy) -> Difference | None:
    """The first turn whose decisions differ; None if none do. `state` is the one that the recorded
    run began with."""
    loop = Loop(state=state, policy=policy, executor=Nobody(), store=Nowhere(), clock=ManualClock())
    for turn in turns:
        again = loop.turn(turn.time, turn.events, turn.progress)
        if again.decisions != turn.decisions:
            return Difference(turn.number, turn.decisions, again.decisions)
    return None


class Nobody:
    """Carries nothing out; what happened is on record."""

    idle = True

    def wait(self, until: float) -> Sequence[Event]:
        return ()

    def progress(self) -> dict[str, float]:
        return {}

    def apply(self, decision: Decision) -> None:
        pass

    def close(self) -> None:
        pass


class Nowhere:
    """Remembers nothing."""

    def record(self, turn: Turn) -> None:
        pass

    def turns(self) -> Iterable[Turn]:
        return ()
