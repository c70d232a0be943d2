"""What an executor and its workers say to each other: small records, sent as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tlora.core import records
from tlora.core.records import Record


@dataclass(frozen=True, slots=True)
class Attach(Record):
    """Take the job in, from its newest checkpoint or anew, and set the size of nano-batches."""

    kind: ClassVar[str] = "attach"
    job: str
    weight: float
    bucket: int


@dataclass(frozen=True, slots=True)
class Detach(Record):
    """Let the job go at the end of its batch, checkpointed."""

    kind: ClassVar[str] = "detach"
    job: str


@dataclass(frozen=True, slots=True)
class Tune(Record):
    """Other nano-batches, and other weights of jobs that are there."""

    kind: ClassVar[str] = "tune"
    bucket: int
    weights: dict[str, float]


@dataclass(frozen=True, slots=True)
class Stop(Record):
    """Checkpoint every job and end."""

    kind: ClassVar[str] = "stop"


@dataclass(frozen=True, slots=True)
class GoOn(Record):
    """To a job that asked: it is not over. If it was told to leave meanwhile, it leaves now."""

    kind: ClassVar[str] = "go_on"
    job: str


@dataclass(frozen=True, slots=True)
class GiveUp(Record):
    """End the job where it is, checkpointed: it is a result, with this reason."""

    kind: ClassVar[str] = "give_up"
    job: str
    reason: str
    status: str = "stopped_early"
    """Or cancelled, by a person."""


@dataclass(frozen=True, slots=True)
class Admit(Record):
    """To the ranks of a group: a job more, from its newest checkpoint or anew; where it lives is
    theirs to agree on."""

    kind: ClassVar[str] = "admit"
    job: str


Command = Attach | Detach | Tune | Stop | GoOn | GiveUp | Admit
COMMANDS: tuple[type[Command], ...] = (Attach, Detach, Tune, Stop, GoOn, GiveUp, Admit)


@dataclass(frozen=True, slots=True)
class Ready(Record):
    """The base is loaded."""

    kind: ClassVar[str] = "ready"
    seconds: float
    """It took so long."""


@dataclass(frozen=True, slots=True)
class Attached(Record):
    kind: ClassVar[str] = "attached"
    job: str
    step: int
    seconds: float
    """Its neighbours stood still for so long."""

    arriving_s: float = 0.0
    """So long it was on its way before that, while they trained."""


@dataclass(frozen=True, slots=True)
class Detached(Record):
    """The job is gone, or was gone before the command came."""

    kind: ClassVar[str] = "detached"
    job: str
    step: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Stepped(Record):
    """As `training.outcome.StepDone`."""

    kind: ClassVar[str] = "stepped"
    job: str
    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    target_tokens: int
    tokens: int
    sequences: int
    nano_batches: int
    figures: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Evaluated(Record):
    """As `training.outcome.EvaluationDone`."""

    kind: ClassVar[str] = "evaluated"
    job: str
    step: int
    loss: float
    target_tokens: int
    tokens: int
    sequences: int
    figures: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Asked(Record):
    """A trial was evaluated, and trains no further until it is told to go on or to leave: whoever
    decides sees every evaluation before the next step."""

    kind: ClassVar[str] = "asked"
    job: str
    step: int
    tokens: int
    """Trained so far."""

    metrics: dict[str, float]
    waits: bool = True
    """False at its end: there is nothing to go on with."""


@dataclass(frozen=True, slots=True)
class NoRoom(Record):
    """There was no memory for the job beside those that are there."""

    kind: ClassVar[str] = "no_room"
    job: str


@dataclass(frozen=True, slots=True)
class Ended(Record):
    """The job is over and detached; `result` has the fields of its result.json."""

    kind: ClassVar[str] = "ended"
    job: str
    result: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Noted(Record):
    """A line for the run's events.jsonl; that of a nano-batch shows progress too."""

    kind: ClassVar[str] = "noted"
    what: str
    time: float
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Said(Record):
    """Lines for a person."""

    kind: ClassVar[str] = "said"
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lost(Record):
    """The worker is gone, without having been asked to; never sent by one."""

    kind: ClassVar[str] = "lost"
    reason: str


Message = (
    Ready | Attached | Detached | Stepped | Evaluated | Asked | NoRoom | Ended | Noted | Said | Lost
)
MESSAGES: tuple[type[Message], ...] = (
    Ready,
    Attached,
    Detached,
    Stepped,
    Evaluated,
    Asked,
    NoRoom,
    Ended,
    Noted,
    Said,
    Lost,
)

URGENT = (Ready, Attached, Detached, Asked, NoRoom, Ended, Said)
"""What the scheduler or a person waits for; the rest may be sent together."""


def encoded(some: Sequence[Command] | Sequence[Message]) -> bytes:
    return json.dumps([records.as_json(each) for each in some]).encode()


def commands_of(data: bytes) -> list[Command]:
    return [records.of_json(COMMANDS, each) for each in json.loads(data)]


def messages_of(data: bytes) -> list[Message]:
    return [records.of_json(MESSAGES, each) for each in json.loads(data)]
