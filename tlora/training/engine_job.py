"""One job as the engine sees it: its current batch, how far it is, and what it is owed."""

import math
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from tlora.core.errors import JobFailed
from tlora.core.sequence import Sequences, TokenSequence
from tlora.kernels.streams import step_key
from tlora.model.adapters import AdapterWeights
from tlora.model.packing import Share
from tlora.training.compose import Kind, Waiting
from tlora.training.optimiser import AdamW, DueStep
from tlora.training.outcome import EvaluationDone, StepDone

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
class HeldOut:
    """What a job is evaluated on."""

    sequences: Sequences
    num_targets: int


@dataclass(slots=True)
class Drawn:
    """How far an evaluation has read its rows."""

    sequences: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepRequest:
    learning_rate: float
    max_grad_norm: float | None


@dataclass(frozen=True, slots=True, eq=False)
class JobState:
    """All that a job's later steps depend on, besides its data cursor: portable between groups."""

    step: int
    weights: AdapterWeights
    exp_avg: dict[str, torch.Tensor]
    exp_avg_sq: dict[str, torch.Tensor]


@dataclass(slots=True)
class EngineJob:
    name: str
    seed: int
    weight: float
    rank: int
    optimiser: AdamW
    step: int = 0
    credit: float = 0.0
    kind: Kind | None = None
    """What its current batch is for; None between batches."""

    batch: list[FedSequence] = field(default_factory=list[FedSequence])
    left: list[int] = field(default_factory=list[int])
    """Indices into `batch` that have not gone through."""

    held_out: HeldOut | None = None
    drawn: Drawn = field(default_factory=Drawn)
    """Of the held-out rows: `batch` has only those of a window, however many there are."""

    window_tokens: int = 0
    request: StepRequest | None = None
    loss: float = 0.0
    """Of what has gone through."""

    not_finite: list[str] = field(default_factory=list[str])
    """Where the sequences came from whose loss was no number."""

    nano_batches: int = 0

    @property
    def due(self) -> bool:
        """Its step can be taken now."""
        return self.request is not None and not self.left

    def feed(self, sequences: list[TokenSequence], loss_scale: float) -> None:
        self.kind = Kind.TRAIN
        last = self.batch[-1] if self.batch else None
        self._append(sequences, loss_scale, offset=last.row_offset + last.length if last else 0)

    def start_evaluation(self, *, window_tokens: int) -> None:
        """On the rows in `held_out`; `window_tokens` is more than a nano-batch takes."""
        self.kind = Kind.EVALUATE
        self.window_tokens = window_tokens
        self.draw()

    def draw(self) -> None:
        """Fill the window with held-out rows, if the job is being evaluated. It stays beyond what
        one nano-batch can take, so that a job with more rows is composed as one; rows that went
        through are let go."""
        if self.kind is not Kind.EVALUATE or self.held_out is None:
            return
        rows, drawn = self.held_out.sequences, self.drawn
        if drawn.sequences == len(rows):
            return
        waiting = sum(self.batch[index].length for index in self.left)
        more: list[TokenSequence] = []
        while drawn.sequences + len(more) < len(rows) and (
            waiting <= self.window_tokens or len(self.left) + len(more) < 2
        ):
            more.append(rows[drawn.sequences + len(more)])
            waiting += len(more[-1])
        if more:
            self.batch = [self.batch[index] for index in self.left]
            self.left = list(range(len(self.batch)))
            self._append(more, 1.0 / self.held_out.num_targets, offset=drawn.tokens)
            drawn.sequences += len(more)
            drawn.tokens += sum(map(len, more))

    def waiting(self) -> Waiting:
        assert self.kind is not None
        return Waiting(
            job=self.name,
            kind=self.kind,
            lengths=[self.batch[index].length for index in self.left],
            weight=self.weight,
            credit=self.credit,
            rank=self.rank,
        )

    def share(self, positions: tuple[int, ...]) -> Share:
        """The sequences at these positions of what was waiting."""
        fed = [self.batch[self.left[position]] for position in positions]
        return Share(
            job=self.name,
            sequences=[each.sequence for each in fed],
            row_offsets=[each.row_offset for each in fed],
            loss_scales=[each.loss_scale for each in fed],
            key=step_key(self.seed, self.step),
        )

    def passed(self, positions: tuple[int, ...], loss_sums: list[float]) -> int:
        """These have gone through the nano-batch, with these losses: their tokens."""
        fed = [self.batch[self.left[position]] for position in positions]
        for each, loss_sum in zip(fed, loss_sums, strict=True):
            self.loss += each.loss_scale * loss_sum
            if not math.isfinite(loss_sum):
                self.not_finite.append(each.sequence.origin)
        gone = set(positions)
        self.left = [index for i, index in enumerate(self.left) if i not in gone]
        self.nano_batches += 1
        return sum(each.length for each in fed)

    def replay(self) -> None:
        """Back to the start of the batch; the caller clears the gradients."""
        self._forget_progress()
        if self.kind is Kind.EVALUATE:
            # Rows are drawn again when the engine settles: one that cannot be read fails this job.
            self.batch, self.left, self.drawn = [], [], Drawn()
        else:
            self.left = list(range(len(self.batch)))

    def check_finite(self) -> None:
        if not math.isfinite(self.loss):
            self._fail(f"the loss is {self.loss}", self.not_finite)

    def due_step(self) -> DueStep:
        assert self.request is not None
        return DueStep(
            self.name,
            self.optimiser,
            self.request.learning_rate,
            self.step + 1,
            self.request.max_grad_norm,
        )

    def finish_step(self, grad_norm: float) -> StepDone:
        """The step was taken; or it was not, because its norm is no number, and the job fails."""
        if not math.isfinite(grad_norm):
            origins = [each.sequence.origin for each in self.batch]
            self._fail(f"the gradient norm is {grad_norm}", origins)
        self.step += 1
        return self.finish_batch(grad_norm)

    def check_weights(self, finite: bool) -> None:
        if not finite:
            raise JobFailed(
                f"the adapter holds weights that are not finite numbers after step {self.step}",
                job=self.name,
            )

    def _fail(self, what: str, origins: list[str]) -> NoReturn:
        named = list(dict.fromkeys(origin for origin in origins if origin))
        more = f" and {len(named) - NAMED_ROWS} more" if len(named) > NAMED_ROWS else ""
        rows = f" (rows {', '.join(named[:NAMED_ROWS])}{more})" if named else ""
        advice = "a lower learning rate or max_grad_norm may help"
        raise JobFailed(f"{what} at step {self.step + 1}{rows}; {advice}", job=self.name)

    def check_integrity(self) -> None:
        replaying = self.kind is Kind.EVALUATE and not self.drawn.sequences
        assert replaying or (self.kind is None) == (not self.batch), (
            f"{self.name} has a batch for nothing"
        )
        assert self.request is None or self.kind is Kind.TRAIN
        assert self.left == sorted(set(self.left)), f"{self.name} would run a sequence twice"
        assert set(self.left) <= set(range(len(self.batch)))

    def finish_batch(self, grad_norm: float) -> StepDone:
        assert self.request is not None
        done = StepDone(
            job=self.name,
            step=self.step,
            loss=self.loss,
            grad_norm=grad_norm,
            learning_rate=self.request.learning_rate,
            target_tokens=sum(each.sequence.num_targets for each in self.batch),
            tokens=sum(each.length for each in self.batch),
            sequences=len(self.batch),
            nano_batches=self.nano_batches,
        )
        self._clear()
        return done

    def finish_evaluation(self) -> EvaluationDone:
        assert self.held_out is not None
        done = EvaluationDone(
            job=self.name,
            step=self.step,
            loss=self.loss,
            target_tokens=self.held_out.num_targets,
            tokens=self.drawn.tokens,
            sequences=self.drawn.sequences,
        )
        self._clear()
        return done

    def _append(self, sequences: list[TokenSequence], loss_scale: float, offset: int) -> None:
        for sequence in sequences:
            self.left.append(len(self.batch))
            self.batch.append(FedSequence(sequence, len(sequence), offset, loss_scale))
            offset += len(sequence)

    def _clear(self) -> None:
        self.kind = None
        self.batch = []
        self.left = []
        self.drawn = Drawn()
        self.request = None
        self._forget_progress()

    def _forget_progress(self) -> None:
        self.loss = 0.0
        self.not_finite = []
        self.nano_batches = 0
