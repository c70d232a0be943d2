"""One job as the engine sees it: its current batch, how far it is, and what it is owed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tlora.core.errors import JobFailed
from tlora.core.sequence import Sequences, TokenSequence, Unit
from tlora.kernels.streams import step_key
from tlora.model.adapters import AdapterWeights
from tlora.model.job_rows import Moments
from tlora.model.packing import Share
from tlora.training.batch import Batch, Passage, Preference, StepRequest
from tlora.training.compose import Kind, Waiting
from tlora.training.optimiser import AdamW, DueStep
from tlora.training.outcome import EvaluationDone

NOBODY = ""
"""Whose rows carry no adapter; no name that a job may have."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What a job is evaluated on."""

    sequences: Sequences
    num_targets: int
    loss_scale: float
    rows: Sequences
    """Those of `sequences` that this rank looks at: all, but of a job that spans ranks."""


class Part(Protocol):
    """Which units of a batch are this rank's, of a job that spans ranks."""

    def own(self, lengths: Sequence[int], *, first: int) -> list[bool]:
        """The ranks take turns in being the `first` that is dealt to."""
        ...


@dataclass(slots=True)
class Drawn:
    """How far an evaluation has read its rows."""

    sequences: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class JobState:
    """All that a job's later steps depend on, besides its data cursor: portable between groups."""

    step: int
    weights: AdapterWeights
    exp_avg: dict[str, torch.Tensor]
    exp_avg_sq: dict[str, torch.Tensor]

    @property
    def moments(self) -> Moments:
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


