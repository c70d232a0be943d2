"""What people ask of a run from another process, in the run's SQLite file: the one channel of
sweeps and of plain runs. Anybody may put a request and wait for its answer; the process that has
the run reads those that are open, and answers."""

import json
import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlora.store.sqlite import connected


@dataclass(frozen=True, slots=True)
class Request:
    number: int
    kind: str
    """Of sweeps: stop, resume or clone. Of runs: submit, cancel or resume."""

    trial: str
    """Or job; empty where several are submitted."""

    body: dict[str, Any]


class Requests:
    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._connection: sqlite3.Connection = connected(path)

    def request(self, kind: str, trial: str, body: Mapping[str, Any]) -> int:
        with self._connection as write:
            done = write.execute(
                "INSERT INTO requests (time, kind, trial, body) VALUES (?, ?, ?, ?)",
                (self._clock(), kind, trial, _text(body)),
            )
        assert done.lastrowid is not None
        return done.lastrowid

    def open_requests(self) -> list[Request]:
        return [
            Request(number, kind, trial, json.loads(body))
            for number, kind, trial, body in self._connection.execute(
                "SELECT number, kind, trial, body FROM requests WHERE answer IS NULL "
                "ORDER BY number"
            )
        ]

    def answer(self, number: int, text: str) -> bool:
        """False if there is an answer already, which stays."""
        with self._connection as write:
            done = write.execute(
                "UPDATE requests SET answer = ? WHERE number = ? AND answer IS NULL", (text, number)
            )
        return done.rowcount == 1

    def answer_to(self, number: int) -> str | None:
        row = self._connection.execute(
            "SELECT answer FROM requests WHERE number = ?", (number,)
        ).fetchone()
        return row[0] if row else None

    def close(self) -> None:
        self._connection.close()


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
