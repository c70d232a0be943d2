"""The run directory: what is written where, and how it is replaced without ever being half
there."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from tlora.core.errors import SpecError
from tlora.core.job import RUN_FILES
from tlora.runtime.environment import own_command
from tlora.runtime.holding import Holder, keepers, way_out

JOB_FILES = ("metrics.jsonl", "result.json", "checkpoints", "adapter", "best", "trackers.json")
"""What a run writes into a job's directory."""

TENSORBOARD_FILES = "events.out.tfevents.*"

HOLDER = ".holder.json"
"""Who has the directory, for whoever is refused; of no meaning while nobody has it."""

REMOVING = ".removing"
"""A run that is started over is being removed, and is a run no more: whoever is killed at that
leaves the rest to the next one."""

PATIENCE_S = 1.0
"""So long a directory is tried for: who looks whether somebody is at work has it for a moment."""

ORPHANS_S = 60.0
"""And so long if whoever took it is gone: its workers end when they notice, which is soon."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """`result.json` of one job."""

    job: str
    status: str
    reason: str | None
    steps: int
    total_steps: int
    loss: float | None
    first_eval_loss: float | None
    eval_loss: float | None
    best_eval_loss: float | None
    best_step: int | None
    tokens_seen: int
    sequences_seen: int
    seconds: float
    adapter: str | None
    best_adapter: str | None
    """Paths below the run directory, which may be moved."""

    serving: list[str] = field(default_factory=list[str])
    """Commands that serve the adapter."""


class RunDirectory:
    """Line-by-line files are flushed per line, so that a reader or a crash never sees half a
    record."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: dict[Path, IO[str]] = {}
        self._lock: int | None = None

    @property
    def lock(self) -> int | None:
        """The handle by which it is taken. It stays so until the last copy of that is closed."""
        return self._lock

    @property
    def is_run(self) -> bool:
        """It holds a run, finished or not."""
        return (self.root / "run.json").exists()

    @property
    def is_sweep(self) -> bool:
        return (self.root / "study.json").exists()

    def take_if_there(self) -> None:
        """Before anything in it is read: nobody else changes it from here on. One that is not there
        is taken by `create`; whether it can be made is said here, before data are prepared."""
        with self._usable():
            if self.root.is_dir():
                self.take()

    def create(self, *, fresh: bool) -> None:
        """Make the directory and take it, unless that is done; with `fresh`, clear it of an earlier
        run, and otherwise of one that somebody was about to clear it of."""
        with self._usable():
            self.root.mkdir(parents=True, exist_ok=True)
            if self._lock is None:
                self.take()
            if fresh or (self.root / REMOVING).exists():
                self._remove_run()

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            there = next(
                path for path in (self.root, *self.root.absolute().parents) if path.exists()
            )
            if not there.is_dir():
                raise SpecError(f"--output: {there} is a file; name a directory")
            if not os.access(there, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            yield
        except OSError as error:
            reason = error.strerror or error
            raise SpecError(
                f"--output: {self.root} cannot be used: {reason}; name a directory that can be "
                "written"
            ) from error

    def take(self, *, named: bool = True) -> None:
        """Refuse to work in a directory in which another process does. `named`: others are told who
        has it."""
        handle = os.open(self.root, os.O_RDONLY)
        began = time.monotonic()
        while not _locks(handle):
            waited_s = time.monotonic() - began
            if waited_s > PATIENCE_S:
                try:
                    self._refuse_unless_orphaned(waited_s)
                except SpecError:
                    os.close(handle)
                    raise
            time.sleep(0.05)
        self._lock = handle
        if named:
            about = Holder(os.getpid(), socket.gethostname(), own_command())
            with contextlib.suppress(OSError):
                self.write_json(self.root / HOLDER, asdict(about))

    def _refuse_unless_orphaned(self, waited_s: float) -> None:
        """Raises SpecError, unless who took it is gone and its workers are about to be."""
        holder, keeping = self._holder(), keepers(self.root)
        orphaned = holder is not None and holder.is_gone
        ending = any(not each.is_stopped for each in keeping) or not keeping
        if not orphaned or not ending or waited_s > ORPHANS_S:
            raise SpecError(
                f"--output: another tlora is at work in {self.root}{holder or ''}; "
                f"{way_out(holder, keeping)}"
            )

    def _holder(self) -> Holder | None:
        """Where it is known."""
        try:
            return Holder(**json.loads((self.root / HOLDER).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def _remove_run(self) -> None:
        """What a run has written, and nothing else: a person's files may lie beside it."""
        mark = self.root / REMOVING
        if self.is_run:
            os.replace(self.root / "run.json", mark)
        else:
            mark.touch()
        for path in list(self.root.iterdir()):
            if path.name in RUN_FILES:
                remove(path)
            elif path.is_dir() and any((path / name).exists() for name in JOB_FILES):
                # First what a job's directory is not known by.
                for file in path.glob(TENSORBOARD_FILES):
                    remove(file)
                for name in JOB_FILES:
                    remove(path / name)
                if not any(path.iterdir()):
                    path.rmdir()
        mark.unlink()

    def job(self, name: str) -> Path:
        path = self.root / name
        path.mkdir(exist_ok=True)
        return path

    def write_json(self, path: Path, value: object) -> None:
        replace_text(path, json.dumps(value, indent=2) + "\n")

    def append(self, path: Path, record: dict[str, object]) -> None:
        file = self._open.get(path)
        if file is None:
            file = self._open[path] = path.open("a", encoding="utf-8")
        file.write(json.dumps(record) + "\n")
        file.flush()

    def event(self, kind: str, **fields: object) -> None:
        """A record for the report; no job depends on it, so a disk too full for it stops none."""
        with contextlib.suppress(OSError):
            self.append(
                self.root / "events.jsonl", {"v": 1, "kind": kind, **fields, "time": time.time()}
            )

    def write_result(self, result: JobResult) -> None:
        self.write_json(self.job(result.job) / "result.json", {"v": 1, **asdict(result)})

    def close_file(self, path: Path) -> None:
        """One that lines are appended to; the directory stays taken."""
        file = self._open.pop(path, None)
        # A full disk was said when the line was written.
        with contextlib.suppress(OSError):
            if file is not None:
                file.close()

    def close_files(self) -> None:
        for path in list(self._open):
            self.close_file(path)

    def close(self) -> None:
        self.close_files()
        if self._lock is not None:
            with contextlib.suppress(OSError):
                (self.root / HOLDER).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def _locks(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Make a file or the names in a directory survive a power loss."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    staged = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with staged.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def replace_directory(path: Path, fill: Callable[[Path], None]) -> None:
    """Fill a new directory beside `path`, then put it in its place. If anything fails, what was at
    `path` stays and nothing else is left."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as beside:
        staged, old = Path(beside) / "new", Path(beside) / "old"
        staged.mkdir()
        fill(staged)
        for written in (*staged.iterdir(), staged):
            sync(written)
        if path.exists():
            os.replace(path, old)
        try:
            os.replace(staged, path)
        except OSError:
            if old.exists():
                os.replace(old, path)
            raise
    sync(path.parent)
