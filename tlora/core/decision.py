"""What a policy may decide, each with its reasons, printable for a person.

Decisions are applied in order, each to the state that the ones before it left. A group without
jobs does not exist: the decision or event that takes its last job frees its GPUs.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from tlora.core import records
from tlora.core.plan import Plan
from tlora.core.records import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Reasons:
    """Predicted, by the policy's own predictor, at the time of the decision."""

    why: str
    """In a few words, without a full stop: 'two GPUs are free'."""

    bound_by: str = ""
    """What kept it from being better: 'memory', 'slowdown of job-7', 'free GPUs'; empty: nothing
    did."""

    before: float | None = None
    """GPUs' worth of all groups that the decision touches, before it (see docs/scheduling.md)."""

    after: float | None = None
    """And after it."""

    slowdown: float | None = None
    """Predicted, of the job or of the slowest job of the group."""

    cost_s: float | None = None
    """Seconds of training that the move itself costs."""

    def __str__(self) -> str:
        parts = [self.why]
        if self.before is not None and self.after is not None:
            parts.append(f"{self.before:.2f} -> {self.after:.2f} GPUs' worth of work")
        if self.slowdown is not None:
            parts.append(f"slowdown {self.slowdown:.2f}")
        if self.cost_s is not None:
            parts.append(f"costs {self.cost_s:.1f} s")
        if self.bound_by:
            parts.append(f"bound by {self.bound_by}")
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Start(Record):
    """A new group on free GPUs, with jobs that wait. `gpus` are in the order of the plan."""

    kind: ClassVar[str] = "start"
    group: str
    base: str
    jobs: tuple[str, ...]
    gpus: tuple[int, ...]
    plan: Plan
    weights: tuple[float, ...]
    """Of each job: its tokens in a nano-batch are in proportion to these."""

    reasons: Reasons

    def __str__(self) -> str:
        return (
            f"start {self.group} with {_names(self.jobs)} on {_gpus(self.gpus)} "
            f"({self.plan}): {self.reasons}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Join(Record):
    """A waiting job is attached to a live group."""

    kind: ClassVar[str] = "join"
    job: str
    group: str
    weight: float
    reasons: Reasons

    def __str__(self) -> str:
        return f"{self.job} joins {self.group}: {self.reasons}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Move(Record):
    """A running job is detached from its group and attached to another live one."""

    kind: ClassVar[str] = "move"
    job: str
    source: str
    target: str
    weight: float
    reasons: Reasons

    def __str__(self) -> str:
        return f"{self.job} moves from {self.source} to {self.target}: {self.reasons}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause(Record):
    """A running job is detached and waits again; it loses nothing that it has learnt."""

    kind: ClassVar[str] = "pause"
    job: str
    group: str
    reasons: Reasons

    def __str__(self) -> str:
        return f"{self.job} leaves {self.group} and waits: {self.reasons}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resize(Record):
    """A live group gets other GPUs, another plan or other weights. GPUs that are added must be
    free."""

    kind: ClassVar[str] = "resize"
    group: str
    gpus: tuple[int, ...]
    plan: Plan
    weights: tuple[float, ...]
    """Of its jobs, in their order."""

    reasons: Reasons

    def __str__(self) -> str:
        return f"{self.group} goes to {_gpus(self.gpus)} ({self.plan}): {self.reasons}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Refuse(Record):
    """The job can never run here; final."""

    kind: ClassVar[str] = "refuse"
    job: str
    reasons: Reasons

    def __str__(self) -> str:
        return f"{self.job} is refused: {self.reasons}"


Decision = Start | Join | Move | Pause | Resize | Refuse
DECISIONS: tuple[type[Decision], ...] = (Start, Join, Move, Pause, Resize, Refuse)


def decision_of_json(data: dict[str, Any]) -> Decision:
    return records.of_json(DECISIONS, data)


def _names(jobs: tuple[str, ...]) -> str:
    shown = ", ".join(jobs[:4])
    return shown if len(jobs) <= 4 else f"{shown} and {len(jobs) - 4} more"


def _gpus(gpus: tuple[int, ...]) -> str:
    if len(gpus) == 1:
        return f"GPU {gpus[0]}"
    return "GPUs " + ", ".join(map(str, gpus))
