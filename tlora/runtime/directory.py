"""The run directory: what is written where, and how it is replaced without ever being half
there."""

import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from tlora.core.errors import SpecError


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


class RunDirectory:
    """Line-by-line files are flushed per line, so that a reader or a crash never sees half a
    record."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: dict[Path, IO[str]] = {}

    def create(self, *, fresh: bool) -> None:
        if fresh and self.root.exists():
            shutil.rmtree(self.root)
        if (self.root / "run.json").exists():
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
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(name, path)


def replace_directory(path: Path, fill) -> None:
    """Fill a new directory beside `path`, then put it in its place."""
    staged = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    fill(staged)
    staged.chmod(0o755)
    if path.exists():
        old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
        os.replace(path, old / path.name)
        os.replace(staged, path)
        shutil.rmtree(old)
    else:
        os.replace(staged, path)
