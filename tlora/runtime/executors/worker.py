"""One device: a base, an engine, and the jobs that are now on it.

A worker is told commands and says what happens; where it runs is not its matter. Between commands
it trains. All that a job leaves on disk is written here, by the same recorder as in a run without a
scheduler, so that a job that moved looks like one that stayed.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tlora.config import load_spec
from tlora.core.errors import JobFailed, TloraError
from tlora.core.job import JobSpec, RunSpec
from tlora.data.prepare import PreparedData, Preparer
from tlora.model.loading import load_tokenizer
from tlora.model.memory import is_out_of_memory
from tlora.runtime.arriving import Arrival, Arrivals
from tlora.runtime.directory import JobResult, RunDirectory
from tlora.runtime.entering import enter_job, leave_job
from tlora.runtime.environment import cache_directory, quieten_libraries
from tlora.runtime.executors.messages import (
    Asked,
    Attach,
    Attached,
    Command,
    Detach,
    Detached,
    Ended,
    Evaluated,
    GiveUp,
    GoOn,
    Message,
    NoRoom,
    Noted,
    Ready,
    Said,
    Stepped,
    Stop,
    Tune,
)
from tlora.runtime.progress import RankUsage
from tlora.runtime.recording import Recorder
from tlora.runtime.resuming import check_same_bits
from tlora.runtime.sinks import Sinks
from tlora.runtime.sweeps.metrics import trial_metrics
from tlora.runtime.training import describe_run, load_super_model, show_exact
from tlora.training.compose import Kind
from tlora.training.driver import JobDriver, Status
from tlora.training.engine import Engine
from tlora.training.loop import run_jobs
from tlora.training.outcome import EvaluationDone, Outcome, StepDone

Tell = Callable[[Message], None]

QUIET = ("saved at step", "saved where they are", "goes on after step", "go on where they stopped")
"""A job that moves is saved and goes on; where that is news, whoever leads the run says it."""

WAIT_S = 0.02
"""For jobs on their way, where nobody trains: a command waits no longer."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker is started with."""

    directory: Path
    """Of the run; its resolved.yaml has the jobs."""

    device: str
    """As torch names it."""

    limit_tokens: int | None = None
    """No nano-batch is to be larger, whatever a plan says."""

    exact_tokens: int | None = None
    """Set where bits count: every nano-batch has this size, whatever a plan says."""

    asks: bool = False
    """Jobs are trials of a sweep: each asks after every evaluation whether it is to go on. Of their
    adapters, only the winner's logits are looked at, in the end."""

    reserve_rows: int | None = None
    """Rank rows that the pool is made for; None: for all jobs of the run."""


