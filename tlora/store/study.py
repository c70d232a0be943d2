"""A sweep's log in the run's SQLite file: every event with what was decided on it, and what people
ask of the sweep while it runs (requests.py).

A turn is on disk before it is carried out. One process writes turns.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlora.core.errors import SpecError
from tlora.core.records import as_json
from tlora.store.requests import Requests
from tlora.tuning.events import Action, Event, action_of_json, event_of_json


@dataclass(frozen=True, slots=True)
class StudyTurn:
    session: int
    time: float
    event: Event
    actions: list[Action]
    task: str | None = None
    """Where the sweep has several."""


class StudyLog(Requests):
    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        super().__init__(path, clock)
        self._session = 0

    def begin(self, about: Mapping[str, Any]) -> None:
        """A new session: the same command again. The first one's `about` has the sweep."""
        body = _text({"kind": "sweep", **about, "started": self._clock()})
        with self._connection as write:
            done = write.execute("INSERT INTO sessions (about) VALUES (?)", (body,))
        assert done.lastrowid is not None
        self._session = done.lastrowid

    def about(self) -> dict[str, Any] | None:
        """Of the first session; None if there is none, or it is no sweep."""
        row = self._connection.execute(
            "SELECT about FROM sessions ORDER BY session LIMIT 1"
        ).fetchone()
        found = json.loads(row[0]) if row else {}
        return found if found.get("kind") == "sweep" else None

    def append(self, event: Event, actions: Sequence[Action], task: str | None = None) -> None:
        body = _text([as_json(action) for action in actions])
        with self._connection as write:
            write.execute(
                "INSERT INTO study (session, time, kind, trial, event, actions, task) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    *(self._session, self._clock(), event.kind, getattr(event, "trial", None)),
                    *(_text(as_json(event)), body, task),
                ),
            )

    def turns(self) -> list[StudyTurn]:
        return [
            StudyTurn(
                session,
                at,
                event_of_json(json.loads(event)),
                [action_of_json(each) for each in json.loads(actions)],
                task,
            )
            for session, at, event, actions, task in self._connection.execute(
                "SELECT session, time, event, actions, task FROM study ORDER BY number"
            )
        ]

    def seconds_before(self) -> float:
        """Running time of earlier sessions, as far as it is known: each until its last turn."""
        total = 0.0
        for session, about in self._connection.execute("SELECT session, about FROM sessions"):
            last = self._connection.execute(
                "SELECT max(time) FROM study WHERE session = ?", (session,)
            ).fetchone()[0]
            if session != self._session and last is not None:
                total += max(0.0, last - float(json.loads(about).get("started", last)))
        return total


def read_study_log(root: Path) -> StudyLog:
    """Of a run directory. Raises SpecError if it holds no sweep."""
    path = root / "state.sqlite"
    if not path.is_file():
        raise SpecError(f"{root} is not the directory of a sweep: it holds no state.sqlite")
    log = StudyLog(path)
    if log.about() is None:
        log.close()
        raise SpecError(f"{root} is a run, but not of a sweep")
    return log


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
