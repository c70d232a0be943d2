"""A run in this process that jobs join and leave between nano-batches, as many at once as have
places."""

import time
from collections.abc import Callable, Iterable

from tlora.core.errors import JobFailed, TloraError
from tlora.core.job import JobSpec
from tlora.data.prepare import PreparedData
from tlora.model.memory import is_out_of_memory
from tlora.runtime.arriving import Arrival, Arrivals, Verdict
from tlora.runtime.elastic.desk import CANCELLED, Desk
from tlora.runtime.elastic.places import Places, Waiting
from tlora.runtime.entering import enter_job, leave_job
from tlora.runtime.recording import Recorder
from tlora.training.driver import JobDriver, Status
from tlora.training.loop import run_jobs

WAIT_S = 0.1
"""For jobs on their way, where nobody trains: a wish to stop goes unseen no longer."""


class OneDevice:
    """The jobs of one engine."""

    def __init__(
        self, recorder: Recorder, drivers: Iterable[JobDriver], places: Places | None = None
    ) -> None:
        """`places`: for these jobs and those that wait; None: for any number."""
        self.recorder = recorder
        self.drivers = {driver.name: driver for driver in drivers}
        self.arrivals = Arrivals()
        self.places = Places() if places is None else places

    def run(self, desk: Desk, should_stop: Callable[[], bool]) -> list[JobDriver]:
        """Until every job is over and nobody asks for more; those that are left when it should stop
        before. Who is on its way then, or waits, comes in when the run goes on, if it was not
        cancelled."""
        while not should_stop():
            self._take_in()
            desk.serve(self, now=not (self.drivers or self.arrivals or self.places))
            self._call()
            if self.drivers:
                self._train(desk, should_stop)
            elif self.arrivals:
                self.arrivals.wait(WAIT_S)
                self.recorder.settle()
            elif desk.is_preparing:
                desk.wait(WAIT_S)
                self.recorder.settle()
            else:
                # Ends are told when their files are on disk, and what was put off until then is
                # asked again.
                self.recorder.save([])
                if not desk.is_asked(now=True):
                    break
        for arrival in self.arrivals.take_dismissed():
            self._enter(arrival)
        return list(self.drivers.values())

    @property
    def names(self) -> list[str]:
        """Of all that are not over."""
        return [*self.drivers, *self.arrivals.names, *self.places.names]

    def admit(self, job: JobSpec, data: PreparedData) -> None:
        recorder = self.recorder
        recorder.forget(job.name)
        recorder.data_keys[job.name] = data.key
        self.places.wait(job, data)
        self._call()
        if job.name in self.places:
            recorder.wait(JobDriver(job, data.train, data.evaluation))

    def waits(self, job: str) -> bool:
        return job in self.places

    def dismiss(self, job: str) -> None:
        """With its state, so that it can go on from here."""
        if job in self.places:
            # Known from the start: it waits because there is no room for it.
            self._bring(self.places.leave(job), Verdict(Status.CANCELLED, CANCELLED))
            return
        if job in self.arrivals:
            self.arrivals.of(job).dismiss(Status.CANCELLED, CANCELLED)
            return
        driver = self.drivers.pop(job, None)
        if driver is None:
            # It has come to its end, which is told when its files are on disk.
            return
        driver.status, driver.reason = Status.CANCELLED, CANCELLED
        self.recorder.checkpoint(driver)
        self.recorder.on_end(driver)
        self.recorder.engine.detach(job)

    def _train(self, desk: Desk, should_stop: Callable[[], bool]) -> None:
        one_comes = self.arrivals.after_a_nano_batch()

        def something_is_due() -> bool:
            return desk.is_asked() or one_comes() or self.places.is_next(self._there())

        left = run_jobs(
            self.recorder.engine,
            list(self.drivers.values()),
            self.recorder,
            should_stop=lambda: should_stop() or something_is_due(),
        )
        self.drivers = {driver.name: driver for driver in left}

    def _there(self) -> list[str]:
        """Who has a place, or will have when it is here."""
        running = (driver for driver in self.drivers.values() if driver.status is Status.RUNNING)
        return [*(driver.name for driver in running), *self.arrivals.names]

    def _call(self) -> None:
        for waiting in self.places.call(self._there()):
            self._bring(waiting)

    def _bring(self, waiting: Waiting, verdict: Verdict | None = None) -> None:
        directory, model = self.recorder.directory, self.recorder.engine.super_model
        self.arrivals.add(Arrival(waiting.job, directory, model, waiting.data, verdict))

    def _take_in(self) -> None:
        """The first that is here. What it came with is let go when this returns: on a device that
        is as large as its rows, and would be missing while others train."""
        arrival = self.arrivals.take()
        if arrival is not None:
            self._enter(arrival)

    def _enter(self, arrival: Arrival) -> None:
        since = time.perf_counter()
        recorder, engine, data = self.recorder, self.recorder.engine, arrival.data
        assert data is not None, f"{arrival.name} was admitted with its data"
        driver = JobDriver(arrival.job, data.train, data.evaluation)
        try:
            arrived = arrival.result()
            if arrival.verdict is not None:
                driver.status, driver.reason = arrival.verdict
                leave_job(driver, arrived.found, recorder)
                return
            enter_job(driver, arrived.brought, arrived.start, recorder)
        except (TloraError, OSError, ValueError, RuntimeError, MemoryError) as error:
            # It cannot be here, and nobody else is touched by it.
            if driver.name in engine.jobs:
                engine.detach(driver.name)
            if is_out_of_memory(error) and arrival.verdict is None and self._there():
                self.places.is_full(self._there())
                self.places.wait(arrival.job, data, again=True)
                recorder.wait(driver, why="no memory beside the others")
                return
            what = "out of memory: " if is_out_of_memory(error) else ""
            message = error.message if isinstance(error, JobFailed) else f"{what}{error}"
            driver.on_failure(JobFailed(message, job=driver.name))
            recorder.on_end(driver)
            return
        recorder.join(driver, since=since)
        self.drivers[driver.name] = driver