class Worker:
    def __init__(self, settings: WorkerSettings, tell: Tell) -> None:
        """Loads the base, which takes a while."""
        started = time.perf_counter()
        quieten_libraries()
        self.settings = settings
        self.tell = tell
        self.spec: RunSpec = load_spec(settings.directory / "resolved.yaml")
        self._preparer = Preparer(load_tokenizer(self.spec.base), cache_dir=cache_directory())
        self._preparing = threading.Lock()
        """A tokenizer is used by one thread at a time."""

        device = torch.device(settings.device)
        self.model = load_super_model(self.spec, device, reserve_rows=settings.reserve_rows)
        exact = settings.exact_tokens
        self.engine = Engine(
            self.model, budget_tokens=exact or settings.limit_tokens or 1, exact=exact is not None
        )
        self.directory = ToldDirectory(settings.directory, tell)
        self.recorder = Recorder(
            self.directory,
            self.spec.base,
            self.engine,
            ToldProgress(tell),
            Sinks(self.spec.report_to, settings.directory, lambda line: tell(Said((line,)))),
            looks=not settings.asks,
        )
        if exact is not None:
            # It may put products into tiles, which is done to a model, not to a run.
            proof = show_exact(self.model, self.spec, self._all_data(), exact)
            # Here a compiler may have been too slow, or the device is another kind of GPU.
            check_same_bits(settings.directory, describe_run(self.spec, device, proof))
        self.drivers: dict[str, JobDriver] = {}
        self.arrivals = Arrivals()
        self.stopped = False
        self._watched = _Asking(self.recorder, tell) if settings.asks else _Watched(self.recorder)
        self._to_leave: set[str] = set()
        """Told to while they waited for an answer."""

        tell(Ready(time.perf_counter() - started))

    @property
    def has_work(self) -> bool:
        """Jobs to train, or on their way."""
        return self._trains or len(self.arrivals) > 0

    @property
    def _trains(self) -> bool:
        return any(name not in self._watched.waiting for name in self.drivers)

    def obey(self, command: Command) -> None:
        match command:
            case Attach():
                self._begin(command)
            case Detach(job=name):
                if name in self.arrivals:
                    self._turn_away(name)
                elif name in self._watched.waiting:
                    # What it was evaluated at is in nobody's log yet.
                    self._to_leave.add(name)
                else:
                    self._detach(name)
            case GoOn(job=name):
                self._watched.waiting.discard(name)
                if name in self._to_leave:
                    self._to_leave.discard(name)
                    self._detach(name)
            case GiveUp(job=name, reason=reason, status=status):
                if name in self.arrivals:
                    self.arrivals.of(name).dismiss(Status(status), reason)
                else:
                    self._give_up(name, reason, Status(status))
            case Tune(bucket=bucket, weights=weights):
                self._set_bucket(bucket)
                for name, weight in weights.items():
                    if name in self.drivers:
                        self.engine.set_weight(name, weight)
                    elif name in self.arrivals:
                        self.arrivals.of(name).set_weight(weight)
            case Stop():
                for arrival in self.arrivals.take_dismissed():
                    self._enter(arrival)
                self.recorder.save(list(self.drivers.values()))
                self.close()

    def work(self, should_stop: Callable[[], bool]) -> None:
        """Trains until asked to stop between nano-batches, until somebody has arrived, or until no
        job is left. Where all are still on their way it waits for them, for a moment."""
        if not self._trains and self.arrivals and not should_stop():
            self.arrivals.wait(WAIT_S)
        self._take_in()
        waiting = self._watched.waiting
        held = {name: each for name, each in self.drivers.items() if name in waiting}
        drivers = [each for name, each in self.drivers.items() if name not in waiting]
        one_comes = self.arrivals.after_a_nano_batch()
        try:
            left = run_jobs(
                self.engine,
                drivers,
                self._watched,
                # One that asks is left out from here on.
                should_stop=lambda: should_stop() or len(waiting) > len(held) or one_comes(),
            )
        except Exception:
            self.recorder.rescue([*held.values(), *drivers])
            raise
        self.drivers = held | {driver.name: driver for driver in left}
        if not self.drivers:
            self._tell_ends()

    def close(self) -> None:
        """What was not saved is lost back to the last checkpoints."""
        self.stopped = True
        self.drivers.clear()
        self.arrivals.clear()
        self.recorder.close()

    def _begin(self, command: Attach) -> None:
        self._set_bucket(command.bucket)
        job = self._job(command.job)
        if job.name not in self.arrivals:
            self.arrivals.add(Arrival(job, self.directory, self.model, lambda: self._prepared(job)))
        self.arrivals.of(job.name).set_weight(command.weight)

    def _turn_away(self, name: str) -> None:
        """One that is on its way; if it was given up its end is told when it is here."""
        if self.arrivals.of(name).verdict is None:
            self.arrivals.drop(name)
            self.tell(Detached(name, None, 0.0))

    def _take_in(self) -> None:
        """The first that is here. What it came with is let go when this returns: on a device that
        is as large as its rows, and would be missing while others train."""
        arrival = self.arrivals.take()
        if arrival is not None:
            self._enter(arrival)

    def _enter(self, arrival: Arrival) -> None:
        since = time.perf_counter()
        job, data = arrival.job, arrival.data
        driver: JobDriver | None = None
        try:
            if data is not None:
                self.recorder.data_keys[job.name] = data.key
                driver = JobDriver(job, data.train, data.evaluation)
            arrived = arrival.result()
            if arrived.found.result is not None:
                self.tell(Ended(job.name, asdict(arrived.found.result)))
                return
            assert driver is not None, f"{job.name} came without data"
            if arrival.verdict is not None:
                driver.status, driver.reason = arrival.verdict
                leave_job(driver, arrived.found, self.recorder)
                self._tell_ends()
                return
            enter_job(driver, arrived.brought, arrived.start, self.recorder)
        except (TloraError, OSError, ValueError, RuntimeError, MemoryError) as error:
            if self.settings.asks and is_out_of_memory(error) and self.drivers:
                if job.name in self.engine.jobs:
                    self.engine.detach(job.name)
                self.tell(NoRoom(job.name))
                return
            what = "out of memory: " if is_out_of_memory(error) else ""
            self._refuse(job, driver, f"{what}{error}")
            return
        self.recorder.start([driver], since=since)
        self.drivers[job.name] = driver
        seconds = time.perf_counter() - since
        self.tell(Attached(job.name, driver.step, seconds, since - arrival.began))
        self._watched.on_entry(driver)

    def _refuse(self, job: JobSpec, driver: JobDriver | None, reason: str) -> None:
        """The job cannot be here, and nobody else is touched by it."""
        if job.name in self.engine.jobs:
            self.engine.detach(job.name)
        if driver is not None:
            driver.on_failure(JobFailed(reason, job=job.name))
            self.recorder.on_end(driver)
            self._tell_ends()
            return
        result = no_result(job.name, reason)
        # On a full disk whoever leads the run says so.
        with suppress(OSError):
            self.directory.write_result(result)
        self.directory.event("ended", job=job.name, status=result.status, reason=reason)
        self.tell(Ended(job.name, asdict(result)))

    def _detach(self, name: str) -> None:
        started = time.perf_counter()
        self._finish_batch(name)
        driver = self.drivers.pop(name, None)
        if driver is None:
            # Whoever asked must hear of its end first, or would send it on.
            self._tell_ends()
            self.tell(Detached(name, None, 0.0))
            return
        self._save([driver])
        if driver.status is not Status.RUNNING:
            # It would go on elsewhere from an older step, or from none: it stops here.
            self.recorder.on_end(driver)
            self.engine.detach(name)
            self._tell_ends()
            return
        self.engine.detach(name)
        self.recorder.sinks.close(name, "moved")
        self.directory.event("detached", job=name, step=driver.step)
        self.tell(Detached(name, driver.step, time.perf_counter() - started))

    def _give_up(self, name: str, reason: str, status: Status) -> None:
        """Whole: a person may want it to go on. Its best adapter is on disk."""
        self._watched.waiting.discard(name)
        self._to_leave.discard(name)
        self._finish_batch(name)
        driver = self.drivers.pop(name, None)
        if driver is None:
            self._tell_ends()
            self.tell(Detached(name, None, 0.0))
            return
        driver.status, driver.reason = status, reason
        self.recorder.checkpoint(driver)
        self.recorder.on_end(driver)
        self.engine.detach(name)
        self._tell_ends()

    def _finish_batch(self, name: str) -> None:
        partial = self._watched.partial
        self.work(lambda: name not in partial)
        # Somebody may have asked meanwhile.
        while name in partial and name in self.drivers:
            self.work(lambda: name not in partial)

    def _tell_ends(self) -> None:
        """A recorder may tell of a job's end when its files are on disk: wait for them."""
        self._save([])

    def _save(self, drivers: list[JobDriver]) -> None:
        """Whoever cannot be saved stops where it is, one of the others too."""
        for failure in self.recorder.save(drivers):
            self.recorder.pause(failure)

    def _job(self, name: str) -> JobSpec:
        """Jobs may have been added to the run since this worker began."""
        found = {job.name: job for job in self.spec.jobs}
        if name not in found:
            self.spec = load_spec(self.settings.directory / "resolved.yaml")
            found = {job.name: job for job in self.spec.jobs}
        return found[name]

    def _all_data(self) -> dict[str, PreparedData]:
        return {job.name: self._prepared(job) for job in self.spec.jobs}

    def _prepared(self, job: JobSpec) -> PreparedData:
        with self._preparing:
            return self._preparer.prepare(job)

    def _set_bucket(self, bucket: int) -> None:
        if self.settings.exact_tokens is None:
            self.engine.budget_tokens = min(bucket, self.settings.limit_tokens or bucket)


