"""One batch of one job on its way through nano-batches: what was fed, what is left to launch, and
what has come back.

A batch may be launched in full, and its job busy with the next one, before its losses are known
(in_flight.py): so results are counted here and not with the job.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from tlora.core.errors import JobFailed
from tlora.core.sequence import TokenPair, Unit
from tlora.training.compose import Kind
from tlora.training.outcome import StepDone
from tlora.training.preference import Dpo, Tally
from tlora.training.references import References

NAMED_ROWS = 5
"""So many rows are named in a reason; a whole batch would bury it."""


@dataclass(frozen=True, slots=True)
class FedUnit:
    unit: Unit
    length: int
    row_offset: int
    """Tokens of the job's batch before it."""

    loss_scale: float
    """What the loss of each of its trained tokens counts, or of the pair."""

    reference: int = -1
    """The place of a pair among the references."""


@dataclass(frozen=True, slots=True, eq=False)
class Preference:
    """What makes a job one of pairs."""

    dpo: Dpo
    references: References


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

    preference: Preference | None = None
    """None where its units are sequences."""

    fed: list[FedUnit] = field(default_factory=list[FedUnit])
    left: list[int] = field(default_factory=list[int])
    """Indices into `fed` that have not been launched."""

    ahead: list[FedUnit] = field(default_factory=list[FedUnit])
    """Pairs of later batches, which may fill a pass that makes references for this one."""

    request: StepRequest | None = None
    nano_batches: int = 0
    loss: float = 0.0
    """Of what has come back."""

    not_finite: list[str] = field(default_factory=list[str])
    """Where the units came from whose loss was no number."""

    no_reference: list[str] = field(default_factory=list[str])
    """The same of pairs of which the base model itself makes no number."""

    tally: Tally = field(default_factory=Tally)
    """Of the pairs that have come back."""

    partial: bool = False
    """It spans ranks, and what the others have of it is not in yet."""

    dropped: bool = False
    """It was begun anew, or its job is gone: what still comes back of it is of no use."""

    def add(self, units: Sequence[Unit], loss_scale: float, *, offset: int) -> None:
        for unit in units:
            self.left.append(len(self.fed))
            place = self._place(unit)
            self.fed.append(FedUnit(unit, len(unit), offset, loss_scale, place))
            offset += len(unit)

    def look_ahead(self, coming: Iterable[Unit], room: int) -> None:
        """If a pass for references must be made, fill it up to `room` tokens: where batches are
        small it would hold a few pairs only, and nobody who trains can share it."""
        tokens = sum(each.length for each in self._without_reference(self._waiting()))
        for unit in coming if tokens else ():
            if tokens >= room:
                break
            self.ahead.append(FedUnit(unit, len(unit), 0, 0.0, self._place(unit)))
            tokens += len(unit)

    def keep(self, own: Sequence[bool], *, first: int) -> None:
        """Of the units from `first` on, launch those that are this rank's own."""
        others = {first + index for index, mine in enumerate(own) if not mine}
        self.left = [index for index in self.left if index not in others]

    def _place(self, unit: Unit) -> int:
        if self.preference is None:
            return -1
        assert isinstance(unit, TokenPair)
        return self.preference.references.place(unit)

    @property
    def next_kind(self) -> Kind:
        """What has to be launched next."""
        return Kind.REFERENCE if self._without_reference(self._waiting()) else self.kind

    def offered(self) -> list[FedUnit]:
        """What could be launched now: pairs without a reference first, which are then offered again
        to be trained or evaluated on."""
        waiting = self._waiting()
        missing = self._without_reference(waiting)
        return [*missing, *self._without_reference(self.ahead)] if missing else waiting

    def _waiting(self) -> list[FedUnit]:
        return [self.fed[index] for index in self.left]

    def _without_reference(self, units: list[FedUnit]) -> list[FedUnit]:
        if self.preference is None:
            return []
        known = self.preference.references
        return [each for each in units if not known.has(each.reference)]

    def launched(self, fed: list[FedUnit]) -> None:
        """These are under way."""
        gone = set(map(id, fed))
        self.left = [index for index in self.left if id(self.fed[index]) not in gone]
        self.nano_batches += 1

    def count(self, fed: list[FedUnit], loss_sums: list[float]) -> None:
        """These have come back with these losses, one for each sequence."""
        sums = iter(loss_sums)
        for each in fed:
            own = tuple(next(sums) for _ in each.unit.sequences)
            loss = self._loss(each, own)
            self.loss += each.loss_scale * loss
            if not math.isfinite(loss):
                self.not_finite.append(each.unit.origin)

    def _loss(self, each: FedUnit, sums: tuple[float, ...]) -> float:
        if self.preference is None:
            (loss,) = sums
            return loss
        chosen, rejected = sums
        reference = self.preference.references.of(each.reference)
        if not math.isfinite(sum(reference)):
            # Made for another job, or in another batch.
            self.no_reference.append(each.unit.origin)
        judged = self.preference.dpo.judge((chosen, rejected), reference)
        self.tally.add(judged)
        return judged.loss

    def count_reference(self, fed: list[FedUnit], loss_sums: list[float]) -> None:
        """The same of a pass without adapters. Other jobs may share what is known by it, even if
        this batch was dropped."""
        assert self.preference is not None
        sums = iter(loss_sums)
        for each in fed:
            chosen, rejected = next(sums), next(sums)
            self.preference.references.tell(each.reference, (chosen, rejected))
            if not math.isfinite(chosen + rejected):
                self.no_reference.append(each.unit.origin)

    def check_reference(self) -> None:
        if self.no_reference and not self.partial:
            rows = _rows(self.no_reference)
            raise JobFailed(f"the base model's own loss is no number{rows}", job=self.job)

    def check_loss(self) -> None:
        self.check_reference()
        if not math.isfinite(self.loss) and not self.partial:
            self._fail(f"the loss is {self.loss}", self.not_finite)

    def finish_step(self, grad_norm: float) -> StepDone:
        """The step was taken; or its norm is no finite number, and the job fails: its gradients are
        none, or (then it is NaN) the weights that it made of them."""
        self.check_loss()
        if not math.isfinite(grad_norm):
            origins = [each.unit.origin for each in self.fed]
            beyond = "gradients or weights are no longer finite numbers"
            norm = f"the gradient norm is {grad_norm}"
            self._fail(beyond if math.isnan(grad_norm) else norm, origins)
        assert self.request is not None
        return StepDone(
            job=self.job,
            step=self.steps_before + 1,
            loss=self.loss,
            grad_norm=grad_norm,
            learning_rate=self.request.learning_rate,
            target_tokens=sum(each.unit.num_targets for each in self.fed),
            tokens=sum(each.length for each in self.fed),
            sequences=len(self.fed),
            nano_batches=self.nano_batches,
            figures=self.tally.figures(),
        )

    def _fail(self, what: str, origins: list[str]) -> NoReturn:
        advice = "the usual cause is the learning rate: a lower one, or max_grad_norm, may help"
        step = self.steps_before + 1
        raise JobFailed(f"{what} at step {step}{_rows(origins)}; {advice}", job=self.job)


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """What one job has in a nano-batch."""

    batch: Batch
    fed: list[FedUnit]


def _rows(origins: list[str]) -> str:
    """The first few, in brackets."""
    named = list(dict.fromkeys(origin for origin in origins if origin))
    more = f" and {len(named) - NAMED_ROWS} more" if len(named) > NAMED_ROWS else ""
    return f" (rows {', '.join(named[:NAMED_ROWS])}{more})" if named else ""
