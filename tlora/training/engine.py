"""Continuous batching for training: the loop's inner step, and the interface a driver feeds it
through.

A driver attaches jobs, feeds each one sequences and asks for its step; every `run_nano_batch`
composes what is waiting, launches it forward and backward, and steps the jobs whose batch is
through. On a GPU the results of a nano-batch are read when the next one is under way (`ahead`), so
that the device never waits for the host; a job may be fed its next batch before it hears of its
last step. The engine knows no files, no schedules and no wall-clock decisions.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from tlora.core.errors import JobFailed
from tlora.core.sequence import Sequences, Unit
from tlora.model.adapters import AdapterWeights
from tlora.model.memory import is_out_of_memory
from tlora.model.packing import PackedBatch, pack
from tlora.model.snapshot import Snapshot
from tlora.model.super_model import SuperModel
from tlora.training import loss, moving, optimiser
from tlora.training.batch import Batch, Preference, StepRequest
from tlora.training.checks import check_state, check_units
from tlora.training.compose import Composition, Kind, Waiting, buckets_for, compose
from tlora.training.controller import Controller, Measure
from tlora.training.engine_job import EngineJob, HeldOut, JobState
from tlora.training.in_flight import (
    InFlight,
    LaunchedEvaluation,
    LaunchedSteps,
    to_host,
)
from tlora.training.optimiser import AdamW, DueStep
from tlora.training.outcome import Outcome
from tlora.training.packed_pairs import PackedPairs, pack_pairs
from tlora.training.preference import Dpo
from tlora.training.references import References

logger = logging.getLogger(__name__)

MIN_BUDGET = 64
CPU_BUCKET_STEP = 64
EVALUATION_WINDOW = 4
"""So many nano-batches of a job's held-out rows are looked at when one is composed: enough to find
rows that fill a gap, and the same work however many rows there are."""


class Engine:
    def __init__(
        self,
        super_model: SuperModel,
        *,
        budget_tokens: int,
        bucket_step: int | None = None,
        exact: bool = False,
        controller: Controller | None = None,
        ahead: int | None = None,
    ) -> None:
        """With a controller the budget is its own, and `budget_tokens` where it begins. `ahead`
        nano-batches are launched before the results of one are read: 1 on a GPU, else none."""
        if budget_tokens < 1:
            raise ValueError(f"a nano-batch needs room for a token, got {budget_tokens}")
        if exact and controller is not None:
            raise ValueError("exact isolation runs nano-batches of one size: no controller")
        self.super_model = super_model
        self.budget_tokens = budget_tokens
        self.exact = exact
        # On a device every size is compiled for; a CPU does not mind how many there are.
        on_cpu = super_model.device.type == "cpu"
        self._bucket_step = CPU_BUCKET_STEP if bucket_step is None and on_cpu else bucket_step
        self._rows = optimiser.PooledRows(super_model)
        self._references = References(super_model.device)
        self._controller = controller
        self._group = 0
        """Changes with every job that comes or goes."""
        self._jobs: dict[str, EngineJob] = {}
        self._suspects: list[str] = []
        self._ahead = int(super_model.device.type == "cuda") if ahead is None else ahead
        self._in_flight: deque[InFlight] = deque()
        self._last_arrival = 0.0

    @property
    def jobs(self) -> list[str]:
        return list(self._jobs)

    def attach(
        self,
        name: str,
        weights: AdapterWeights,
        *,
        scale: float,
        dropout: float = 0.0,
        seed: int = 0,
        weight: float = 1.0,
        optimiser: AdamW | None = None,
        dpo: Dpo | None = None,
        state: JobState | None = None,
    ) -> None:
        """Between nano-batches, without touching the neighbours. With `dpo` the job is fed pairs.
        With `state` the job goes on where it was detached; `weights` are then its weights of that
        time. What lies in host memory is copied while the neighbours wait: `moving.bring` copies it
        before."""
        if not weights:
            raise ValueError(f"job '{name}' adapts no module")
        if weight <= 0:
            raise ValueError(f"job '{name}': its weight must be positive, got {weight}")
        if state is not None:
            check_state(name, weights, state)
        rank = max(pair.a.shape[0] for pair in weights.values())
        self.super_model.attach(name, weights, scale=scale, dropout=dropout)
        self._jobs[name] = EngineJob(
            name,
            seed=seed,
            weight=weight,
            rank=rank,
            optimiser=optimiser or AdamW(),
            preference=Preference(dpo, self._references) if dpo else None,
        )
        if state is not None:
            self._jobs[name].step = state.step
            self._restore_moments(name, state)
        self._group += 1

    def detach(self, name: str) -> None:
        """Free the job's rows. What it was fed and has not stepped on is dropped, and what was
        launched of it is not reported; who wants its state asks before."""
        self._job(name)
        self._drop_reports(name)
        self._leave(name)

    def step(self, name: str) -> int:
        """Steps the job has taken, all told; the last one may not have been reported yet."""
        return self._job(name).step

    def set_weight(self, name: str, weight: float) -> None:
        """The job's share of tokens from now on, when jobs compete."""
        if weight <= 0:
            raise ValueError(f"job '{name}': its weight must be positive, got {weight}")
        self._job(name).weight = weight

    def is_free(self, name: str) -> bool:
        """All that the job was fed has been launched, its step with it: more may come."""
        return self._job(name).batch is None

    def state(self, name: str) -> JobState:
        """A copy of all that the job's later steps depend on, in host memory."""
        return self.snapshot(name).result()

    def snapshot(self, name: str) -> Snapshot[JobState]:
        """The same, as of now, without waiting for it: the job may go on or leave meanwhile."""
        return moving.snapshot(self.super_model, name, step=self._job(name).step)

    def feed(
        self,
        name: str,
        sequences: Sequences,
        *,
        loss_scale: float,
        coming: Iterable[Unit] = (),
    ) -> None:
        """Add sequences, or pairs, to the job's current batch; the loss of every trained token, or
        pair, counts `loss_scale`. For a mean over the batch that is 1 / its trained tokens, or its
        pairs, which must be known now. `coming` are pairs that are likely to be fed next: those
        whose references are made now need no pass of their own."""
        job = self._job(name)
        if job.kind is Kind.EVALUATE:
            raise ValueError(f"job '{name}' is being evaluated")
        if job.requested:
            raise ValueError(f"job '{name}' waits for its step: its batch is complete")
        units = [sequences[index] for index in range(len(sequences))]
        check_units(job, units, self.super_model.vocabulary)
        room = self.budget_tokens if job.preference else 0
        job.feed(units, loss_scale, self._checked(job, coming), room=room)

    def _checked(self, job: EngineJob, units: Iterable[Unit]) -> Iterator[Unit]:
        for unit in units:
            check_units(job, (unit,), self.super_model.vocabulary)
            yield unit

    def request_step(
        self, name: str, *, learning_rate: float, max_grad_norm: float | None = None
    ) -> None:
        """Step the job once all it was fed is through backward."""
        job = self._job(name)
        if job.kind is not Kind.TRAIN:
            raise ValueError(f"job '{name}' was fed nothing to step on")
        if job.requested:
            raise ValueError(f"job '{name}' waits for its step already")
        job.request_step(StepRequest(learning_rate, max_grad_norm))

    def evaluate(self, name: str, sequences: Sequences) -> None:
        """Ask for the mean loss on these sequences, which are read as they are needed and must not
        change; the job must have no batch under way."""
        job = self._job(name)
        if job.kind is not None:
            raise ValueError(f"job '{name}' is busy")
        if job.held_out is None or job.held_out.sequences is not sequences:
            # Once: every evaluation of a job is on the same rows.
            rows = (sequences[index] for index in range(len(sequences)))
            targets = check_units(job, rows, self.super_model.vocabulary)
            if not targets:
                raise ValueError(f"job '{name}' has no trained token to be evaluated on")
            counted = len(sequences) if job.preference else targets
            rows = self._own_rows(job, sequences)
            job.held_out = HeldOut(sequences, targets, loss_scale=1.0 / counted, rows=rows)
        # A controller may make them larger before the evaluation is over.
        largest = self.budget_tokens if self._controller is None else self._controller.limit
        job.start_evaluation(window_tokens=EVALUATION_WINDOW * largest)

    def has_work(self) -> bool:
        """Something to launch, or to report."""
        return bool(self._in_flight) or any(
            job.has_waiting or job.due or job.kind is Kind.EVALUATE for job in self._jobs.values()
        )

    def run_nano_batch(self) -> Outcome:
        """Compose, launch, step whoever is through, and report the nano-batch whose turn it is,
        which is another one if the engine runs ahead. Never raises for what one job did."""
        composition = self._compose()
        launched = InFlight(composition, self._group)
        if composition is not None:
            try:
                self._launch(launched, composition)
            except Exception as error:
                # Whatever it was, it is undone; who caused it shows when each job runs by itself.
                return self._undo(composition, error)
        self._settle(launched)
        if not launched.is_empty:
            launched.seal(self.super_model.device)
            self._in_flight.append(launched)
        outcome = Outcome()
        if launched.is_empty or len(self._in_flight) > self._ahead:
            outcome = self._report()
        return self._with_failures(outcome, launched.failures)

    def drain(self) -> Iterator[Outcome]:
        """Report what is under way, and launch nothing."""
        while self._in_flight:
            yield self._report()

    def check_integrity(self) -> None:
        """Books that must agree; for tests and idle moments."""
        self.super_model.check_integrity()
        assert set(self._jobs) == set(self.super_model.jobs)
        assert set(self._suspects) <= set(self._jobs)
        for job in self._jobs.values():
            job.check_integrity()
            if job.kind is not Kind.TRAIN:
                rows = list(self.super_model.views(job.name).values())
                assert not optimiser.gradient_norm(rows), f"{job.name} has a gradient of no batch"

    def _leave(self, name: str) -> None:
        self.super_model.detach(name)
        del self._jobs[name]
        self._group += 1
        self._suspects = [other for other in self._suspects if other != name]

    def _drop_reports(self, name: str) -> None:
        for launched in self._in_flight:
            for batch in launched.batches():
                batch.dropped |= batch.job == name

    def _job(self, name: str) -> EngineJob:
        if name not in self._jobs:
            raise ValueError(f"no job '{name}' is attached")
        return self._jobs[name]

    def _own_rows(self, job: EngineJob, sequences: Sequences) -> Sequences:
        """What is evaluated here."""
        return sequences

    def _waiting(self) -> list[Waiting]:
        waiting = [job.waiting() for job in self._jobs.values() if job.has_waiting]
        if self._suspects:
            waiting = [each for each in waiting if each.job == self._suspects[0]]
        return waiting

    def _compose(self) -> Composition | None:
        waiting = self._waiting()
        if self._controller is not None:
            self.budget_tokens = self._controller.budget
        budget = self.budget_tokens
        return compose(waiting, budget=budget, buckets=self._buckets(budget), in_order=self.exact)

    def _buckets(self, budget: int) -> tuple[int, ...]:
        if self.exact:
            return (budget,)
        controller = self._controller
        if controller is not None and not controller.is_settled and self._bucket_step is None:
            return controller.buckets(budget)
        return buckets_for(budget, step=self._bucket_step)

    def _launch(self, launched: InFlight, composition: Composition) -> None:
        """Forward, and for training backward."""
        kind, device = composition.kind, self.super_model.device
        train, adapted = kind is Kind.TRAIN, kind is not Kind.REFERENCE
        for pick in composition.picks:
            launched.passages.append(self._jobs[pick.job].passage(pick.indices))
        shares = [
            self._jobs[passage.batch.job].share(passage, adapted=adapted)
            for passage in launched.passages
        ]
        batch = pack(shares, composition.rows, device)
        pairs = None if kind is Kind.EVALUATE else pack_pairs(batch, launched.passages, device)
        with torch.set_grad_enabled(train), self.super_model.routed(batch, train=train):
            per_token = self.super_model.token_losses(batch)
            if train:
                loss.backward(per_token, self._scales(per_token, batch, pairs))
            self.super_model.launched()
        launched.keep_losses(per_token, batch)
        launched.settled = self.super_model.settled
        if pairs is not None and not adapted:
            self._references.write(pairs.places, pairs.reference, pairs.sums(per_token))
        for passage in launched.passages:
            if adapted:
                passage.batch.launched(passage.fed)
            if passage.batch.job in self._suspects and not passage.batch.left:
                self._suspects.remove(passage.batch.job)
        for name, credit in composition.credits.items():
            self._jobs[name].credit = credit

    def _scales(
        self, losses: torch.Tensor, batch: PackedBatch, pairs: PackedPairs | None
    ) -> torch.Tensor:
        """What every token's loss counts in its job's loss."""
        if pairs is None:
            return batch.loss_scales
        return pairs.scales(losses, self._references.read(pairs.reference), batch.loss_scales)

    def _settle(self, launched: InFlight) -> None:
        """Launch the steps and the ends of evaluations that are due now."""
        due: list[EngineJob] = []
        for job in list(self._jobs.values()):
            try:
                job.draw()
                if job.due:
                    due.append(job)
                elif job.evaluated:
                    launched.evaluations.append(self._finish_evaluation(job))
            except JobFailed as failure:
                launched.failures.append(failure)
                self._leave(job.name)
            except (RuntimeError, OverflowError, ValueError, OSError) as error:
                # A row that can no longer be read: nobody else is held up by it.
                launched.failures.append(JobFailed(f"step {job.step}: {error}", job=job.name))
                self._leave(job.name)
        calls = deque(self._rows.in_calls([job.due_step() for job in due]))
        while calls:
            together = calls.popleft()
            try:
                norms = self._step(together)
            except (RuntimeError, OverflowError, ValueError, OSError) as error:
                # A rate beyond what float32 holds, or no room for the lists: before any weight.
                if len(together) > 1:
                    # Whose fault it is shows when each steps by itself.
                    calls.extend([each] for each in together)
                    continue
                reason = f"step {together[0].number}: {error}"
                launched.failures.append(JobFailed(reason, job=together[0].job))
                self._leave(together[0].job)
                continue
            batches: list[Batch] = []
            for each in together:
                job = self._jobs[each.job]
                assert job.batch is not None
                batches.append(job.batch)
                job.stepped()
            launched.steps.append(LaunchedSteps(batches, norms))

    def _step(self, together: list[DueStep]) -> torch.Tensor:
        """Their norms, which reach the host later."""
        try:
            return to_host(optimiser.step_jobs(self._rows, together))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        self.super_model.release_graphs()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return to_host(optimiser.step_jobs(self._rows, together))

    def _finish_evaluation(self, job: EngineJob) -> LaunchedEvaluation:
        # Attention may hide a NaN in its queries behind a finite loss; no gradient would show it.
        finite = optimiser.are_finite(self.super_model.rows(job.name).of("value"))
        assert job.batch is not None
        batch = job.batch
        return LaunchedEvaluation(job, batch, job.evaluation_launched(), to_host(finite))

    def _report(self) -> Outcome:
        """What the nano-batch that was launched first has brought."""
        if not self._in_flight:
            return Outcome()
        arrived = self._in_flight.popleft()
        arrived.wait()
        now = time.perf_counter()
        # Of two that were launched together, the second one began when the first was through.
        seconds = now - max(arrived.started, self._last_arrival)
        self._last_arrival = now
        results = arrived.results()
        for failure in results.failures:
            self._drop_reports(failure.job)
            if failure.job in self._jobs:
                self._leave(failure.job)
        composition = arrived.composition
        outcome = Outcome(
            kind=composition.kind if composition else None,
            rows=composition.rows if composition else 0,
            tokens=arrived.tokens,
            seconds=seconds if composition else 0.0,
            steps=tuple(results.steps),
            evaluations=tuple(results.evaluations),
            failures=tuple(results.failures),
        )
        return self._measured(arrived, outcome)

    def _with_failures(self, outcome: Outcome, found: list[JobFailed]) -> Outcome:
        """What failed while launching is known now, and cannot be fed any more. A job fails once,
        whatever else is still to come back of it."""
        for failure in found:
            self._drop_reports(failure.job)
        told = {failure.job for failure in outcome.failures}
        new = [failure for failure in found if failure.job not in told]
        return replace(outcome, failures=(*outcome.failures, *new)) if new else outcome

    def _measured(
        self, arrived: InFlight, outcome: Outcome, *, out_of_memory: bool = False
    ) -> Outcome:
        """Tell the controller, if there is one."""
        composition = arrived.composition
        if self._controller is None or composition is None:
            return outcome
        if not (arrived.settled or out_of_memory):
            return outcome
        measure = Measure(
            budget=composition.budget,
            rows=composition.rows,
            tokens=sum(outcome.tokens.values()),
            seconds=round(outcome.seconds, 6),
            train=composition.kind is Kind.TRAIN,
            full=composition.full,
            group=arrived.group,
            out_of_memory=out_of_memory,
        )
        decisions = self._controller.observe(measure)
        self.budget_tokens = self._controller.budget
        return replace(outcome, measure=measure, decisions=decisions)

    def _undo(self, composition: Composition, error: Exception) -> Outcome:
        """The nano-batch broke off; what was launched before it stays."""
        jobs = [self._jobs[pick.job] for pick in composition.picks]
        if is_out_of_memory(error):
            return self._out_of_memory(composition, jobs, error)
        # Other bits than were proven are not what an exact run goes on with.
        if not self.exact and self.super_model.runs_uncompiled(error):
            return self._uncompiled(jobs, error)
        return self._broken_off(jobs, error)

    def _out_of_memory(
        self, composition: Composition, jobs: list[EngineJob], error: BaseException
    ) -> Outcome:
        self._drop_partial_batches(jobs)
        held_graphs = self.super_model.release_graphs()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if held_graphs:
            logger.warning("out of memory: captured graphs give theirs back")
            return Outcome(error=f"out of memory: {error}")
        alone = len(jobs) == 1 and len(composition.picks[0].indices) == 1
        if alone or self.exact or self.budget_tokens <= MIN_BUDGET:
            return self._fail_or_suspect(jobs, f"out of memory on {composition.tokens} tokens")
        outcome = Outcome(error=f"out of memory: {error}")
        if self._controller is None:
            self.budget_tokens = max(MIN_BUDGET, self.budget_tokens // 2)
        else:
            launched = InFlight(composition, self._group)
            outcome = self._measured(launched, outcome, out_of_memory=True)
        logger.warning(
            "out of memory on %d rows: going on with nano-batches of %d tokens",
            composition.rows,
            self.budget_tokens,
        )
        return outcome

    def _uncompiled(self, jobs: list[EngineJob], error: Exception) -> Outcome:
        # The compiler's own error stands in its second line.
        reason = " ".join((str(error).strip() or type(error).__name__).splitlines()[:2])
        logger.warning("the layers cannot be compiled, going on without: %s", reason)
        self._drop_partial_batches(jobs)
        return Outcome(error=f"not compiled: {reason}")

    def _broken_off(self, jobs: list[EngineJob], error: Exception) -> Outcome:
        logger.warning("a nano-batch broke off", exc_info=error)
        self._drop_partial_batches(jobs)
        return self._fail_or_suspect(jobs, f"{type(error).__name__}: {error}")

    def _fail_or_suspect(self, jobs: list[EngineJob], reason: str) -> Outcome:
        """There is no single culprit in company, and a device may stumble once: every job of the
        nano-batch runs its whole batch by itself next, and fails only if it fails then."""
        if jobs[0].name not in self._suspects:
            self._suspects += [job.name for job in jobs]
            return Outcome(error=reason)
        if self._in_flight:
            # Its last step may be under way: it hears of that, and is tried once more.
            return self._report()
        failure = JobFailed(f"step {jobs[0].step + 1}: {reason}", job=jobs[0].name)
        self._leave(jobs[0].name)
        return Outcome(error=reason, failures=(failure,))

    def _drop_partial_batches(self, jobs: list[EngineJob]) -> None:
        for job in jobs:
            optimiser.clear_gradients(list(self.super_model.views(job.name).values()))
            job.replay()

    def _restore_moments(self, name: str, state: JobState) -> None:
        moments = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
        self.super_model.fill_moments(name, moments)
