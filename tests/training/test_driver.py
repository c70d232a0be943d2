"""One job's story: which rows it sees, what a step's loss is, when it is evaluated and over."""

import json
from types import SimpleNamespace

import pytest
from support.tiny import (
    base_loss,
    distance,
    evaluate,
    identical,
    sequence,
    sequences,
    spec,
    tiny_engine,
)

from tlora.core.errors import JobFailed
from tlora.core.sequence import TokenSequence
from tlora.model.snapshot import Snapshot
from tlora.training.driver import JobDriver, Status
from tlora.training.engine import Engine
from tlora.training.learning_rate import learning_rate
from tlora.training.outcome import EvaluationDone, StepDone


class Rows(list[TokenSequence]):
    """A dataset in memory that remembers which rows were read."""

    def __init__(self, rows: list[TokenSequence]) -> None:
        super().__init__(rows)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> TokenSequence:
        self.read.append(index)
        return super().__getitem__(index)


class Story:
    """A driver run to its end by itself, with all that happened."""

    def __init__(
        self, driver: JobDriver, engine: Engine | None = None, *, until: int | None = None
    ) -> None:
        self.driver = driver
        self.engine = engine or tiny_engine()
        self.steps: list[StepDone] = []
        self.evaluations: list[EvaluationDone] = []
        if driver.name not in self.engine.jobs:
            driver.attach(self.engine, self.engine.super_model.new_adapter(driver.spec))
        self.run(until)

    def run(self, until: int | None) -> None:
        while self.driver.step != until:
            self.driver.advance(self.engine)
            if self.driver.status is not Status.RUNNING:
                return
            outcome = self.engine.run_nano_batch()
            for step in outcome.steps:
                self.driver.on_step(step)
            for evaluation in outcome.evaluations:
                self.driver.on_evaluation(evaluation, self.engine)
            self.steps += outcome.steps
            self.evaluations += outcome.evaluations


def test_epochs_cover_all_rows_and_end_with_a_partial_batch() -> None:
    """Ten rows in batches of four for two epochs: six steps, each row once an epoch."""
    rows = Rows(sequences(1, 10))
    train = {"num_train_epochs": 2.0, "max_steps": None, "batch_size": 4}
    story = Story(JobDriver(spec(train=train), rows))
    assert story.driver.total_steps == 6
    assert [step.sequences for step in story.steps] == [4, 4, 2, 4, 4, 2]
    assert sorted(rows.read[:10]) == sorted(rows.read[10:]) == list(range(10))
    assert rows.read[:10] != rows.read[10:]
    assert story.driver.status is Status.COMPLETED
    assert (story.driver.step, story.driver.sequences_seen, story.driver.epoch) == (6, 20, 2.0)
    assert story.driver.tokens_seen == 2 * sum(len(row) for row in rows)


@pytest.mark.parametrize(
    ("train", "steps"),
    [
        ({"max_steps": 7, "num_train_epochs": 1.0}, 7),
        ({"max_steps": None, "num_train_epochs": 0.5}, 2),
        ({"max_steps": None, "num_train_epochs": 1.0, "batch_size": 100}, 1),
    ],
)
def test_total_steps(train: dict, steps: int) -> None:
    """max_steps wins over epochs; a part of an epoch is rounded up; a batch is at most the data."""
    driver = JobDriver(spec(train={"batch_size": 3, **train}), sequences(1, 10))
    assert driver.total_steps == steps
    assert len(Story(driver).steps) == steps


@pytest.mark.parametrize("loss", ["token_mean", "sum"])
def test_a_steps_loss_is_over_its_own_batch(loss: str) -> None:
    """Each batch, the partial one too, is normalised by its own trained tokens; or summed. With a
    rate of zero every step sees the base model."""
    rows = Rows(sequences(1, 10))
    train = {"learning_rate": 0.0, "max_steps": 3, "batch_size": 4, "loss": loss}
    story = Story(JobDriver(spec(train=train), rows))
    for number, step in enumerate(story.steps):
        batch = [list.__getitem__(rows, i) for i in rows.read[4 * number : 4 * number + 4]]
        targets = sum(row.num_targets for row in batch)
        assert step.target_tokens == targets
        expected = base_loss(batch) * (targets if loss == "sum" else 1)
        assert step.loss == pytest.approx(expected, rel=1e-6)


