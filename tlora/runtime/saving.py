"""Checkpoints and adapters of a run's jobs: snapshots now, files in the background (writing.py).

What keeps a checkpoint from the disk is told to whoever asks; what keeps an adapter from it is the
job's failure, and nobody else's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tlora.core.errors import TloraError
from tlora.core.job import BaseSpec
from tlora.model.adapters import AdapterWeights
from tlora.model.job_rows import of_weights
from tlora.model.snapshot import Snapshot
from tlora.runtime.directory import RunDirectory
from tlora.runtime.exporting import begin_export, copy, export_matrices
from tlora.runtime.writing import Order, Writer
from tlora.training.checkpoint import Checkpoint, prune, save_checkpoint
from tlora.training.driver import JobDriver, Status
from tlora.training.engine import Engine


@dataclass(frozen=True, slots=True)
class SaveFailed:
    job: str
    reason: str


class Saver:
    def __init__(
        self, directory: RunDirectory, base: BaseSpec, engine: Engine, *, looks: bool
    ) -> None:
        """`looks`: the logits of every adapter are compared before it is written."""
        self._directory = directory
        self._base = base
        self._engine = engine
        self._looks = looks
        self._writer = Writer()
        self._failures: list[SaveFailed] = []
        """Checkpoints that could not be written, of which nobody knows yet."""

        self._unwritten: dict[str, Exception] = {}
        """Jobs of which an adapter could not be written, and why; the writer's thread alone
        looks."""

    def checkpoint(self, driver: JobDriver, progress: dict[str, object]) -> None:
        """The job as it is now; it may go on or leave meanwhile."""
        name, keep = driver.name, driver.spec.save.total_limit
        parent = self._directory.job(name) / "checkpoints"
        # Where all are kept, a slow disk is waited for.
        replaceable = keep is not None
        self._writer.make_room(replacing=name if replaceable else None)
        state = self._engine.snapshot(name)

        def write() -> None:
            # It would know of a best adapter that is not there.
            self._check_written(name)
            save_checkpoint(parent, name, Checkpoint(state.result(), progress))
            prune(parent, keep)

        def written(error: Exception | None) -> None:
            if error is not None:
                reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                reason = f"cannot save a checkpoint in {parent}: {reason}"
                self._failures.append(SaveFailed(name, reason))

        self._writer.submit(
            Order(name, write, written, num_bytes=state.num_bytes, replaceable=replaceable)
        )

    def export_best(self, driver: JobDriver, weights: Snapshot[AdapterWeights]) -> None:
        self._writer.make_room()
        self._export(driver, weights, "best")

    def export_last(self, driver: JobDriver, then: Callable[[], None]) -> None:
        """The adapter at the end. Where it is the best one, found in this run, it was verified when
        it was written and is copied: with many jobs a look at the logits costs more than a step."""
        best, path = driver.best, self._directory.job(driver.name)
        if best is not None and best.step == driver.step and best.weights is not None:
            self._write(driver, "adapter", lambda to: copy(path / "best", to), 0, then)
            return
        self._writer.make_room()
        weights = self._engine.super_model.snapshot(driver.name, of_weights)
        self._export(driver, weights, "adapter", then)

    def export_unattached(
        self, driver: JobDriver, weights: AdapterWeights, then: Callable[[], None]
    ) -> None:
        """Matrices of a checkpoint, as the adapter at the end of a job that is not attached."""
        targets = self._engine.super_model.targets

        def write(to: Path) -> None:
            export_matrices(to, weights, driver.spec, self._base, targets)

        self._write(driver, "adapter", write, 0, then)

    def after_all(self, job: str, then: Callable[[], None]) -> None:
        """Once everything that was handed over before is on disk."""
        self._writer.submit(Order(job, lambda: None, lambda error: then()))

    def settle(self) -> None:
        """Tell of what has reached the disk."""
        self._writer.settle()

    def flush(self) -> None:
        """Wait for all that was handed over, and tell of it."""
        self._writer.flush()
        self._writer.settle()

    def close(self) -> None:
        self._writer.close()
        self._writer.settle()

    def take_failures(self) -> list[SaveFailed]:
        """Of checkpoints, since this was asked."""
        failures, self._failures = self._failures, []
        return failures

    def forget(self, job: str) -> None:
        """It begins again: what could not be written before counts no more."""
        self._unwritten.pop(job, None)

    def _export(
        self,
        driver: JobDriver,
        weights: Snapshot[AdapterWeights],
        name: str,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        model = self._engine.super_model
        probe = driver.train[0].sequences[0] if self._looks else None
        try:
            write = begin_export(weights, driver.spec, self._base, model, probe)
        except (OSError, TloraError, RuntimeError, MemoryError) as error:
            write = _raises(error)
        self._write(driver, name, write, weights.num_bytes, then)

    def _write(
        self,
        driver: JobDriver,
        name: str,
        write: Callable[[Path], None],
        num_bytes: int,
        then: Callable[[], None],
    ) -> None:
        """A full disk or a wrong file is this job's failure, not its neighbours'."""
        path = self._directory.job(driver.name) / name

        def unless_failed() -> None:
            self._check_written(driver.name)
            try:
                write(path)
            except Exception as error:
                self._unwritten[driver.name] = error
                raise

        def written(error: Exception | None) -> None:
            if error is not None and driver.status is not Status.FAILED:
                driver.status = Status.FAILED
                driver.reason = f"the adapter could not be written to {path}: {error}"
            then()

        self._writer.submit(Order(driver.name, unless_failed, written, num_bytes=num_bytes))

    def _check_written(self, job: str) -> None:
        """Raises what kept an adapter of the job from the disk, if something did."""
        if job in self._unwritten:
            raise self._unwritten[job]


def _raises(error: Exception) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        raise error

    return write
