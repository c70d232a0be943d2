"""What happens in a sweep, and what is done about it: the words of its log.

Replaying the events of a log through `StudyState` gives its actions again, one for one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tlora.core.records import Record, of_json
from tlora.tuning.exits import Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialPlan:
    """One trial before it runs."""

    name: str
    params: dict[str, Any]
    total_steps: int
    total_tokens: int
    """What it would train on if it ran to its end."""

    batch_size: int
    adapter_bytes: float
    """What it takes while it is attached, its optimiser included."""

    parent: str | None = None
    """The trial that a person cloned it from; such a one is not part of the warm-up of all."""

    request: int | None = None
    """The person's request that it answers: asked again after a crash, it is there already."""


@dataclass(frozen=True, slots=True)
class Added(Record):
    kind: ClassVar[str] = "added"
    plans: tuple[TrialPlan, ...]


@dataclass(frozen=True, slots=True)
class Closed(Record):
    """No more trials come but by a person's hand."""

    kind: ClassVar[str] = "closed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated(Record):
    kind: ClassVar[str] = "evaluated"
    trial: str
    step: int
    tokens: int
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class Completed(Record):
    kind: ClassVar[str] = "completed"
    trial: str
    step: int
    tokens: int
    reason: str | None = None
    """Set where its own patience ended it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed(Record):
    kind: ClassVar[str] = "failed"
    trial: str
    step: int
    tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class NoRoom(Record):
    """There was no memory for it beside the others, whatever the model of memory said."""

    kind: ClassVar[str] = "no_room"
    trial: str


@dataclass(frozen=True, slots=True)
class Stopped(Record):
    """A person gives the trial up."""

    kind: ClassVar[str] = "stopped"
    trial: str


@dataclass(frozen=True, slots=True)
class Resumed(Record):
    """A person wants it to go on; no rule gives it up from here on."""

    kind: ClassVar[str] = "resumed"
    trial: str


@dataclass(frozen=True, slots=True)
class Spent(Record):
    """The sweep has used up what it was given."""

    kind: ClassVar[str] = "spent"
    what: str
    spent: float
    limit: float


Event = Added | Closed | Evaluated | Completed | Failed | NoRoom | Stopped | Resumed | Spent


@dataclass(frozen=True, slots=True)
class Attach(Record):
    """Train it, from its start or from where it was."""

    kind: ClassVar[str] = "attach"
    trial: str

    def __str__(self) -> str:
        return f"{self.trial}: goes on"


@dataclass(frozen=True, slots=True)
class Hold(Record):
    """It has warmed up: keep its state and give its room to others."""

    kind: ClassVar[str] = "hold"
    trial: str

    def __str__(self) -> str:
        return f"{self.trial}: has warmed up, waits for the others"


@dataclass(frozen=True, slots=True)
class Exit(Record):
    kind: ClassVar[str] = "exit"
    verdict: Verdict

    @property
    def trial(self) -> str:
        return self.verdict.trial

    def __str__(self) -> str:
        return f"{self.trial}: {self.verdict}"


Action = Attach | Hold | Exit

EVENTS = (Added, Closed, Evaluated, Completed, Failed, NoRoom, Stopped, Resumed, Spent)
ACTIONS = (Attach, Hold, Exit)


def event_of_json(data: Mapping[str, Any]) -> Event:
    return of_json(EVENTS, data)  # type: ignore[type-var]


def action_of_json(data: Mapping[str, Any]) -> Action:
    return of_json(ACTIONS, data)  # type: ignore[type-var]
