"""The training loop of one rank of a group: as `loop.run_jobs`, in step with the other ranks."""

from collections.abc import Callable, Iterable

from tlora.core.errors import JobFailed
from tlora.training.driver import JobDriver, Status
from tlora.training.group_engine import GroupEngine
from tlora.training.loop import JobLoop, News, Observer, advance


class GroupLoop(JobLoop):
    """A job that spans ranks ends on all of them at once, by agreement: its own steps are taken
    alike, but one rank alone may know why it must stop, a full disk say."""

    def __init__(
        self, engine: GroupEngine, drivers: Iterable[JobDriver], observer: Observer
    ) -> None:
        super().__init__(engine, drivers, observer)
        self.engine: GroupEngine = engine
        self._asked: set[str] = set()
        """Jobs that this rank has asked all to let go, or has come to the end of."""

    def enter(self, driver: JobDriver) -> None:
        """A job arrives, attached. One that spans ranks must come on all of them between the same
        two nano-batches."""
        # It may have failed here before, and be tried again.
        self._asked.discard(driver.name)
        self.active[driver.name] = driver

    def leave(self, name: str) -> JobDriver:
        """A job moves on; the caller has its state."""
        self.engine.detach(name)
        self._asked.discard(name)
        return self.active.pop(name)

    def advance(self) -> None:
        self._end_agreed()
        for driver in [each for each in self.active.values() if self.engine.spans(each.name)]:
            if driver.name not in self._asked:
                self._advance_spanning(driver)
        spanning = {name: each for name, each in self.active.items() if self.engine.spans(name)}
        self.active = {name: each for name, each in self.active.items() if name not in spanning}
        super().advance()
        self.active |= spanning

    def _advance_spanning(self, driver: JobDriver) -> None:
        advance(driver, self.engine)
        if driver.status in (Status.FAILED, Status.PAUSED):
            # Known here alone, a full disk say.
            paused = driver.status is Status.PAUSED
            self.engine.ask_to_leave(driver.name, driver.reason or "", paused=paused)
            self._asked.add(driver.name)
            driver.status = Status.RUNNING
        elif driver.status is not Status.RUNNING:
            self.engine.ask_to_end(driver.name)
            self._asked.add(driver.name)

    def _end_agreed(self) -> None:
        """Jobs that have come to their end on all ranks leave all of them now."""
        while self.engine.ended:
            driver = self.active.pop(self.engine.ended.pop(0))
            self._asked.discard(driver.name)
            self._observer.on_end(driver)
            self.engine.detach(driver.name)

    def _tell_of(self, news: News) -> None:
        if isinstance(news, JobFailed) and news.job in self.engine.paused:
            self.engine.paused.discard(news.job)
            self._asked.discard(news.job)
            driver = self.active.pop(news.job)
            driver.status, driver.reason = Status.PAUSED, news.message
            self._observer.on_end(driver)
            return
        super()._tell_of(news)


def run_group(
    engine: GroupEngine,
    drivers: Iterable[JobDriver],
    observer: Observer,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    between: Callable[[GroupLoop], bool] = lambda loop: False,
) -> list[JobDriver]:
    """Train this rank's jobs until those of all ranks are over, or one rank should stop. `between`
    is called before each agreement: there jobs may come and go; it says whether more may still
    come here. Returns the jobs that are still attached."""
    loop = GroupLoop(engine, drivers, observer)
    try:
        while True:
            expecting = between(loop)
            loop.advance()
            engine.alive = bool(loop.active) or expecting
            engine.stop = should_stop()
            outcome = engine.run_nano_batch()
            if engine.over:
                break
            loop.tell(outcome)
    except Exception:
        loop.rescue()
        raise
    return loop.finish()