def test_the_rate_follows_the_schedule() -> None:
    """Every step is taken with the rate of its number."""
    job = spec(train={"lr_scheduler_type": "cosine", "warmup_steps": 2, "max_steps": 7})
    story = Story(JobDriver(job, sequences(1, 6)))
    expected = [learning_rate(job.train, step, 7) for step in range(7)]
    assert [step.learning_rate for step in story.steps] == expected
    assert len(set(expected)) > 5


@pytest.mark.parametrize(
    ("every", "expected"), [(None, [0, 5]), (2, [0, 2, 4, 5]), (5, [0, 5]), (9, [0, 5])]
)
def test_evaluation_at_the_start_now_and_then_and_at_the_end(
    every: int | None, expected: list[int]
) -> None:
    """Before the first step, every so many steps, and once after the last."""
    job = spec(train={"max_steps": 5}, evaluation={"steps": every})
    held_out = sequences(2, 5)
    story = Story(JobDriver(job, sequences(1, 8), held_out))
    assert [done.step for done in story.evaluations] == expected
    assert {done.sequences for done in story.evaluations} == {5}
    assert story.driver.first_eval_loss == pytest.approx(base_loss(held_out), rel=1e-6)
    assert story.driver.eval_loss == story.evaluations[-1].loss
    assert story.driver.status is Status.COMPLETED


def test_no_held_out_rows_no_evaluation() -> None:
    """A job without held-out rows keeps no best."""
    story = Story(JobDriver(spec(evaluation={"steps": 1}), sequences(1, 8)))
    assert not story.evaluations and story.driver.best is None


def test_the_best_adapter_is_kept() -> None:
    """The weights of the lowest held-out loss after a step, not the last, and as they were then."""
    job = spec(train={"max_steps": 12, "learning_rate": 0.05}, evaluation={"steps": 1})
    story = Story(JobDriver(job, sequences(1, 4), held_out := sequences(2, 6)))
    best = story.driver.best
    after_steps = story.evaluations[1:]
    lowest = min(after_steps, key=lambda done: done.loss)
    assert best is not None and best.weights is not None
    assert (best.step, best.loss) == (lowest.step, lowest.loss)
    assert best.step < 12, "the example must overfit"
    assert not identical(best.weights.result(), story.engine.super_model.weights("job"))
    other = tiny_engine()
    other.attach("best", best.weights.result(), scale=job.lora.scale)
    assert evaluate(other, "best", held_out).loss == pytest.approx(best.loss, rel=1e-6)


ENGINE = SimpleNamespace(super_model=SimpleNamespace(snapshot=lambda name, make: Snapshot.of({})))


def told(losses: list[float], *, patience: int, total_steps: int = 100) -> JobDriver:
    """A driver that was told these held-out losses, the first before any step."""
    job = spec(train={"max_steps": total_steps}, evaluation={"steps": 1, "patience": patience})
    driver = JobDriver(job, sequences(1, 4), sequences(2, 2))
    for step, loss in enumerate(losses):
        driver.step = step
        driver.on_evaluation(EvaluationDone("job", step, loss, 1, 1, 1), ENGINE)
    return driver


def test_early_stopping_by_patience() -> None:
    """So many evaluations in a row without improvement end the job, with the numbers why."""
    driver = told([5.0, 1.0, 0.9, 0.95, 0.92], patience=2)
    assert driver.status is Status.STOPPED_EARLY
    assert "not improved on 0.9000 (step 2) for 2 evaluations" in str(driver.reason)


