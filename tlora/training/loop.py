"""The training loop of a fixed set of jobs, and what it tells whoever watches."""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from tlora.core.errors import JobFailed
from tlora.training.driver import JobDriver, Status
from tlora.training.engine import Engine
from tlora.training.outcome import EvaluationDone, Outcome, StepDone

News = StepDone | EvaluationDone | JobFailed
"""Of one job."""


class Observer(Protocol):
    """Told of everything in order. Whatever it raises ends the run."""

    def on_nano_batch(self, outcome: Outcome) -> None: ...

    def on_step(self, driver: JobDriver, done: StepDone) -> None: ...

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None: ...

    def on_end(self, driver: JobDriver) -> None:
        """The job has completed, stopped early or paused and is still attached, or has failed and
        is gone."""
        ...


def run_jobs(
    engine: Engine,
    drivers: Iterable[JobDriver],
    observer: Observer,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[JobDriver]:
    """Train attached jobs until each is over; a job leaves the engine as soon as it is. Returns
    those still attached when `should_stop`, asked between nano-batches, ended it before."""
    active = {driver.name: driver for driver in drivers}
    untold: deque[News] = deque()

    def tell(outcome: Outcome) -> None:
        if outcome.is_empty:
            return
        untold.extend(_news(outcome))
        observer.on_nano_batch(outcome)
        while untold:
            tell_of(untold.popleft())

    def tell_of(news: News) -> None:
        match news:
            case StepDone():
                active[news.job].on_step(news)
                observer.on_step(active[news.job], news)
            case EvaluationDone():
                active[news.job].on_evaluation(news, engine)
                observer.on_evaluation(active[news.job], news)
            case JobFailed():
                driver = active.pop(news.job)
                driver.on_failure(news)
                observer.on_end(driver)

    try:
        while active and not should_stop():
            for driver in list(active.values()):
                _advance(driver, engine)
                if driver.status is Status.FAILED:
                    engine.detach(driver.name)
                    observer.on_end(driver)
                    del active[driver.name]
                elif driver.status is not Status.RUNNING:
                    observer.on_end(driver)
                    engine.detach(driver.name)
                    del active[driver.name]
            if engine.has_work():
                tell(engine.run_nano_batch())
    except Exception:
        # Whoever can still hear of its last step is whole, and can be saved.
        with suppress(Exception):
            for outcome in engine.drain():
                untold.extend(_news(outcome))
        while untold:
            with suppress(Exception):
                tell_of(untold.popleft())
        raise
    for outcome in engine.drain():
        tell(outcome)
    return list(active.values())


def _news(outcome: Outcome) -> tuple[News, ...]:
    return (*outcome.steps, *outcome.evaluations, *outcome.failures)


def _advance(driver: JobDriver, engine: Engine) -> None:
    """What keeps a job from its next batch, a row that cannot be read say, fails that job alone."""
    try:
        driver.advance(engine)
    except (ValueError, OSError) as error:
        driver.on_failure(JobFailed(str(error), job=driver.name))
