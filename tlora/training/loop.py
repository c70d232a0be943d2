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


class JobLoop:
    """The jobs that are being driven, and who is told of them."""

    def __init__(self, engine: Engine, drivers: Iterable[JobDriver], observer: Observer) -> None:
        self.engine = engine
        self.active = {driver.name: driver for driver in drivers}
        self._observer = observer
        self._untold: deque[News] = deque()

    def advance(self) -> None:
        """Every job feeds the engine or is over; whoever is over leaves."""
        for driver in list(self.active.values()):
            advance(driver, self.engine)
            if driver.status is Status.FAILED:
                self.engine.detach(driver.name)
                self._observer.on_end(driver)
                del self.active[driver.name]
            elif driver.status is not Status.RUNNING:
                self._observer.on_end(driver)
                self.engine.detach(driver.name)
                del self.active[driver.name]

    def tell(self, outcome: Outcome) -> None:
        if outcome.is_empty:
            return
        self._untold.extend(_news(outcome))
        self._observer.on_nano_batch(outcome)
        while self._untold:
            self._tell_of(self._untold.popleft())

    def rescue(self) -> None:
        """The loop broke. Whoever can still hear of its last step is whole, and can be saved."""
        with suppress(Exception):
            for outcome in self.engine.drain():
                self._untold.extend(_news(outcome))
        while self._untold:
            with suppress(Exception):
                self._tell_of(self._untold.popleft())

    def finish(self) -> list[JobDriver]:
        """Tell what is still under way: those that are left."""
        for outcome in self.engine.drain():
            self.tell(outcome)
        return list(self.active.values())

    def _tell_of(self, news: News) -> None:
        match news:
            case StepDone():
                self.active[news.job].on_step(news)
                self._observer.on_step(self.active[news.job], news)
            case EvaluationDone():
                self.active[news.job].on_evaluation(news, self.engine)
                self._observer.on_evaluation(self.active[news.job], news)
            case JobFailed():
                driver = self.active.pop(news.job)
                driver.on_failure(news)
                self._observer.on_end(driver)


def run_jobs(
    engine: Engine,
    drivers: Iterable[JobDriver],
    observer: Observer,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[JobDriver]:
    """Train attached jobs until each is over; a job leaves the engine as soon as it is. Returns
    those still attached when `should_stop`, asked between nano-batches, ended it before."""
    loop = JobLoop(engine, drivers, observer)
    try:
        while loop.active and not should_stop():
            loop.advance()
            if engine.has_work():
                loop.tell(engine.run_nano_batch())
    except Exception:
        loop.rescue()
        raise
    return loop.finish()


def _news(outcome: Outcome) -> tuple[News, ...]:
    return (*outcome.steps, *outcome.evaluations, *outcome.failures)


def advance(driver: JobDriver, engine: Engine) -> None:
    """What keeps a job from its next batch, a row that cannot be read say, fails that job alone."""
    try:
        driver.advance(engine)
    except (ValueError, OSError) as error:
        driver.on_failure(JobFailed(str(error), job=driver.name))