@pytest.mark.parametrize(
    "losses", [[5.0, 1.0, 1.1, 0.9, 1.0], [0.5, 1.0, 0.9, 0.8], [1.0, 2.0, 2.0]]
)
def test_patience_is_not_lost_too_soon(losses: list[float]) -> None:
    """An improvement starts the count again, and the base's own loss does not count."""
    assert told(losses, patience=2).status is Status.RUNNING


def test_a_job_that_ends_anyway_has_not_stopped_early() -> None:
    """The evaluation after the last step completes a job even where it runs out of patience."""
    driver = told([5.0, 1.0, 1.1, 1.2], patience=2, total_steps=3)
    assert driver.status is Status.RUNNING and driver.reason is None


def test_early_stopping_in_a_run() -> None:
    """A job that overfits at once stops before its last step; its best adapter is its first."""
    job = spec(
        train={"max_steps": 40, "learning_rate": 0.3, "lr_scheduler_type": "constant"},
        evaluation={"steps": 1, "patience": 3},
    )
    story = Story(JobDriver(job, sequences(1, 4), sequences(2, 6)))
    assert story.driver.status is Status.STOPPED_EARLY
    assert story.driver.step < 40 and story.driver.best is not None
    assert story.driver.step == story.driver.best.step + 3


def test_a_failure_is_recorded() -> None:
    """A failed job knows why, without its own name again."""
    driver = JobDriver(spec(), sequences(1, 4))
    driver.on_failure(JobFailed("the loss is nan", job="job"))
    assert (driver.status, driver.reason) == (Status.FAILED, "the loss is nan")
    engine = tiny_engine()
    driver.advance(engine)
    assert not engine.has_work()


def test_a_batch_without_a_trained_token_is_refused() -> None:
    """Its mean would be nothing by nothing; the rows are named."""
    rows = [sequence([1, 2, 3], prompt=3, origin=f"f:{line}") for line in (1, 2)]
    with pytest.raises(ValueError, match=r"without a trained token \(rows f:.*f:"):
        Story(JobDriver(spec(), rows))


def test_going_on_from_progress_equals_not_having_stopped() -> None:
    """State and progress, through JSON, in a new driver and engine: the same steps to the bit."""
    job = spec(
        lora={"lora_dropout": 0.2},
        train={"max_steps": 8, "batch_size": 3, "warmup_steps": 2},
        evaluation={"steps": 2},
    )
    rows, held_out = sequences(1, 10), sequences(2, 4)
    whole = Story(JobDriver(job, rows, held_out))
    first = Story(JobDriver(job, rows, held_out), until=5)
    progress = json.loads(json.dumps(first.driver.progress()))
    state = first.engine.state("job")
    driver, engine = JobDriver(job, rows, held_out), tiny_engine()
    driver.restore(progress)
    driver.attach(engine, state.weights, state)
    second = Story(driver, engine)
    assert first.steps + second.steps == whole.steps
    assert first.evaluations + second.evaluations == whole.evaluations
    assert distance(engine.super_model.weights("job"), whole.engine.super_model.weights("job")) == 0
    assert driver.progress() == whole.driver.progress()


def test_progress_in_mid_batch_repeats_the_batch() -> None:
    """What a checkpoint keeps is the same before and during a batch."""
    driver, engine = JobDriver(spec(train={"batch_size": 9}), sequences(1, 20)), tiny_engine(64)
    driver.attach(engine, engine.super_model.new_adapter(driver.spec))
    before = driver.progress()
    driver.advance(engine)
    assert not engine.run_nano_batch().steps
    assert driver.progress() == before


def test_progress_on_other_rows_is_refused() -> None:
    """A cursor belongs to its data."""
    progress = JobDriver(spec(), sequences(1, 10)).progress()
    with pytest.raises(JobFailed, match=r"had 10 rows .* have 9 now"):
        JobDriver(spec(), sequences(1, 9)).restore(progress)
