"""One job's own story: its batches in order, its learning rate, its evaluations, and when it is
over.

A driver feeds the engine; the engine decides with whom and when. Nothing here knows of other jobs.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tlora.core.errors import DataError, JobFailed
from tlora.core.job import JobSpec
from tlora.core.sequence import Sequences, Unit
from tlora.data.cursor import Cursor, next_batch, total_steps
from tlora.model.adapters import AdapterWeights
from tlora.model.job_rows import of_weights
from tlora.model.snapshot import Snapshot
from tlora.training.engine import Engine
from tlora.training.engine_job import JobState
from tlora.training.learning_rate import learning_rate
from tlora.training.optimiser import AdamW
from tlora.training.outcome import EvaluationDone, StepDone
from tlora.training.preference import Dpo


class Status(Enum):
    WAITING = "waiting"
    """For a place: it has never been attached in this process."""

    RUNNING = "running"
    COMPLETED = "completed"
    STOPPED_EARLY = "stopped_early"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, eq=False)
class Best:
    """The adapter with the lowest held-out loss so far."""

    step: int
    loss: float
    weights: Snapshot[AdapterWeights] | None
    """None after a resume: they were written when they were found."""


class JobDriver:
    def __init__(
        self, spec: JobSpec, train: Sequences, evaluation: Sequences | None = None
    ) -> None:
        self.spec = spec
        self.train = train
        self.evaluation = evaluation
        self.total_steps = total_steps(
            len(train), spec.train.batch_size, spec.train.num_train_epochs, spec.train.max_steps
        )
        self.status = Status.RUNNING
        self.reason: str | None = None
        self.cursor = Cursor()
        """Where the batch after the last step begins."""

        self.step = 0
        self.tokens_seen = 0
        self.sequences_seen = 0
        self.loss: float | None = None
        self.grad_norm: float | None = None
        """Of the last step."""

        self.eval_loss: float | None = None
        self.eval_figures: dict[str, float] = {}
        """Of the last evaluation, besides its loss."""

        self.evaluated_step: int | None = None
        """Where that was."""

        self.first_eval_loss: float | None = None
        self.recent_loss: float | None = None
        """Mean training loss between the last evaluation and the one before it."""

        self.best: Best | None = None
        self._fed: deque[Cursor] = deque()
        """Batches that have been fed and not been heard of: where the one after each begins."""

        self._evaluating = False
        self._evaluation_due = evaluation is not None
        self._without_improvement = 0
        self._loss_sum = 0.0
        self._loss_steps = 0
        """Of the steps since the last evaluation."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.sequences_seen / len(self.train)

    @property
    def is_just_evaluated(self) -> bool:
        """No step has been made since."""
        return self.evaluated_step == self.step

    @property
    def mean_loss(self) -> float | None:
        """Of the steps since the last evaluation, or of all where there is none."""
        return self._loss_sum / self._loss_steps if self._loss_steps else None

    def attach(
        self, engine: Engine, weights: AdapterWeights, state: JobState | None = None
    ) -> None:
        """Enter an engine: anew with these weights, or with the state it left another one with,
        which must have told of all its steps (`Engine.drain`)."""
        spec = self.spec
        if state is not None and state.step != self.step:
            raise ValueError(
                f"job '{self.name}': its state is of step {state.step}, and the last step that it "
                f"has heard of is {self.step}"
            )
        self._fed.clear()
        self._evaluating = False
        engine.attach(
            self.name,
            weights,
            scale=spec.lora.scale,
            dropout=spec.lora.lora_dropout,
            seed=spec.train.seed,
            weight=spec.train.weight,
            optimiser=AdamW.of(spec.train),
            dpo=Dpo.of(spec.train),
            state=state,
        )

    def advance(self, engine: Engine) -> None:
        """Give the engine this job's next work, unless it has some; at the end, be over. A step
        that was launched is not waited for, unless what follows depends on it."""
        if self.status is not Status.RUNNING or self._evaluating:
            return
        if self._fed:
            launched = engine.is_free(self.name)
            if launched and not self._is_looked_at(self.step + len(self._fed)):
                self._feed_batch(engine)
        elif self._evaluation_due and self.evaluation is not None:
            engine.evaluate(self.name, self.evaluation)
            self._evaluating = True
        elif self.step < self.total_steps:
            self._feed_batch(engine)
        else:
            self.status = Status.COMPLETED

    def _is_looked_at(self, step: int) -> bool:
        """The adapter is evaluated, saved or finished as it is after this step."""
        saved = self.spec.save.steps
        return self._is_evaluated(step) or (saved is not None and step % saved == 0)

    def _is_evaluated(self, step: int) -> bool:
        """If there is something to evaluate on."""
        every = self.spec.eval.steps
        return step >= self.total_steps or (every is not None and step % every == 0)

    def _feed_batch(self, engine: Engine) -> None:
        train, steps = self.spec.train, self.step + len(self._fed)
        indices, after = next_batch(
            self._fed[-1] if self._fed else self.cursor,
            len(self.train),
            train.batch_size,
            train.seed,
        )
        batch = [self.train[int(index)] for index in indices]
        num_targets = sum(sequence.num_targets for sequence in batch)
        if not num_targets:
            rows = ", ".join(sequence.origin for sequence in batch)
            raise DataError(f"a batch without a trained token (rows {rows})")
        counted = {"token_mean": num_targets, "sum": 1, "dpo": len(batch)}[train.loss]
        coming = self._after(after) if train.on_pairs else ()
        engine.feed(self.name, batch, loss_scale=1.0 / counted, coming=coming)
        engine.request_step(
            self.name,
            learning_rate=learning_rate(train, steps, self.total_steps),
            max_grad_norm=train.max_grad_norm,
        )
        self._fed.append(after)

    def _after(self, cursor: Cursor) -> Iterator[Unit]:
        """The rows from here to the end of the epoch, or of the job."""
        left = self.total_steps - self.step - len(self._fed) - 1
        most = left * self.spec.train.batch_size
        if cursor.position == 0 or not most:
            return
        indices, _ = next_batch(cursor, len(self.train), most, self.spec.train.seed)
        yield from (self.train[int(index)] for index in indices)

    def on_step(self, done: StepDone) -> None:
        """Raises ValueError, with nothing changed, if it has not heard of the step before."""
        if done.step != self.step + 1:
            raise ValueError(
                f"job '{self.name}': told of step {done.step}, and the last step that it has heard "
                f"of is step {self.step}"
            )
        self.step = done.step
        self.cursor = self._fed.popleft()
        self.loss = done.loss
        self.grad_norm = done.grad_norm
        self.tokens_seen += done.tokens
        self.sequences_seen += done.sequences
        self._loss_sum += done.loss
        self._loss_steps += 1
        self._evaluation_due = self.evaluation is not None and self._is_evaluated(self.step)

    def on_evaluation(self, done: EvaluationDone, engine: Engine) -> None:
        self.eval_loss = done.loss
        self.eval_figures = dict(done.figures)
        self.evaluated_step = self.step
        self._evaluation_due = self._evaluating = False
        self.recent_loss = self.mean_loss
        self._loss_sum, self._loss_steps = 0.0, 0
        if self.step == 0:
            self.first_eval_loss = done.loss
        elif self.best is None or done.loss < self.best.loss:
            weights = engine.super_model.snapshot(self.name, of_weights)
            self.best = Best(self.step, done.loss, weights)
            self._without_improvement = 0
        else:
            self._without_improvement += 1
            self._stop_if_out_of_patience()

    def _stop_if_out_of_patience(self) -> None:
        patience = self.spec.eval.patience
        if patience is None or self.best is None or self.step >= self.total_steps:
            return
        if self._without_improvement >= patience:
            self.status = Status.STOPPED_EARLY
            self.reason = (
                f"held-out loss has not improved on {self.best.loss:.4f} (step "
                f"{self.best.step}) for {patience} evaluations"
            )

    def on_failure(self, failure: JobFailed) -> None:
        self.status = Status.FAILED
        self.reason = failure.message

    def progress(self) -> dict[str, object]:
        """What a checkpoint keeps besides the engine's state. It is the same throughout a batch: a
        job that goes on from here runs its current batch again."""
        return {
            "epoch": self.cursor.epoch,
            "position": self.cursor.position,
            "rows": len(self.train),
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "sequences_seen": self.sequences_seen,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "eval_loss": self.eval_loss,
            "eval_figures": self.eval_figures,
            "evaluated_step": self.evaluated_step,
            "first_eval_loss": self.first_eval_loss,
            "best": [self.best.step, self.best.loss] if self.best else None,
            "evaluation_due": self._evaluation_due,
            "without_improvement": self._without_improvement,
            "recent_loss": self.recent_loss,
            "loss_sum": self._loss_sum,
            "loss_steps": self._loss_steps,
        }

    def restore(self, progress: dict[str, Any]) -> None:
        """Go on from `progress`. Raises JobFailed if the data are not those of that time."""
        if progress["rows"] != len(self.train):
            raise JobFailed(
                f"its data had {progress['rows']} rows to train on when it was saved and have "
                f"{len(self.train)} now; start it over under another name, or bring the rows back",
                job=self.name,
            )
        self.cursor = Cursor(progress["epoch"], progress["position"])
        self.step = progress["step"]
        self.tokens_seen = progress["tokens_seen"]
        self.sequences_seen = progress["sequences_seen"]
        self.loss = progress["loss"]
        self.eval_loss = progress["eval_loss"]
        self.first_eval_loss = progress["first_eval_loss"]
        if progress["best"] is not None:
            step, loss = progress["best"]
            self.best = Best(step, loss, weights=None)
        self._evaluation_due = progress["evaluation_due"]
        self._without_improvement = progress["without_improvement"]
        # Checkpoints of before these were kept go on without.
        self.grad_norm = progress.get("grad_norm")
        self.eval_figures = progress.get("eval_figures", {})
        self.evaluated_step = progress.get("evaluated_step")
        self.recent_loss = progress.get("recent_loss")
        self._loss_sum = progress.get("loss_sum", 0.0)
        self._loss_steps = progress.get("loss_steps", 0)
        self._stop_if_out_of_patience()
