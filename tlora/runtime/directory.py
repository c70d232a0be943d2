"""The run directory: what is written where, and how it is replaced without ever being half
there."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from tlora.core.errors import SpecError

RUN_FILES = ("run.json", "resolved.yaml")
"""What a run writes first: a directory with one of them is a run, however it ended."""


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
    serving: list[str] = field(default_factory=list[str])
    """Commands that serve the adapter."""


class RunDirectory:
    """Line-by-line files are flushed per line, so that a reader or a crash never sees half a
    record."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: dict[Path, IO[str]] = {}

    @property
    def is_run(self) -> bool:
        """It holds a run, finished or not."""
        return (self.root / "run.json").exists()

    def create(self, *, fresh: bool) -> None:
        """Make the directory, or with `fresh` make it anew. Removes nothing but a run."""
        if self.root.exists() and not self.root.is_dir():
            raise SpecError(f"--output: {self.root} is a file; name a directory")
        is_run = any((self.root / name).exists() for name in RUN_FILES)
        if fresh and is_run:
            shutil.rmtree(self.root)
        elif fresh and self.root.exists() and any(self.root.iterdir()):
            raise SpecError(
                f"--fresh: {self.root} holds something that is not a run; remove it by hand, or "
                "name another directory"
            )
        elif (self.root / "run.json").exists():
            raise SpecError(
                f"--output: {self.root} holds a run already; name another directory, or add "
                "--fresh to start over"
            )
        self.root.mkdir(parents=True, exist_ok=True)

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
        self.append(
            self.root / "events.jsonl", {"v": 1, "kind": kind, **fields, "time": time.time()}
        )

    def write_result(self, result: JobResult) -> None:
        self.write_json(self.job(result.job) / "result.json", {"v": 1, **asdict(result)})

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()


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
        if path.exists():
            os.replace(path, old)
        try:
            os.replace(staged, path)
        except OSError:
            if old.exists():
                os.replace(old, path)
            raise