@dataclass(slots=True, eq=False)
class EngineJob:
    name: str
    seed: int
    weight: float
    rank: int
    optimiser: AdamW
    preference: Preference | None = None
    part: Part | None = None
    """None where the whole job is here."""

    step: int = 0
    """Steps that have been launched."""

    credit: float = 0.0
    batch: Batch | None = None
    """What is being launched; None between batches."""

    held_out: HeldOut | None = None
    drawn: Drawn = field(default_factory=Drawn)
    """Of the held-out rows: the batch has only those of a window, however many there are."""

    window_tokens: int = 0

    @property
    def kind(self) -> Kind | None:
        """What its current batch is for."""
        return self.batch.kind if self.batch else None

    @property
    def has_waiting(self) -> bool:
        return self.batch is not None and bool(self.batch.left)

    @property
    def requested(self) -> bool:
        return self.batch is not None and self.batch.request is not None

    @property
    def due(self) -> bool:
        """Its step can be taken now."""
        return self.requested and self._is_through

    @property
    def evaluated(self) -> bool:
        """All held-out rows are under way."""
        return self.kind is Kind.EVALUATE and self._is_through

    @property
    def _is_through(self) -> bool:
        return self.batch is not None and not self.batch.left and not self.batch.partial

    def feed(
        self,
        units: list[Unit],
        loss_scale: float,
        coming: Iterable[Unit] = (),
        *,
        room: int = 0,
    ) -> None:
        if self.batch is None:
            self.batch = self._new_batch(Kind.TRAIN)
        last = self.batch.fed[-1] if self.batch.fed else None
        offset = last.row_offset + last.length if last else 0
        first = len(self.batch.fed)
        self.batch.add(units, loss_scale, offset=offset)
        self._keep_own(self.batch, first=first)
        self.batch.look_ahead(coming, room)

    def _new_batch(self, kind: Kind) -> Batch:
        partial = self.part is not None
        return Batch(self.name, kind, self.step, self.preference, partial=partial)

    def _keep_own(self, batch: Batch, *, first: int = 0) -> None:
        if self.part is not None:
            lengths = [each.length for each in batch.fed[first:]]
            batch.keep(self.part.own(lengths, first=self.step), first=first)

    def request_step(self, request: StepRequest) -> None:
        assert self.batch is not None
        self.batch.request = request

    def start_evaluation(self, *, window_tokens: int) -> None:
        """On the rows in `held_out`; `window_tokens` is more than a nano-batch takes."""
        self.batch = self._new_batch(Kind.EVALUATE)
        self.drawn = Drawn()
        self.window_tokens = window_tokens
        self.draw()

    def draw(self) -> None:
        """Fill the window with held-out rows, if the job is being evaluated. It stays beyond what
        one nano-batch can take, so that a job with more rows is composed as one; rows that went
        through are let go."""
        batch = self.batch
        if batch is None or batch.kind is not Kind.EVALUATE or self.held_out is None:
            return
        rows, drawn = self.held_out.rows, self.drawn
        if drawn.sequences == len(rows):
            return
        waiting = sum(batch.fed[index].length for index in batch.left)
        more: list[Unit] = []
        while drawn.sequences + len(more) < len(rows) and (
            waiting <= self.window_tokens or len(batch.left) + len(more) < 2
        ):
            more.append(rows[drawn.sequences + len(more)])
            waiting += len(more[-1])
        if more:
            batch.fed = [batch.fed[index] for index in batch.left]
            batch.left = list(range(len(batch.fed)))
            batch.add(more, self.held_out.loss_scale, offset=drawn.tokens)
            drawn.sequences += len(more)
            drawn.tokens += sum(map(len, more))

    def waiting(self) -> Waiting:
        assert self.batch is not None
        return Waiting(
            job=self.name,
            kind=self.batch.next_kind,
            lengths=[each.length for each in self.batch.offered()],
            weight=self.weight,
            credit=self.credit,
            rank=self.rank,
        )

    def passage(self, positions: Sequence[int]) -> Passage:
        """What stands at these positions of what was waiting."""
        assert self.batch is not None
        offered = self.batch.offered()
        return Passage(self.batch, [offered[position] for position in positions])

    def share(self, passage: Passage, *, adapted: bool = True) -> Share:
        """Its sequences, with this job's adapter or none."""
        fed = passage.fed
        sequences: list[TokenSequence] = []
        row_offsets: list[int] = []
        for each in fed:
            offset = each.row_offset
            for sequence in each.unit.sequences:
                sequences.append(sequence)
                row_offsets.append(offset)
                offset += len(sequence)
        return Share(
            job=self.name if adapted else NOBODY,
            sequences=sequences,
            row_offsets=row_offsets,
            loss_scales=[each.loss_scale for each in fed for _ in each.unit.sequences],
            key=step_key(self.seed, self.step),
            zero_grad=passage.batch.nano_batches == 0,
        )

    def replay(self) -> None:
        """Back to the start of the batch; the caller clears the gradients."""
        old = self.batch
        if old is None:
            return
        old.dropped = True
        self.batch = self._new_batch(old.kind)
        self.batch.request = old.request
        if old.kind is Kind.EVALUATE:
            # Rows are drawn again when the engine settles: one that cannot be read fails this job.
            self.drawn = Drawn()
        else:
            self.batch.fed, self.batch.ahead = old.fed, old.ahead
            self.batch.left = list(range(len(old.fed)))
            self._keep_own(self.batch)

    def due_step(self) -> DueStep:
        assert self.batch is not None and self.batch.request is not None
        request = self.batch.request
        return DueStep(
            self.name, self.optimiser, request.learning_rate, self.step + 1, request.max_grad_norm
        )

    def stepped(self) -> Batch:
        """The step is under way: the next batch may come. The one that was stepped on."""
        assert self.batch is not None
        batch, self.batch = self.batch, None
        self.step += 1
        return batch

    def evaluation_launched(self) -> EvaluationDone:
        """What will be said of it, but for the loss, which is still to come."""
        assert self.batch is not None and self.held_out is not None
        done = EvaluationDone(
            job=self.name,
            step=self.step,
            loss=0.0,
            target_tokens=self.held_out.num_targets,
            tokens=self.drawn.tokens,
            sequences=self.drawn.sequences,
        )
        self.batch = None
        return done

    def check_weights(self, finite: bool) -> None:
        if not finite:
            raise JobFailed(
                f"the adapter holds weights that are not finite numbers after step {self.step}",
                job=self.name,
            )

    def check_integrity(self) -> None:
        batch = self.batch
        if batch is None:
            return
        replaying = batch.kind is Kind.EVALUATE and not self.drawn.sequences
        assert replaying or batch.fed or self.part, f"{self.name} has a batch for nothing"
        assert batch.request is None or batch.kind is Kind.TRAIN
        assert batch.left == sorted(set(batch.left)), f"{self.name} would run a sequence twice"
        assert set(batch.left) <= set(range(len(batch.fed)))
