"""Continuous batching for training: the loop's inner step, and the interface a driver feeds it
through.

A driver attaches jobs, feeds each one sequences and asks for its step; every `run_nano_batch`
composes what is waiting, launches it forward and backward, and steps the jobs whose batch is
through. On a GPU the results of a nano-batch are read when the next one is under way (`ahead`), so
that the device never waits for the host; a job may be fed its next batch before it hears of its
last step. The engine knows no files, no schedules and no wall-clock decisions.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from tlora.core.errors import JobFailed
from tlora.core.sequence import Sequences, Unit
from tlora.model.adapters import AdapterWeights
from tlora.model.snapshot import Snapshot
from tlora.model.super_model import SuperModel
from tlora.training import moving, optimiser
from tlora.training.batch import Preference, StepRequest
from tlora.training.checks import check_state, check_units
from tlora.training.compose import Composition, Kind, Waiting, compose
from tlora.training.controller import Controller
from tlora.training.engine_job import EngineJob, HeldOut, JobState
from tlora.training.in_flight import InFlight, LaunchedEvaluation, LaunchedSteps, UnderWay, to_host
from tlora.training.launching import launch
from tlora.training.optimiser import AdamW
from tlora.training.outcome import Outcome
from tlora.training.preference import Dpo
from tlora.training.recovery import Recovery, make_room
from tlora.training.references import References
from tlora.training.sizing import CPU_BUCKET_STEP, Sizing
from tlora.training.stepping import JOB_ERRORS, take_steps

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
        # On a device every size is compiled for; a CPU does not mind how many there are.
        on_cpu = super_model.device.type == "cpu"
        self._sizing = Sizing(
            budget_tokens,
            bucket_step=CPU_BUCKET_STEP if bucket_step is None and on_cpu else bucket_step,
            exact=exact,
            controller=controller,
        )
        self._recovery = Recovery(super_model, self._sizing, exact=exact)
        self.super_model = super_model
        self.exact = exact
        self._rows = optimiser.PooledRows(super_model)
        self._references = References(super_model.device)
        self._group = 0
        """Changes with every job that comes or goes."""
        self._jobs: dict[str, EngineJob] = {}
        self._ahead = int(super_model.device.type == "cuda") if ahead is None else ahead
        self._under_way = UnderWay()

    @property
    def budget_tokens(self) -> int:
        """Of a nano-batch."""
        return self._sizing.budget_tokens

    @budget_tokens.setter
    def budget_tokens(self, budget_tokens: int) -> None:
        self._sizing.budget_tokens = budget_tokens

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
        time. What lies in host memory is copied while the neighbours wait, and rows are found:
        `moving.bring` copies it before, and `moving.keep_rows` finds them."""
        if not weights:
            raise ValueError(f"job '{name}' adapts no module")
        if weight <= 0:
            raise ValueError(f"job '{name}': its weight must be positive, got {weight}")
        if state is not None:
            check_state(name, weights, state)
        rank = max(pair.a.shape[0] for pair in weights.values())
        moments = None if state is None else state.moments
        self.super_model.attach(name, weights, scale=scale, dropout=dropout, moments=moments)
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
        self._group += 1

    def detach(self, name: str) -> None:
        """Free the job's rows. What it was fed and has not stepped on is dropped, and what was
        launched of it is not reported; who wants its state asks before."""
        self._job(name)
        self._under_way.drop(name)
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
        job.start_evaluation(window_tokens=EVALUATION_WINDOW * self._sizing.largest_tokens)

    def has_work(self) -> bool:
        """Something to launch, or to report."""
        return bool(self._under_way) or any(
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
            self._under_way.add(launched, self.super_model.device)
        outcome = Outcome()
        if launched.is_empty or len(self._under_way) > self._ahead:
            outcome = self._report()
        return self._with_failures(outcome, launched.failures)

    def drain(self) -> Iterator[Outcome]:
        """Report what is under way, and launch nothing."""
        while self._under_way:
            yield self._report()

    def check_integrity(self) -> None:
        """Books that must agree; for tests and idle moments."""
        self.super_model.check_integrity()
        assert set(self._jobs) == set(self.super_model.jobs)
        assert set(self._recovery.suspects) <= set(self._jobs)
        for job in self._jobs.values():
            job.check_integrity()
            if job.kind is not Kind.TRAIN:
                rows = list(self.super_model.views(job.name).values())
                assert not optimiser.gradient_norm(rows), f"{job.name} has a gradient of no batch"

    def _leave(self, name: str) -> None:
        self.super_model.detach(name)
        del self._jobs[name]
        self._group += 1
        self._recovery.forget(name)

    def _job(self, name: str) -> EngineJob:
        if name not in self._jobs:
            raise ValueError(f"no job '{name}' is attached")
        return self._jobs[name]

    def _own_rows(self, job: EngineJob, sequences: Sequences) -> Sequences:
        """What is evaluated here."""
        return sequences

    def _waiting(self) -> list[Waiting]:
        waiting = [job.waiting() for job in self._jobs.values() if job.has_waiting]
        return self._recovery.allowed(waiting)

    def _compose(self) -> Composition | None:
        budget, waiting = self._sizing.renew(), self._waiting()
        buckets = self._buckets(budget)
        return compose(waiting, budget=budget, buckets=buckets, in_order=self.exact)

    def _buckets(self, budget: int) -> tuple[int, ...]:
        return self._sizing.buckets(budget)

    def _launch(self, launched: InFlight, composition: Composition) -> None:
        """Forward, and for training backward."""
        launch(launched, composition, self._jobs, self.super_model, self._references)
        for passage in launched.passages:
            if composition.kind is not Kind.REFERENCE:
                passage.batch.launched(passage.fed)
            self._recovery.went_through(passage.batch)
        for name, credit in composition.credits.items():
            self._jobs[name].credit = credit

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
                self._fail(launched, failure)
            except JOB_ERRORS as error:
                # A row that can no longer be read: nobody else is held up by it.
                self._fail(launched, JobFailed(f"step {job.step}: {error}", job=job.name))
        steps = [job.due_step() for job in due]
        for found in take_steps(self._rows, steps, make_room=lambda: make_room(self.super_model)):
            if isinstance(found, JobFailed):
                self._fail(launched, found)
                continue
            batches = [self._jobs[each.job].stepped() for each in found.together]
            launched.steps.append(LaunchedSteps(batches, found.norms))

    def _fail(self, launched: InFlight, failure: JobFailed) -> None:
        launched.failures.append(failure)
        self._leave(failure.job)

    def _finish_evaluation(self, job: EngineJob) -> LaunchedEvaluation:
        # Attention may hide a NaN in its queries behind a finite loss; no gradient would show it.
        finite = optimiser.are_finite(self.super_model.rows(job.name).of("value"))
        assert job.batch is not None
        batch = job.batch
        return LaunchedEvaluation(job, batch, job.evaluation_launched(), to_host(finite))

    def _report(self) -> Outcome:
        """What the nano-batch that was launched first has brought."""
        if not self._under_way:
            return Outcome()
        arrived, outcome = self._under_way.first()
        for failure in outcome.failures:
            self._under_way.drop(failure.job)
            if failure.job in self._jobs:
                self._leave(failure.job)
        return self._sizing.measured(arrived, outcome)

    def _with_failures(self, outcome: Outcome, found: list[JobFailed]) -> Outcome:
        """What failed while launching is known now, and cannot be fed any more. A job fails once,
        whatever else is still to come back of it."""
        for failure in found:
            self._under_way.drop(failure.job)
        told = {failure.job for failure in outcome.failures}
        new = [failure for failure in found if failure.job not in told]
        return replace(outcome, failures=(*outcome.failures, *new)) if new else outcome

    def _undo(self, composition: Composition, error: Exception) -> Outcome:
        """The nano-batch broke off; what was launched before it stays."""
        jobs = [self._jobs[pick.job] for pick in composition.picks]
        found = self._recovery.after(error, composition, jobs, group=self._group)
        if isinstance(found, Outcome):
            return found
        if self._under_way:
            # Its last step may be under way: it hears of that, and is tried once more.
            return self._report()
        job, reason = found.job, found.reason
        self._leave(job.name)
        failure = JobFailed(f"step {job.step + 1}: {reason}", job=job.name)
        return Outcome(error=reason, failures=(failure,))
