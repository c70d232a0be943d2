"""Everything a run leaves behind as it goes: metrics, events, adapters, results.

Large files are written in the background (saving.py); a job's end is recorded and told when its
files are on disk.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict

from tlora.core.job import BaseSpec
from tlora.model.adapters import AdapterWeights
from tlora.model.peft_format import serving_commands
from tlora.runtime.directory import JobResult, RunDirectory
from tlora.runtime.job_metrics import cut_back, metrics_bytes, metrics_line, metrics_path
from tlora.runtime.progress import MANY_JOBS, Progress, over_before
from tlora.runtime.resuming import Resumption, saved_steps
from tlora.runtime.saving import SaveFailed, Saver
from tlora.runtime.settings import job_settings
from tlora.runtime.sinks import Sinks
from tlora.training.driver import JobDriver, Status
from tlora.training.engine import Engine
from tlora.training.outcome import EvaluationDone, Outcome, StepDone
from tlora.training.size_search import ControllerSettings


class Recorder:
    """The training loop's observer."""

    def __init__(
        self,
        directory: RunDirectory,
        base: BaseSpec,
        engine: Engine,
        progress: Progress,
        sinks: Sinks,
        *,
        looks: bool = True,
    ) -> None:
        """`looks`: the logits of every adapter are compared before it is written. Where many are
        written and one is kept, that one is looked at in the end."""
        self.directory = directory
        self.base = base
        self.engine = engine
        self.progress = progress
        self.sinks = sinks
        self.results: list[JobResult] = []
        self._saver = Saver(directory, base, engine, looks=looks)
        self.data_keys: dict[str, str] = {}
        """By job: what its checkpoints say of its data."""

        self._drivers: dict[str, JobDriver] = {}
        self._waiting: dict[str, JobDriver] = {}
        """Jobs without a place, as views know them."""

        self._unrecorded: set[str] = set()
        """Jobs of which something has happened that did not reach the disk in full: what is
        recorded of them later does not make them whole."""

        self.on_result: Callable[[JobResult], None] = lambda result: None
        """Told of a job's end when its files are on disk."""

        self._started = time.perf_counter()
        self._last_step: dict[str, float] = {}
        self._kept: list[str] = []
        self._resumed: list[str] = []
        """Lines about jobs that were over before, and that go on; said when all are known."""

    def start(
        self,
        drivers: list[JobDriver],
        tuned: ControllerSettings | None = None,
        *,
        waiting: Sequence[JobDriver] = (),
        since: float | None = None,
    ) -> None:
        """`tuned` says how the size of nano-batches is, if it is; `waiting` are jobs that have no
        place yet; `since` when nobody trains, if others wait for `drivers`
        (`time.perf_counter`)."""
        self._started = time.perf_counter()
        self._say_each_or_all(self._kept, f"{len(self._kept)} jobs were over before")
        self._say_each_or_all(self._resumed, f"{len(self._resumed)} jobs go on where they stopped")
        for driver in drivers:
            self._know(driver, "attached", since)
        if tuned is not None:
            self.directory.event("tuning", settings=asdict(tuned))
            self.progress.say(
                f"the size of nano-batches is found by measuring, up to {tuned.limit} tokens"
            )
        for driver in waiting:
            self._waits(driver)
        self.progress.start([*drivers, *waiting], self.engine.budget_tokens)

    def wait(self, driver: JobDriver, why: str | None = None) -> None:
        """A job that has no place yet; `why`, where it was on its way to one."""
        self._waits(driver, why)
        self.progress.join(driver)

    def _waits(self, driver: JobDriver, why: str | None = None) -> None:
        driver.status, driver.reason = Status.WAITING, why
        # Of one that has begun before, as far as it is known without its checkpoint.
        driver.step = saved_steps(self.directory, driver.name)
        self._waiting[driver.name] = driver
        self.directory.event("waits", job=driver.name, why=why)

    def join(self, driver: JobDriver, *, since: float) -> None:
        """As `start`, of a job that comes while others train."""
        self._know(driver, "joined", since)
        self.progress.join(driver)

    def _know(self, driver: JobDriver, event: str, since: float | None) -> None:
        self._drivers[driver.name] = driver
        self._waiting.pop(driver.name, None)
        self.sinks.open(driver.name, job_settings(driver.spec), step=driver.step)
        now = self._last_step[driver.name] = time.perf_counter()
        paused = {} if since is None else {"paused_ms": round((now - since) * 1e3, 3)}
        self.directory.event(
            event, job=driver.name, step=driver.step, total_steps=driver.total_steps, **paused
        )

    def keep(self, result: JobResult) -> None:
        """The job was over before this run began."""
        self.results.append(result)
        self._kept.append(over_before(result))

    def forget(self, job: str) -> None:
        """It is no longer over, whatever was said before."""
        self.results = [each for each in self.results if each.job != job]

    def resume(self, driver: JobDriver, found: Resumption) -> None:
        """Cut the job's metrics back to its checkpoint, so that nothing is logged twice."""
        for damage in found.damaged:
            self.progress.say(f"{driver.name}: {damage}; going back to the one before")
        self.forget(driver.name)
        self._unrecorded.discard(driver.name)
        self._saver.forget(driver.name)
        (self.directory.job(driver.name) / "result.json").unlink(missing_ok=True)
        checkpoint = found.checkpoint
        size = 0 if checkpoint is None else int(str(checkpoint.progress["metrics_bytes"]))
        cut_back(self.directory, driver.name, size)
        if checkpoint is not None:
            self._resumed.append(f"{driver.name}: goes on after step {checkpoint.state.step}")

    def save(self, drivers: list[JobDriver]) -> list[SaveFailed]:
        """Checkpoint jobs that were stopped, and wait until that is done. What could not be
        written, of these jobs or of others meanwhile, is said and returned."""
        for driver in drivers:
            self._checkpoint(driver)
        self._saver.flush()
        failures = self._saver.take_failures()
        failed = {failure.job for failure in failures}
        saved = [
            f"{each.name}: saved at step {each.step}/{each.total_steps}"
            for each in drivers
            if each.name not in failed
        ]
        self._say_each_or_all(saved, f"{len(saved)} jobs saved where they are")
        for failure in failures:
            self.progress.say(f"{failure.job}: {failure.reason}")
        for driver in drivers:
            if driver.status is Status.FAILED:
                # An adapter that was still to be written when the run was stopped.
                self.progress.say(f"{driver.name}: {driver.reason}")
        return failures

    def checkpoint(self, driver: JobDriver) -> None:
        """Save an attached job as it is now, in the background: it may leave meanwhile."""
        self._checkpoint(driver)

    def pause(self, failure: SaveFailed) -> None:
        """A job that cannot be saved stops where it is; what was saved before stays."""
        driver = self._drivers[failure.job]
        if driver.status is Status.RUNNING:
            driver.status = Status.PAUSED
            driver.reason = failure.reason

    def settle(self) -> None:
        """Tell of what has reached the disk, ends of jobs among it; with every nano-batch that is
        done anyway."""
        self._saver.settle()

    def rescue(self, drivers: list[JobDriver]) -> None:
        """The loop broke: save the jobs that are whole, and raise nothing, for an error is on its
        way. The others have their last checkpoints."""
        for driver in drivers:
            if self._is_whole(driver):
                with suppress(Exception):
                    self.save([driver])

    def close(self) -> None:
        """All that was handed over is written, and the ends of jobs are recorded, before this
        returns. The directory stays taken."""
        try:
            self._saver.close()
        finally:
            self.progress.close()
            self.sinks.close_all()
            self.directory.close_files()

    def on_nano_batch(self, outcome: Outcome) -> None:
        measure = {"measure": asdict(outcome.measure)} if outcome.measure else {}
        self.directory.event(
            "nano_batch",
            purpose=outcome.kind.value if outcome.kind else None,
            rows=outcome.rows,
            tokens=outcome.tokens,
            seconds=round(outcome.seconds, 6),
            error=outcome.error,
            **measure,
        )
        for decision in outcome.decisions:
            self.directory.event("tuned", **asdict(decision) | {"action": decision.action.value})
        self._saver.settle()
        for failure in self._saver.take_failures():
            self.pause(failure)
        self.progress.on_nano_batch(outcome)

    def on_step(self, driver: JobDriver, done: StepDone) -> None:
        now = time.perf_counter()
        seconds = now - self._last_step[driver.name]
        self._last_step[driver.name] = now
        if done.step % driver.spec.train.logging_steps == 0 or done.step == driver.total_steps:
            with self._in_full(driver):
                self._metrics(
                    driver,
                    "train",
                    loss=done.loss,
                    lr=done.learning_rate,
                    grad_norm=done.grad_norm,
                    target_tokens=done.target_tokens,
                    nano_batches=done.nano_batches,
                    tokens_per_s=round(done.tokens / max(seconds, 1e-9), 1),
                    **done.figures,
                )
        every = driver.spec.save.steps
        due = every is not None and done.step % every == 0 and done.step < driver.total_steps
        if due and self._is_whole(driver):
            self._checkpoint(driver)
        self.progress.on_step(driver, done)

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        self._last_step[driver.name] = time.perf_counter()
        best = driver.best
        with self._in_full(driver):
            self._metrics(
                driver, "eval", loss=done.loss, target_tokens=done.target_tokens, **done.figures
            )
            if best is not None and best.step == done.step and best.weights is not None:
                self._saver.export_best(driver, best.weights)
        self.progress.on_evaluation(driver, done)

    def on_end(self, driver: JobDriver) -> None:
        """Recorded and told once everything of the job is on disk: it comes after all that was
        handed over before."""
        seconds = time.perf_counter() - self._started
        over = driver.status in (Status.COMPLETED, Status.STOPPED_EARLY, Status.CANCELLED)

        def ended() -> None:
            exported = over and driver.status is not Status.FAILED
            self._ended(driver, f"{driver.name}/adapter" if exported else None, seconds)

        if over:
            self._saver.export_last(driver, ended)
        else:
            self._saver.after_all(driver.name, ended)

    def end_unattached(self, driver: JobDriver, weights: AdapterWeights | None) -> None:
        """As `on_end`, of a job that was never attached and comes to its end with these weights;
        with None it has not begun."""
        seconds = time.perf_counter() - self._started

        def ended() -> None:
            exported = weights is not None and driver.status is not Status.FAILED
            self._ended(driver, f"{driver.name}/adapter" if exported else None, seconds)

        if weights is None:
            self._saver.after_all(driver.name, ended)
        else:
            self._saver.export_unattached(driver, weights, ended)

    def _ended(self, driver: JobDriver, adapter: str | None, seconds: float) -> None:
        serving = []
        if adapter is not None:
            path = (self.directory.root / adapter).resolve()
            serving = serving_commands(
                path, driver.name, base_model=self.base.model, rank=driver.spec.lora.r
            )
        best = driver.best
        result = JobResult(
            job=driver.name,
            status=driver.status.value,
            reason=driver.reason,
            steps=driver.step,
            total_steps=driver.total_steps,
            loss=driver.loss,
            first_eval_loss=driver.first_eval_loss,
            eval_loss=driver.eval_loss,
            best_eval_loss=best.loss if best else None,
            best_step=best.step if best else None,
            tokens_seen=driver.tokens_seen,
            sequences_seen=driver.sequences_seen,
            seconds=round(seconds, 3),
            adapter=adapter,
            best_adapter=f"{driver.name}/best" if best and self._has_best(driver) else None,
            serving=serving,
        )
        self.results.append(result)
        try:
            self.directory.write_result(result)
        except OSError as error:
            # The others may have room enough, or get it; this one is asked again when it goes on.
            self.progress.say(f"{driver.name}: its result.json cannot be written: {error}")
        self.directory.event("ended", job=driver.name, status=result.status, reason=result.reason)
        self.sinks.close(driver.name, result.status)
        waited = self._waiting.pop(driver.name, None)
        if waited is not None:
            # It ends without ever having had a place.
            waited.status, waited.step, waited.loss = driver.status, driver.step, driver.loss
        self.progress.on_end(result)
        self.on_result(result)

    def _say_each_or_all(self, each: list[str], together: str) -> None:
        self.progress.say(*(each if len(each) < MANY_JOBS else [together]))

    def _checkpoint(self, driver: JobDriver) -> None:
        name = driver.name
        self._saver.checkpoint(
            driver,
            driver.progress()
            | {
                "metrics_bytes": metrics_bytes(self.directory, name),
                "data": self.data_keys.get(name, ""),
            },
        )

    @contextmanager
    def _in_full(self, driver: JobDriver) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._unrecorded.add(driver.name)
            raise

    def _is_whole(self, driver: JobDriver) -> bool:
        """Engine, driver and metrics stand at the same step."""
        return (
            driver.name in self.engine.jobs
            and driver.name not in self._unrecorded
            and driver.status is not Status.PAUSED
            and self.engine.step(driver.name) == driver.step
        )

    def _has_best(self, driver: JobDriver) -> bool:
        return (self.directory.job(driver.name) / "best").is_dir()

    def _metrics(self, driver: JobDriver, kind: str, **values: object) -> None:
        line = metrics_line(driver, kind, values)
        try:
            self.directory.append(metrics_path(self.directory, driver.name), line)
        except OSError as error:
            self.pause(SaveFailed(driver.name, f"its metrics cannot be written: {error.strerror}"))
        self.sinks.log(driver.name, driver.step, kind, values)
