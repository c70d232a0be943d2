"""What a policy is."""

import math
from collections.abc import Sequence
from typing import Protocol

from tlora.core.decision import Decision
from tlora.core.event import Event
from tlora.core.state import State


class Policy(Protocol):
    """A pure function of its arguments: it may keep what it worked out, but the same state and
    events must give the same decisions whatever it was asked before."""

    name: str
    overtakes: bool = False
    """Where only so many jobs may be looked at, those with the longest relative wait come first
    (core/line.py); else those that came first."""

    def decide(self, state: State, events: Sequence[Event]) -> list[Decision]:
        """What to do now. Does not change the state. `events` are those since the last call, and
        are in the state already. Decisions are applied in order and must each be possible when
        their turn comes (`State.apply` raises if not)."""
        ...

    def look_by(self, state: State) -> float:
        """The time at which it wants to be asked again even if nothing happens until then; the
        state is the one that its last decisions left. The loop asks at every tick anyway."""
        return math.inf