def no_result(job: str, reason: str) -> JobResult:
    """Of a job that failed before it began."""
    return JobResult(
        job=job,
        status="failed",
        reason=reason,
        steps=0,
        total_steps=0,
        loss=None,
        first_eval_loss=None,
        eval_loss=None,
        best_eval_loss=None,
        best_step=None,
        tokens_seen=0,
        sequences_seen=0,
        seconds=0.0,
        adapter=None,
        best_adapter=None,
    )


class ToldDirectory(RunDirectory):
    """Several workers write into one run directory, each its own jobs' files; the events of all are
    written by whoever leads the run."""

    def __init__(self, root: Path, tell: Tell) -> None:
        super().__init__(root)
        self._tell = tell

    def event(self, kind: str, **fields: object) -> None:
        self._tell(Noted(kind, time.time(), fields))


class ToldProgress:
    """Progress that is told instead of shown."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def say(self, *lines: str) -> None:
        kept = tuple(line for line in lines if not any(each in line for each in QUIET))
        if kept:
            self._tell(Said(kept))

    def start(self, drivers: list[JobDriver], budget_tokens: int) -> None:
        pass

    def join(self, driver: JobDriver) -> None:
        pass

    def on_nano_batch(self, outcome: Outcome) -> None:
        pass

    def on_step(self, driver: JobDriver, done: StepDone) -> None:
        self._tell(Stepped(**asdict(done)))

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        self._tell(Evaluated(**asdict(done)))

    def on_end(self, result: JobResult) -> None:
        self._tell(Ended(result.job, asdict(result)))

    def on_rank(self, usage: RankUsage) -> None:
        pass

    def on_interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass

    def finish(self, results: list[JobResult], root: Path) -> None:
        pass


class _Watched:
    """The recorder, and which jobs are in the middle of a batch."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.partial: set[str] = set()
        self.waiting: set[str] = set()
        """Have asked whether they are to go on."""

    def on_entry(self, driver: JobDriver) -> None:
        """The job is attached, anew or from a checkpoint."""

    def on_nano_batch(self, outcome: Outcome) -> None:
        # An evaluation that is broken off is done again; its forward passes are all that is lost.
        if outcome.kind is Kind.TRAIN:
            self.partial.update(outcome.tokens)
        self.recorder.on_nano_batch(outcome)

    def on_step(self, driver: JobDriver, done: StepDone) -> None:
        self.partial.discard(driver.name)
        self.recorder.on_step(driver, done)

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        self.recorder.on_evaluation(driver, done)

    def on_end(self, driver: JobDriver) -> None:
        self.partial.discard(driver.name)
        self.recorder.on_end(driver)


class _Asking(_Watched):
    """Trials ask after every evaluation."""

    def __init__(self, recorder: Recorder, tell: Tell) -> None:
        super().__init__(recorder)
        self._tell = tell

    def on_entry(self, driver: JobDriver) -> None:
        # It was saved after an evaluation, of which whoever led the sweep then may not have heard.
        if driver.step and driver.is_just_evaluated:
            self._ask(driver)

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        super().on_evaluation(driver, done)
        self._ask(driver)

    def on_end(self, driver: JobDriver) -> None:
        if driver.evaluation is None and driver.status is Status.COMPLETED:
            # Without held-out rows its training loss is all there is to compare.
            self._ask(driver, waits=False)
        super().on_end(driver)

    def _ask(self, driver: JobDriver, *, waits: bool = True) -> None:
        if waits:
            self.waiting.add(driver.name)
        metrics = trial_metrics(driver)
        self._tell(Asked(driver.name, driver.step, driver.tokens_seen, metrics, waits))
