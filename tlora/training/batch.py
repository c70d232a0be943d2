"""One batch of one job on its way through nano-batches: what was fed, what is left to launch, and
what has come back.

A batch may be launched in full, and its job busy with the next one, before its losses are known
(in_flight.py): so results are counted here and not with the job.
"""

import math
from dataclasses import dataclass, field
from typing import NoReturn

from tlora.core.errors import JobFailed
from tlora.core.sequence import TokenSequence
from tlora.training.compose import Kind
from tlora.training.outcome import StepDone

NAMED_ROWS = 5
"""So many rows are named in a reason; a whole batch would bury it."""


@dataclass(frozen=True, slots=True)
class FedSequence:
    sequence: TokenSequence
    length: int
    row_offset: int
    """Tokens of the job's batch before it."""

    loss_scale: float
    """What the loss of each of its trained tokens counts."""


@dataclass(frozen=True, slots=True)
class StepRequest:
    learning_rate: float
    max_grad_norm: float | None


@dataclass(slots=True, eq=False)
class Batch:
    job: str
    kind: Kind
    steps_before: int
    """Steps that the job had taken."""

    fed: list[FedSequence] = field(default_factory=list[FedSequence])
    left: list[int] = field(default_factory=list[int])
    """Indices into `fed` that have not been launched."""

    request: StepRequest | None = None
    nano_batches: int = 0
    loss: float = 0.0
    """Of what has come back."""

    not_finite: list[str] = field(default_factory=list[str])
    """Where the sequences came from whose loss was no number."""

    dropped: bool = False
    """It was begun anew, or its job is gone: what still comes back of it is of no use."""

    def add(self, sequences: list[TokenSequence], loss_scale: float, *, offset: int) -> None:
        for sequence in sequences:
            self.left.append(len(self.fed))
            self.fed.append(FedSequence(sequence, len(sequence), offset, loss_scale))
            offset += len(sequence)

    def at(self, positions: tuple[int, ...]) -> list[FedSequence]:
        """The sequences at these positions of what is left."""
        return [self.fed[self.left[position]] for position in positions]

    def launched(self, positions: tuple[int, ...]) -> None:
        """These are under way."""
        gone = set(positions)
        self.left = [index for i, index in enumerate(self.left) if i not in gone]
        self.nano_batches += 1

    def count(self, fed: list[FedSequence], loss_sums: list[float]) -> None:
        """These have come back with these losses."""
        for each, loss_sum in zip(fed, loss_sums, strict=True):
            self.loss += each.loss_scale * loss_sum
            if not math.isfinite(loss_sum):
                self.not_finite.append(each.sequence.origin)

    def check_loss(self) -> None:
        if not math.isfinite(self.loss):
            self._fail(f"the loss is {self.loss}", self.not_finite)

    def finish_step(self, grad_norm: float) -> StepDone:
        """The step was taken; or it was not, because its norm is no number, and the job fails."""
        if not math.isfinite(grad_norm):
            origins = [each.sequence.origin for each in self.fed]
            self._fail(f"the gradient norm is {grad_norm}", origins)
        assert self.request is not None
        return StepDone(
            job=self.job,
            step=self.steps_before + 1,
            loss=self.loss,
            grad_norm=grad_norm,
            learning_rate=self.request.learning_rate,
            target_tokens=sum(each.sequence.num_targets for each in self.fed),
            tokens=sum(each.length for each in self.fed),
            sequences=len(self.fed),
            nano_batches=self.nano_batches,
        )

    def _fail(self, what: str, origins: list[str]) -> NoReturn:
        named = list(dict.fromkeys(origin for origin in origins if origin))
        more = f" and {len(named) - NAMED_ROWS} more" if len(named) > NAMED_ROWS else ""
        rows = f" (rows {', '.join(named[:NAMED_ROWS])}{more})" if named else ""
        advice = "a lower learning rate or max_grad_norm may help"
        raise JobFailed(f"{what} at step {self.steps_before + 1}{rows}; {advice}", job=self.job)
