"""What a nano-batch brought: records that the engine returns and everybody above reads."""

from dataclasses import dataclass, field

from tlora.core.errors import JobFailed
from tlora.training.compose import Kind
from tlora.training.size_search import Decision, Measure


@dataclass(frozen=True, slots=True)
class StepDone:
    """A job's batch is through and its weights have moved."""

    job: str
    step: int
    """Steps this job has taken, this one included."""

    loss: float
    grad_norm: float
    learning_rate: float
    target_tokens: int
    tokens: int
    sequences: int
    nano_batches: int
    """Nano-batches this batch was spread over."""

    figures: dict[str, float] = field(default_factory=dict[str, float])
    """What else is known of its loss, by name (training/preference.py)."""


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    job: str
    step: int
    loss: float
    """Mean over all held-out trained tokens, or pairs."""

    target_tokens: int
    tokens: int
    sequences: int
    figures: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Outcome:
    """A nano-batch that is through, as `Engine.run_nano_batch` reports it."""

    kind: Kind | None = None
    """None if nothing had to run but steps were due, or nothing is to be reported yet."""

    rows: int = 0
    tokens: dict[str, int] = field(default_factory=dict[str, int])
    """Useful tokens per job."""

    seconds: float = 0.0
    steps: tuple[StepDone, ...] = ()
    evaluations: tuple[EvaluationDone, ...] = ()
    failures: tuple[JobFailed, ...] = ()
    error: str | None = None
    """Why the nano-batch broke off, if it did: no weights changed, its jobs run their batches
    again."""

    measure: Measure | None = None
    """What the nano-batch controller was told, if there is one."""

    decisions: tuple[Decision, ...] = ()
    """What it decided then."""

    @property
    def is_empty(self) -> bool:
        """There is nothing to tell."""
        told = self.steps or self.evaluations or self.failures or self.error
        return self.kind is None and not told
