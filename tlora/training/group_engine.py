"""An engine that is one of several, in lock-step: a rank of a group that shares one super-model.

Each rank composes its own nano-batches from its own jobs. Before each one all ranks agree with one
control element on what is run (parallel/lock_step.py). Where the backbone is in shards, ranks meet
in its gatherings: all run a pass of the same kind, and a rank without work joins with an empty one.
Where it is not, nobody waits for anything but the control element.

A job that spans ranks is attached on all of them and fed the same batches; each rank launches the
sequences that are dealt to it. Once a batch is through everywhere, gradients and losses are summed
in the order of ranks, and every rank takes the same step. Whatever happens to such a job on one
rank, a failure or a batch to be run again, happens to it on all at the same agreement.

Where the size of nano-batches is tuned, one rank has the controller and measures its own; all take
the size that it comes to, and it hears of those that did not fit on another.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from tlora.core.errors import JobFailed
from tlora.core.sequence import Sequences, TokenSequence, Unit
from tlora.model.memory import is_out_of_memory
from tlora.model.packing import Share, pack
from tlora.model.super_model import SuperModel
from tlora.parallel.counting import Counts, Purpose
from tlora.parallel.dealing import deal_sequences
from tlora.parallel.exchange import exchange
from tlora.parallel.lock_step import LockStep, Pass, Standing, Verdict, Wish
from tlora.parallel.reduction import sum_in_order
from tlora.parallel.sharding import GroupLost, Sharded
from tlora.training import optimiser
from tlora.training.compose import Composition, Kind, Waiting, bucket_of
from tlora.training.controller import Controller
from tlora.training.engine import Engine
from tlora.training.engine_job import NOBODY, EngineJob
from tlora.training.in_flight import InFlight
from tlora.training.launching import run_through
from tlora.training.outcome import Outcome
from tlora.training.recovery import drop_partial_batches
from tlora.training.size_search import Decision, Measure

logger = logging.getLogger(__name__)

EMPTY_ROWS = 64
"""Of a nano-batch without work: as few as products like."""


@dataclass(slots=True)
class Usage:
    """How much of the lock-step was work, on one rank."""

    turns: int = 0
    """Agreements that ran something on some rank."""

    empty: int = 0
    """Of these, without work on this rank."""

    tokens: int = 0
    """Useful ones of this rank."""

    rows: int = 0
    """Of the largest nano-batch of each turn: what this rank could have run."""

    @property
    def utilisation(self) -> float:
        """Useful tokens of what all turns had room for."""
        return self.tokens / self.rows if self.rows else 0.0


class GroupEngine(Engine):
    def __init__(
        self,
        super_model: SuperModel,
        *,
        budget_tokens: int,
        counts: Counts,
        sharded: Sharded | None = None,
        spans: Callable[[str], bool] = lambda job: False,
        bucket_step: int | None = None,
        exact: bool = False,
        controller: Controller | None = None,
        ahead: int | None = None,
    ) -> None:
        """`spans` says of which jobs every rank takes a part; they must be attached on all ranks
        at the same agreement and in the same order. One rank may have a controller, or none."""
        super().__init__(
            super_model,
            budget_tokens=budget_tokens,
            bucket_step=bucket_step,
            exact=exact,
            controller=controller,
            ahead=ahead,
        )
        self.counts = counts
        self.usage = Usage()
        self.alive = False
        """Jobs are being driven here; whoever drives them says so before each nano-batch."""

        self.stop = False
        """Somebody asks all ranks to stop."""

        self.drift = False
        """Somebody thinks that jobs should come, go or change ranks; told by the next verdict."""

        self.away: tuple[bool, ...] = ()
        """Of jobs on their way, in the order that all ranks heard of them: whether this rank still
        waits for one; whoever brings them says so before each nano-batch."""

        self.verdict: Verdict | None = None
        """Of the last agreement."""

        self.paused: set[str] = set()
        """Jobs that left all ranks without having failed."""

        self.ended: list[str] = []
        """Jobs that span ranks and have come to their end on all: to be detached by whoever drives
        them, before the next nano-batch."""

        self._lock_step = LockStep(counts)
        self._sharded = sharded
        self._spans = spans
        self._num_spanned = 0
        """Jobs that span ranks and were attached so far."""

        self._broke_off = False
        self._crowded = False
        self._unfit_rows = 0
        self._decisions: tuple[Decision, ...] = ()
        """Of the controller, because of other ranks; told with the next nano-batch."""

        self._replays: set[str] = set()
        self._leaving: dict[str, dict[str, Any]] = {}
        """Jobs that span ranks and cannot go on here, and why; until all ranks know."""

        self._over: set[str] = set()
        """Jobs that span ranks and have come to their end here; until they have on all."""

    @property
    def over(self) -> bool:
        """All ranks have agreed to end."""
        return self.verdict is not None and self.verdict.over

    def spans(self, name: str) -> bool:
        return self._spans(name)

    def attach(self, name: str, *arguments: Any, **settings: Any) -> None:
        super().attach(name, *arguments, **settings)
        if self._spans(name):
            self._jobs[name].part = Part(
                dist.get_rank(), dist.get_world_size(), number=self._num_spanned
            )
            self._num_spanned += 1

    def detach(self, name: str) -> None:
        """One that spans ranks leaves all of them between the same two nano-batches."""
        self._job(name)
        self._under_way.drop(name)
        self._forget(name)
        super()._leave(name)

    def is_free(self, name: str) -> bool:
        return name not in self._leaving and super().is_free(name)

    def ask_to_leave(self, name: str, reason: str, *, paused: bool = False) -> None:
        """Of a job that spans ranks: it cannot go on, for a reason that only this rank knows. It is
        told as a failure on all ranks, after the next agreement."""
        assert self._job(name).part is not None, f"{name} is on this rank alone"
        self._leaving.setdefault(name, {"paused": paused, "reason": reason})
        self._jobs[name].batch = None

    def ask_to_end(self, name: str) -> None:
        """Of a job that spans ranks: it has come to its end. It stays until it has on all of them,
        for one may know a reason why it cannot."""
        assert self._job(name).part is not None, f"{name} is on this rank alone"
        self._over.add(name)

    def run_nano_batch(self) -> Outcome:
        """One turn of all ranks, which must call this equally often."""
        verdict = self._agree()
        if verdict.over:
            return Outcome()
        if verdict.broke_off and self._sharded is not None:
            self._sharded.reset()
            if verdict.crowded:
                self._sharded.keep(self._sharded.kept_layers // 2)
        failures = self._carry_out(verdict.standings)
        if self._sharded is not None and verdict.kind is not None and not self._waiting():
            self._join_without_work(verdict.kind)
        tokens = self.usage.tokens
        outcome = super().run_nano_batch()
        if verdict.kind is not None:
            self.usage.turns += 1
            self.usage.rows += verdict.rows
            self.usage.empty += self.usage.tokens == tokens
        return self._with_agreed(outcome, failures)

    def has_work(self) -> bool:
        return bool(self.alive or self._under_way)

    def _agree(self) -> Verdict:
        wish = Wish(
            alive=self.has_work(),
            stop=self.stop,
            broke_off=self._broke_off,
            drift=self.drift,
            crowded=self._crowded,
            rows=self._rows_wished(),
            budget=0 if self._sizing.controller is None else self._sizing.controller.budget,
            unfit_rows=self._unfit_rows,
            standings=tuple(self._standing(job) for job in self._spanning()),
            away=self.away,
        )
        try:
            self.verdict = self._lock_step.agree(wish)
        except RuntimeError as error:
            raise GroupLost(f"the ranks cannot agree any more: {error}") from error
        self._broke_off = self._crowded = self.drift = False
        self._resize(self.verdict)
        return self.verdict

    def _resize(self, verdict: Verdict) -> None:
        """All take the size of the rank that measures, but for one that has just told that it has
        no room: the next size will take that into account."""
        told, self._unfit_rows = self._unfit_rows, 0
        if self._sizing.controller is not None:
            if verdict.unfit_rows:
                unfit = Measure(
                    budget=verdict.budget,
                    rows=verdict.unfit_rows,
                    tokens=0,
                    seconds=0.0,
                    out_of_memory=True,
                )
                self._decisions = self._sizing.controller.observe(unfit)
        elif verdict.budget and not told:
            self.budget_tokens = verdict.budget

    def _rows_wished(self) -> tuple[int, int]:
        rows = {Pass.FORWARD: 0, Pass.TRAIN: 0}
        budget = self.budget_tokens
        for each in super()._waiting():
            kind = _pass_of(each.kind)
            rows[kind] += sum(each.lengths)
        sizes = [
            bucket_of(min(tokens, budget), budget, self._buckets(budget)) if tokens else 0
            for tokens in (rows[Pass.FORWARD], rows[Pass.TRAIN])
        ]
        return sizes[0], sizes[1]

    def _waiting(self) -> list[Waiting]:
        waiting = super()._waiting()
        if self._sharded is None or self.verdict is None:
            return waiting
        return [each for each in waiting if _pass_of(each.kind) is self.verdict.kind]

    def _launch(self, launched: InFlight, composition: Composition) -> None:
        if self._sharded is not None:
            self._sharded.begin(_pass_of(composition.kind))
        super()._launch(launched, composition)
        if self._sharded is not None:
            self._sharded.end()
        self.usage.tokens += composition.tokens

    def _undo(self, composition: Composition, error: Exception) -> Outcome:
        if isinstance(error, GroupLost):
            raise error
        if self._sharded is not None:
            # The others are not held up: what they gather for this pass, this rank gathers too.
            self._sharded.catch_up(error)
        self._broke_off = True
        budget = self.budget_tokens
        jobs = [self._jobs[pick.job] for pick in composition.picks]
        if self._sharded is not None and self._sharded.kept_layers and is_out_of_memory(error):
            outcome = self._keep_fewer_layers(jobs, error)
        else:
            outcome = super()._undo(composition, error)
        self._replays |= {job.name for job in jobs if job.part is not None}
        if self._sizing.controller is None and self.budget_tokens < budget:
            self._unfit_rows = composition.rows
        return self._with_agreed_steps(outcome) if self._spanning() else outcome

    def _with_agreed_steps(self, outcome: Outcome) -> Outcome:
        """Whatever broke off here, a job that spans ranks steps at the turn that was agreed on,
        and draws the rows of an evaluation that is run again: as on all other ranks."""
        launched = InFlight(None, self._group)
        self._settle(launched)
        if launched.is_empty:
            return outcome
        self._under_way.add(launched, self.super_model.device)
        told = self._with_failures(self._report(), launched.failures)
        return replace(
            outcome,
            steps=(*outcome.steps, *told.steps),
            evaluations=(*outcome.evaluations, *told.evaluations),
            failures=(*outcome.failures, *told.failures),
        )

    def _keep_fewer_layers(self, jobs: list[EngineJob], error: Exception) -> Outcome:
        """Layers that stay gathered go first, on all ranks: then there may be room for the same
        nano-batch."""
        logger.warning("out of memory: fewer layers stay gathered")
        drop_partial_batches(self.super_model, jobs)
        self._crowded = True
        return Outcome(error=f"out of memory: {error}")

    def _join_without_work(self, kind: Pass) -> None:
        """For the sake of the others: a row of nobody's, which counts nothing."""
        assert self._sharded is not None
        tokens = np.zeros(2, dtype=np.int32)
        share = Share(NOBODY, [TokenSequence(tokens, tokens)], [0], [0.0])
        batch = pack([share], EMPTY_ROWS, self.super_model.device)
        try:
            self._sharded.begin(kind)
            run_through(
                self.super_model,
                batch,
                train=kind is Pass.TRAIN,
                scales=lambda losses: batch.loss_scales,
            )
            self._sharded.end()
        except GroupLost:
            raise
        except Exception as error:
            logger.warning("a nano-batch without work broke off", exc_info=error)
            self._sharded.catch_up(error)
            self._broke_off = True
            self._crowded = is_out_of_memory(error)

    def _spanning(self) -> list[EngineJob]:
        return [job for job in self._jobs.values() if job.part is not None]

    def _standing(self, job: EngineJob) -> Standing:
        if job.name in self._leaving:
            return Standing.LEAVE
        if job.name in self._replays:
            return Standing.REPLAY
        if job.name in self._over:
            return Standing.OVER
        batch = job.batch
        if batch is None or batch.left or not batch.partial:
            return Standing.BUSY
        if batch.kind is Kind.TRAIN and batch.request is None:
            return Standing.BUSY
        # Its losses must be known here before they can be summed.
        return Standing.BUSY if self._under_way.holds(batch) else Standing.READY

    def _carry_out(self, standings: Sequence[Standing]) -> list[JobFailed]:
        failures: list[JobFailed] = []
        for job, standing in zip(self._spanning(), standings, strict=True):
            match standing:
                case Standing.READY:
                    self._combine(job)
                case Standing.REPLAY:
                    drop_partial_batches(self.super_model, [job])
                    self._replays.discard(job.name)
                case Standing.OVER:
                    self.ended.append(job.name)
                case Standing.LEAVE:
                    failures.append(self._let_go(job))
                case Standing.BUSY:
                    pass
        return failures

    def _combine(self, job: EngineJob) -> None:
        """All ranks' parts of the job's batch, on all ranks."""
        batch = job.batch
        assert batch is not None
        train = batch.kind is Kind.TRAIN
        views = self.super_model.views(job.name).values() if train else ()
        names = list(batch.tally.sums)
        figures = [
            batch.loss,
            batch.nano_batches,
            batch.tally.pairs,
            job.drawn.sequences,
            job.drawn.tokens,
            *(batch.tally.sums[name] for name in names),
        ]
        total, passes, pairs, sequences, tokens, *sums = sum_in_order(
            [rows.grad for rows in views],
            figures,
            counts=self.counts,
            purpose=Purpose.GRADIENT if train else Purpose.FIGURES,
        )
        batch.loss, batch.nano_batches, batch.tally.pairs = total, int(passes), int(pairs)
        batch.tally.sums = dict(zip(names, sums, strict=True))
        if not train:
            job.drawn.sequences, job.drawn.tokens = int(sequences), int(tokens)
        batch.partial = False

    def _let_go(self, job: EngineJob) -> JobFailed:
        own = self._leaving.get(job.name)
        told = exchange(json.dumps(own) if own else "", counts=self.counts)
        rank, text = next((rank, text) for rank, text in enumerate(told) if text)
        why = json.loads(text)
        if why["paused"]:
            self.paused.add(job.name)
        self._under_way.drop(job.name)
        self._forget(job.name)
        super()._leave(job.name)
        return JobFailed(f"{why['reason']} (rank {rank})", job=job.name)

    def _leave(self, name: str) -> None:
        """A job that spans ranks stays until all ranks know that it leaves."""
        if self._jobs[name].part is None:
            super()._leave(name)
            return
        optimiser.clear_gradients(list(self.super_model.views(name).values()))
        self.ask_to_leave(name, "it failed")

    def _forget(self, name: str) -> None:
        self._leaving.pop(name, None)
        self._replays.discard(name)
        self._over.discard(name)

    def _with_agreed(self, outcome: Outcome, agreed: list[JobFailed]) -> Outcome:
        """Failures of jobs that span ranks are told when all ranks know of them."""
        told: list[JobFailed] = []
        for failure in outcome.failures:
            if failure.job in self._leaving:
                self._leaving[failure.job] = {"paused": False, "reason": failure.message}
            else:
                told.append(failure)
        decisions = (*self._decisions, *outcome.decisions)
        outcome = replace(outcome, failures=(*agreed, *told), decisions=decisions)
        if not outcome.is_empty:
            # Told now; an empty one is told to nobody.
            self._decisions = ()
        return outcome

    def _own_rows(self, job: EngineJob, sequences: Sequences) -> Sequences:
        if job.part is None:
            return sequences
        lengths = [len(sequences[index]) for index in range(len(sequences))]
        own = job.part.own(lengths, first=0)
        return _Rows(sequences, [index for index, mine in enumerate(own) if mine])


def _pass_of(kind: Kind) -> Pass:
    return Pass.TRAIN if kind is Kind.TRAIN else Pass.FORWARD


class Part:
    """Of a rank, in a job that spans all ranks."""

    def __init__(self, rank: int, num_ranks: int, *, number: int = 0) -> None:
        """`number` is the job's, in the order that all ranks attached them: small batches of
        several jobs begin at one rank each, where they would all go to the same one."""
        self._rank = rank
        self._num_ranks = num_ranks
        self._number = number

    def own(self, lengths: Sequence[int], *, first: int) -> list[bool]:
        """`first` moves the rank that comes first, from one batch to the next."""
        first = (self._number + first) % self._num_ranks
        ranks = deal_sequences(lengths, self._num_ranks, first=first)
        return [rank == self._rank for rank in ranks]


class _Rows:
    """Some of the rows."""

    def __init__(self, sequences: Sequences, indices: list[int]) -> None:
        self._sequences = sequences
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Unit:
        return self._sequences[self._indices[index]]
