"""A run in this process that jobs join and leave between nano-batches."""

from collections.abc import Callable, Iterable

from tlora.core.errors import JobFailed, TloraError
from tlora.core.job import JobSpec
from tlora.data.prepare import PreparedData
from tlora.model.memory import is_out_of_memory
from tlora.runtime.elastic.desk import CANCELLED, Desk
from tlora.runtime.entering import adapter_start, enter_job
from tlora.runtime.recording import Recorder
from tlora.runtime.resuming import resumption
from tlora.training.driver import JobDriver, Status
from tlora.training.loop import run_jobs


class OneDevice:
    """The jobs of one engine."""

    def __init__(self, recorder: Recorder, drivers: Iterable[JobDriver]) -> None:
        self.recorder = recorder
        self.drivers = {driver.name: driver for driver in drivers}

    def run(self, desk: Desk, should_stop: Callable[[], bool]) -> list[JobDriver]:
        """Until every job is over and nobody asks for more; those that are left when it should stop
        before."""
        engine, recorder = self.recorder.engine, self.recorder
        while not should_stop():
            desk.serve(self, now=not self.drivers)
            if not self.drivers:
                break
            left = run_jobs(
                engine,
                list(self.drivers.values()),
                recorder,
                should_stop=lambda: should_stop() or desk.is_asked(),
            )
            self.drivers = {driver.name: driver for driver in left}
        return list(self.drivers.values())

    def admit(self, job: JobSpec, data: PreparedData) -> None:
        recorder, engine = self.recorder, self.recorder.engine
        recorder.data_keys[job.name] = data.key
        driver = JobDriver(job, data.train, data.evaluation)
        found = resumption(recorder.directory, job)
        try:
            new = found.checkpoint is None
            start = adapter_start(job, engine.super_model) if new else {}
            enter_job(driver, found, start, recorder)
        except (TloraError, OSError, ValueError, RuntimeError, MemoryError) as error:
            # It cannot be here, and nobody else is touched by it.
            if job.name in engine.jobs:
                engine.detach(job.name)
            what = "out of memory: " if is_out_of_memory(error) else ""
            message = error.message if isinstance(error, JobFailed) else f"{what}{error}"
            driver.on_failure(JobFailed(message, job=job.name))
            recorder.on_end(driver)
            return
        recorder.join(driver)
        self.drivers[job.name] = driver

    def dismiss(self, job: str) -> None:
        """With its state, so that it can go on from here."""
        driver = self.drivers.pop(job, None)
        if driver is None:
            # It has come to its end, which is told when its files are on disk.
            return
        driver.status, driver.reason = Status.CANCELLED, CANCELLED
        self.recorder.checkpoint(driver)
        self.recorder.on_end(driver)
        self.recorder.engine.detach(job)
