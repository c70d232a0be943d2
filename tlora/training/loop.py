"""The training loop of a fixed set of jobs, and what it tells whoever watches."""

from collections.abc import Iterable
from typing import Protocol

from tlora.training.driver import JobDriver, Status
from tlora.training.engine import Engine
from tlora.training.outcome import EvaluationDone, Outcome, StepDone


class Observer(Protocol):
    """Told of everything in order. Whatever it raises ends the run."""

    def on_nano_batch(self, outcome: Outcome) -> None: ...

    def on_step(self, driver: JobDriver, done: StepDone) -> None: ...

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None: ...

    def on_end(self, driver: JobDriver) -> None:
        """The job has completed or stopped early and is still attached, or has failed and is
        gone."""
        ...


def run_jobs(engine: Engine, drivers: Iterable[JobDriver], observer: Observer) -> None:
    """Train attached jobs until each is over; a job leaves the engine as soon as it is."""
    active = {driver.name: driver for driver in drivers}
    while active:
        for driver in list(active.values()):
            driver.advance(engine)
            if driver.status is not Status.RUNNING:
                observer.on_end(driver)
                engine.detach(driver.name)
                del active[driver.name]
        if not engine.has_work():
            continue
        outcome = engine.run_nano_batch()
        observer.on_nano_batch(outcome)
        for step in outcome.steps:
            active[step.job].on_step(step)
            observer.on_step(active[step.job], step)
        for evaluation in outcome.evaluations:
            active[evaluation.job].on_evaluation(evaluation, engine)
            observer.on_evaluation(active[evaluation.job], evaluation)
        for failure in outcome.failures:
            driver = active.pop(failure.job)
            driver.on_failure(failure)
            observer.on_end(driver)
