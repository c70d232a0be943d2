"""What can happen. Events are facts: they carry all that the scheduler may know of them, so that
the same events give the same decisions."""

from dataclasses import dataclass
from typing import Any, ClassVar

from tlora.core import records
from tlora.core.records import Record
from tlora.core.request import JobRequest


@dataclass(frozen=True, slots=True)
class Arrival(Record):
    kind: ClassVar[str] = "arrival"
    time: float
    request: JobRequest


@dataclass(frozen=True, slots=True)
class Completion(Record):
    """The job has made all its steps."""

    kind: ClassVar[str] = "completion"
    time: float
    job: str


@dataclass(frozen=True, slots=True)
class EarlyExit(Record):
    """The job ended before its last step, on purpose: patience, a sweep's rule, a cancellation."""

    kind: ClassVar[str] = "early_exit"
    time: float
    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class JobFailure(Record):
    """The job cannot go on by itself."""

    kind: ClassVar[str] = "job_failure"
    time: float
    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class GpuFailure(Record):
    """These GPUs are gone until repaired. Every group with one of them is gone too; its jobs wait
    again, at the steps that the progress given with this event says they still have."""

    kind: ClassVar[str] = "gpu_failure"
    time: float
    gpus: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class GpuRepair(Record):
    kind: ClassVar[str] = "gpu_repair"
    time: float
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Straggler(Record):
    """The GPU has been seen to run at this part of its usual speed; 1 takes that back."""

    kind: ClassVar[str] = "straggler"
    time: float
    gpu: int
    speed: float


@dataclass(frozen=True, slots=True)
class SlowdownBreach(Record):
    """A running job's measured rate is below its fair rate / bound."""

    kind: ClassVar[str] = "slowdown_breach"
    time: float
    job: str
    slowdown: float
    """Measured."""


@dataclass(frozen=True, slots=True)
class Tick(Record):
    """Time has passed. The loop makes these itself."""

    kind: ClassVar[str] = "tick"
    time: float


Event = (
    Arrival
    | Completion
    | EarlyExit
    | JobFailure
    | GpuFailure
    | GpuRepair
    | Straggler
    | SlowdownBreach
    | Tick
)
EVENTS: tuple[type[Event], ...] = (
    Arrival,
    Completion,
    EarlyExit,
    JobFailure,
    GpuFailure,
    GpuRepair,
    Straggler,
    SlowdownBreach,
    Tick,
)


def event_of_json(data: dict[str, Any]) -> Event:
    return records.of_json(EVENTS, data)
