"""Saving in the background: training hands a copy over and goes on.

One thread writes one checkpoint at a time. A newer checkpoint of a job that still waits replaces
the older one. What cannot be written (a full disk) is told to the training loop, which pauses that
job.
"""

import threading
from dataclasses import dataclass
from pathlib import Path

from tlora.training.checkpoint import Checkpoint, prune, save_checkpoint


@dataclass(frozen=True, slots=True)
class SaveFailed:
    job: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    parent: Path
    checkpoint: Checkpoint
    keep: int | None


class CheckpointWriter:
    def __init__(self) -> None:
        self._waiting: dict[str, _Order] = {}
        self._failed: list[SaveFailed] = []
        self._changed = threading.Condition()
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._thread.start()

    def submit(self, job: str, parent: Path, checkpoint: Checkpoint, *, keep: int | None) -> None:
        with self._changed:
            self._waiting[job] = _Order(parent, checkpoint, keep)
            self._changed.notify_all()

    def failures(self) -> list[SaveFailed]:
        """What could not be saved since the last call."""
        with self._changed:
            failed, self._failed = self._failed, []
            return failed

    def flush(self) -> None:
        """Wait until all that was handed over is on disk or has failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._busy)

    def close(self) -> None:
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                job = next(iter(self._waiting))
                order = self._waiting.pop(job)
                self._busy = True
            failure = self._save(job, order)
            with self._changed:
                self._busy = False
                if failure is not None:
                    self._failed.append(failure)
                self._changed.notify_all()

    def _save(self, job: str, order: _Order) -> SaveFailed | None:
        try:
            path = save_checkpoint(order.parent, job, order.checkpoint)
            prune(path.parent, order.keep)
        except Exception as error:
            # Whatever it is: a thread that died here would leave the run waiting for ever.
            where = order.parent
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            return SaveFailed(job, f"cannot save a checkpoint in {where}: {reason}")
        return None
