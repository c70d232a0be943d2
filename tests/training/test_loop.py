"""The loop over a fixed set of jobs: it ends, it tells, and one job's trouble is its own."""

from dataclasses import dataclass, field

import pytest
from support.tiny import RARE, sequence, sequences, spec, tiny_engine

from tlora.core.errors import DataError
from tlora.core.sequence import TokenSequence
from tlora.training.driver import JobDriver, Status
from tlora.training.engine import Engine
from tlora.training.loop import run_jobs
from tlora.training.outcome import EvaluationDone, Outcome, StepDone


@dataclass
class Diary:
    """An observer that writes everything down."""

    engine: Engine
    events: list[tuple[str, str, int]] = field(default_factory=list)
    num_nano_batches: int = 0
    attached_at_end: dict[str, bool] = field(default_factory=dict)

    def on_nano_batch(self, outcome: Outcome) -> None:
        self.num_nano_batches += 1
        self.events.append(("nano-batch", "", self.num_nano_batches))

    def on_step(self, driver: JobDriver, done: StepDone) -> None:
        assert driver.step == done.step, "the driver knows before the observer"
        self.events.append(("step", driver.name, done.step))

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        assert driver.eval_loss == done.loss
        self.events.append(("evaluation", driver.name, done.step))

    def on_end(self, driver: JobDriver) -> None:
        self.attached_at_end[driver.name] = driver.name in self.engine.jobs
        self.events.append((driver.status.value, driver.name, driver.step))

    def of(self, name: str) -> list[tuple[str, int]]:
        return [(what, step) for what, job, step in self.events if job == name]


def run(drivers: list[JobDriver], engine: Engine | None = None) -> Diary:
    engine = engine or tiny_engine()
    for driver in drivers:
        driver.attach(engine, engine.super_model.new_adapter(driver.spec))
    diary = Diary(engine)
    assert run_jobs(engine, drivers, diary) == []
    assert engine.jobs == [] and not engine.has_work()
    engine.check_integrity()
    return diary


def driver(name: str, *, steps: int = 3, evaluated: bool = False, seed: int = 1) -> JobDriver:
    job = spec(name, train={"max_steps": steps}, evaluation={"steps": 2})
    return JobDriver(job, sequences(seed, 9), sequences(seed + 50, 3) if evaluated else None)


def test_each_job_is_told_in_order() -> None:
    """Evaluation, steps and the end of each job come in their order, the end once."""
    diary = run([driver("plain"), driver("evaluated", steps=5, evaluated=True, seed=2)])
    assert diary.of("plain") == [("step", 1), ("step", 2), ("step", 3), ("completed", 3)]
    assert diary.of("evaluated") == [
        ("evaluation", 0),
        ("step", 1),
        ("step", 2),
        ("evaluation", 2),
        ("step", 3),
        ("step", 4),
        ("evaluation", 4),
        ("step", 5),
        ("evaluation", 5),
        ("completed", 5),
    ]
    assert diary.attached_at_end == {"plain": True, "evaluated": True}


def test_a_nano_batch_is_told_before_what_it_brought() -> None:
    """Every step and evaluation follows its nano-batch."""
    diary = run([driver("a"), driver("b", evaluated=True)])
    assert diary.events[0] == ("nano-batch", "", 1)
    assert diary.num_nano_batches == sum(what == "nano-batch" for what, _, _ in diary.events)


def test_a_job_leaves_when_it_is_over() -> None:
    """A short job ends and frees its rows while a long one goes on."""
    diary = run([driver("short", steps=1), driver("long", steps=8)])
    names = [name for what, name, _ in diary.events if what == "completed"]
    assert names == ["short", "long"]
    end = diary.events.index(("completed", "short", 1))
    assert sum(what == "step" for what, _, _ in diary.events[end:]) >= 6


def test_nothing_to_run() -> None:
    """No jobs, no loop."""
    assert run([]).events == []


def test_a_job_that_stops_early_is_told_as_such() -> None:
    """Its end says so, and it is still attached to be exported."""
    job = spec(
        "hasty",
        train={"max_steps": 40, "learning_rate": 0.3, "lr_scheduler_type": "constant"},
        evaluation={"steps": 1, "patience": 2},
    )
    diary = run([JobDriver(job, sequences(1, 4), sequences(2, 6)), driver("other")])
    assert diary.of("hasty")[-1][0] == "stopped_early"
    assert diary.attached_at_end["hasty"]
    assert diary.of("other")[-1] == ("completed", 3)


def test_a_job_that_the_engine_fails_is_over_and_gone() -> None:
    """A NaN ends its job with the reason; the other completes."""
    engine = tiny_engine()
    engine.super_model.model.get_input_embeddings().weight.data[RARE] = float("nan")
    sick = JobDriver(spec("sick"), [sequence([3, RARE, 5, 6], origin="sick.jsonl:1")])
    well = driver("well")
    diary = run([sick, well], engine)
    assert diary.of("sick") == [("failed", 0)]
    assert "step 1 (rows sick.jsonl:1)" in str(sick.reason)
    assert diary.attached_at_end == {"sick": False, "well": True}
    assert well.status is Status.COMPLETED


class Torn(list[TokenSequence]):
    """Rows of which one cannot be read."""

    error: Exception

    def __getitem__(self, index: int) -> TokenSequence:
        if index == 5:
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize(
    "error", [DataError("not JSON", path="torn.jsonl", line=6), OSError("the disk is gone")]
)
def test_a_row_that_cannot_be_read_fails_its_job_only(error: Exception) -> None:
    """Trouble while a batch is fetched ends that job with the reason; the other completes."""
    rows = Torn(sequences(1, 9))
    rows.error = error
    torn, well = JobDriver(spec("torn", train={"max_steps": 9}), rows), driver("well")
    diary = run([torn, well])
    assert torn.status is Status.FAILED and torn.reason == str(error)
    assert diary.of("torn")[-1] == ("failed", torn.step)
    assert diary.attached_at_end == {"torn": False, "well": True}
    assert well.status is Status.COMPLETED


def test_stopping_between_nano_batches_leaves_the_rest_attached() -> None:
    """Asked to stop, the loop returns the jobs that are not over, still in the engine."""
    engine, drivers = tiny_engine(), [driver("short", steps=1), driver("long", steps=50)]
    for each in drivers:
        each.attach(engine, engine.super_model.new_adapter(each.spec))
    diary = Diary(engine)
    left = run_jobs(engine, drivers, diary, should_stop=lambda: diary.num_nano_batches == 4)
    assert [each.name for each in left] == engine.jobs == ["long"]
    assert left[0].status is Status.RUNNING and diary.num_nano_batches == 4


def test_an_observer_that_raises_ends_the_run() -> None:
    """What the observer raises is not taken for a job's failure."""

    class Angry(Diary):
        def on_step(self, driver: JobDriver, done: StepDone) -> None:
            raise ValueError("no space for metrics")

    engine, job = tiny_engine(), driver("job")
    job.attach(engine, engine.super_model.new_adapter(job.spec))
    with pytest.raises(ValueError, match="no space for metrics"):
        run_jobs(engine, [job], Angry(engine))
