"""How a job comes into an engine: anew, or from its newest whole checkpoint."""

from tlora.core.errors import JobFailed
from tlora.core.job import JobSpec, RunSpec
from tlora.data.prepare import PreparedData
from tlora.model.adapters import AdapterWeights
from tlora.model.memory import is_out_of_memory
from tlora.model.super_model import SuperModel
from tlora.runtime.checking import check_start, start_of
from tlora.runtime.elastic.places import Places
from tlora.runtime.recording import Recorder
from tlora.runtime.resuming import Resumption, finished, resumption
from tlora.training.checkpoint import Checkpoint
from tlora.training.driver import JobDriver


def enter_jobs(
    spec: RunSpec,
    data: dict[str, PreparedData],
    starts: dict[str, AdapterWeights],
    recorder: Recorder,
    places: Places,
) -> list[JobDriver]:
    """Attach every job of `starts` that is not over, anew or from its newest whole checkpoint. One
    that has no memory beside those before it waits for a place again. `starts` is emptied: adapters
    of many jobs are large, and each has its own in its rows."""
    drivers: list[JobDriver] = []
    for job in spec.jobs:
        over = finished(recorder.directory, job)
        if over is not None:
            recorder.keep(over)
        start = starts.pop(job.name, None)
        if over is not None or start is None:
            continue
        found = resumption(recorder.directory, job)
        driver = JobDriver(job, data[job.name].train, data[job.name].evaluation)
        try:
            enter_job(driver, found, start, recorder)
        except JobFailed as failure:
            driver.on_failure(failure)
            recorder.on_end(driver)
            continue
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if job.name in recorder.engine.jobs:
                recorder.engine.detach(job.name)
            if drivers:
                places.is_full(driver.name for driver in drivers)
                places.wait(job, data[job.name], again=True)
            else:
                driver.on_failure(JobFailed(f"out of memory: {error}", job=job.name))
                recorder.on_end(driver)
            continue
        drivers.append(driver)
    return drivers


def enter_job(
    driver: JobDriver, found: Resumption, start: AdapterWeights, recorder: Recorder
) -> None:
    """Raises JobFailed if the job cannot go on from where it was."""
    if found.checkpoint is None:
        recorder.resume(driver, found)
        driver.attach(recorder.engine, start)
        return
    restore(driver, found.checkpoint, data_key=recorder.data_keys[driver.name])
    recorder.resume(driver, found)
    state = found.checkpoint.state
    driver.attach(recorder.engine, state.weights, state=state)


def leave_job(driver: JobDriver, found: Resumption, recorder: Recorder) -> None:
    """The end of a job that was never attached, with the status that its driver has: what it has
    come to is in its checkpoint. Raises JobFailed as `enter_job` does."""
    status, reason = driver.status, driver.reason
    checkpoint = found.checkpoint
    if checkpoint is not None:
        restore(driver, checkpoint, data_key=recorder.data_keys[driver.name])
    driver.status, driver.reason = status, reason
    recorder.resume(driver, found)
    recorder.end_unattached(driver, checkpoint.state.weights if checkpoint else None)


def restore(driver: JobDriver, checkpoint: Checkpoint, *, data_key: str) -> None:
    """Raises JobFailed if the data are not those that the job was saved with."""
    if checkpoint.progress["data"] != data_key:
        raise JobFailed(
            "its data have changed since it was saved; bring them back, or start it over under "
            "another name",
            job=driver.name,
        )
    driver.restore(checkpoint.progress)


def adapter_start(job: JobSpec, model: SuperModel) -> AdapterWeights:
    if job.init_from is None:
        return model.new_adapter(job)
    check_start(job, model.targets)
    return start_of(job, model.targets).weights
