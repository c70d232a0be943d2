"""A store in one SQLite file. A turn is one short transaction, on disk when `record` returns: what
was recorded survives kill -9 and a loss of power, and a turn is there whole or not at all.

One process writes; others may read meanwhile (write-ahead log). Every run of the loop is a session
of its own, whose turns count from 0: the same command again opens a new one in the same file.
"""

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import quote

from tlora.core.decision import Decision, Join, Move, Pause, Refuse, Resize, Start
from tlora.core.errors import SpecError
from tlora.core.event import Arrival, Completion, EarlyExit, Event, GpuFailure, JobFailure
from tlora.core.records import as_json
from tlora.store.schema import bring_up

BUSY_S = 10.0
"""How long a reader that holds the file is waited for."""


class Recorded(Protocol):
    """What the store must know of a turn (control.Turn)."""

    @property
    def number(self) -> int: ...
    @property
    def time(self) -> float: ...
    @property
    def events(self) -> Sequence[Event]: ...
    @property
    def progress(self) -> Mapping[str, float]: ...
    @property
    def decisions(self) -> Sequence[Decision]: ...
    @property
    def decided_s(self) -> float: ...


T = TypeVar("T", bound=Recorded)


@dataclass(frozen=True, slots=True)
class JobRow:
    """How a job stands."""

    name: str
    status: str
    """waiting, running, completed, exited, failed or refused."""

    group: str | None
    arrived_s: float
    ended_s: float | None
    steps: float
    reason: str | None


class SqliteStore(Generic[T]):
    def __init__(
        self,
        path: Path | str,
        *,
        decode: Callable[[dict[str, Any]], T],
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """`decode` makes a turn of its JSON. With `about` (what a replay needs to know besides the
        turns) a new session begins; without, the last one is read."""
        self.path = Path(path)
        self._decode = decode
        self._connection = connected(self.path)
        self.session = self._last_session() if about is None else self._new_session(about)

    def record(self, turn: T) -> None:
        at = (self.session, turn.number)
        with self._connection as write:
            write.execute("BEGIN IMMEDIATE")
            write.execute(
                "INSERT INTO turns VALUES (?, ?, ?, ?, ?)",
                (*at, turn.time, _text(turn.progress), turn.decided_s),
            )
            write.executemany(
                "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)",
                [
                    (*at, place, event.time, event.kind, _job_of(event), _text(as_json(event)))
                    for place, event in enumerate(turn.events)
                ],
            )
            write.executemany(
                "INSERT INTO decisions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        *(*at, place, turn.time, each.kind, _job_of(each), _group_of(each)),
                        *(str(each), _text(as_json(each))),
                    )
                    for place, each in enumerate(turn.decisions)
                ],
            )
            for name, steps in turn.progress.items():
                write.execute("UPDATE jobs SET steps = ? WHERE name = ?", (steps, name))
            for event in turn.events:
                self._happened(write, event)
            for decision in turn.decisions:
                _decided(write, decision, turn.time)

    def turns(self, session: int | None = None) -> Iterator[T]:
        """Of this session, or of another one."""
        chosen = self.session if session is None else session
        read = self._connection
        for number, time, progress, decided_s in read.execute(
            "SELECT number, time, progress, decided_s FROM turns WHERE session = ? ORDER BY number",
            (chosen,),
        ).fetchall():
            yield self._decode(
                {
                    "number": number,
                    "time": time,
                    "events": self._bodies("events", chosen, number),
                    "progress": json.loads(progress),
                    "decisions": self._bodies("decisions", chosen, number),
                    "decided_s": decided_s,
                }
            )

    def about(self, session: int | None = None) -> dict[str, Any]:
        chosen = self.session if session is None else session
        row = self._connection.execute(
            "SELECT about FROM sessions WHERE session = ?", (chosen,)
        ).fetchone()
        return json.loads(row[0])

    def jobs(self) -> list[JobRow]:
        """All that ever arrived, by name."""
        return [
            JobRow(*row)
            for row in self._connection.execute(
                "SELECT name, status, group_name, arrived_s, ended_s, steps, reason FROM jobs"
            )
        ]

    def close(self) -> None:
        self._connection.close()

    def _bodies(self, table: str, session: int, turn: int) -> list[dict[str, Any]]:
        found = self._connection.execute(
            f"SELECT body FROM {table} WHERE session = ? AND turn = ? ORDER BY place",
            (session, turn),
        )
        return [json.loads(body) for (body,) in found]

    def _new_session(self, about: Mapping[str, Any]) -> int:
        with self._connection as write:
            done = write.execute("INSERT INTO sessions (about) VALUES (?)", (_text(about),))
        assert done.lastrowid is not None
        return done.lastrowid

    def _last_session(self) -> int:
        found = self._connection.execute("SELECT max(session) FROM sessions").fetchone()[0]
        if found is None:
            raise SpecError(f"{self.path} holds no session")
        return int(found)

    def _happened(self, write: sqlite3.Connection, event: Event) -> None:
        match event:
            case Arrival(time=time, request=request):
                write.execute(
                    "INSERT INTO jobs VALUES (?, ?, 'waiting', NULL, ?, NULL, 0, NULL, ?) "
                    "ON CONFLICT (name) DO UPDATE SET session = excluded.session, "
                    "status = 'waiting', group_name = NULL, arrived_s = excluded.arrived_s, "
                    "ended_s = NULL, reason = NULL, request = excluded.request",
                    (request.name, self.session, time, _text(as_json(request))),
                )
            case Completion(time=time, job=job):
                _ended(write, job, "completed", time, None)
            case EarlyExit(time=time, job=job, reason=reason):
                _ended(write, job, "exited", time, reason)
            case JobFailure(time=time, job=job, reason=reason):
                _ended(write, job, "failed", time, reason)
            case GpuFailure(gpus=gpus):
                for (group,) in self._groups_on(write, gpus):
                    write.execute(
                        "UPDATE jobs SET status = 'waiting', group_name = NULL "
                        "WHERE group_name = ? AND session = ?",
                        (group, self.session),
                    )
            case _:
                pass

    def _groups_on(self, write: sqlite3.Connection, gpus: Sequence[int]) -> list[tuple[str]]:
        """Those whose last start or resize gave them one of these GPUs."""
        found: dict[str, set[int]] = {}
        for group, body in write.execute(
            "SELECT group_name, body FROM decisions WHERE session = ? AND kind IN "
            "('start', 'resize') ORDER BY turn, place",
            (self.session,),
        ):
            found[group] = set(json.loads(body)["gpus"])
        return [(group,) for group, its in found.items() if its & set(gpus)]


def decisions_of(path: Path) -> list[tuple[float, str]]:
    """What was decided, as sentences, with the time of day in seconds: of all sessions whose
    `about` says when they `started`. Nothing without a store; it is only read."""
    if not path.exists():
        return []
    # Opened for writing where that is allowed: a reader would leave the log's files behind.
    with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=rw", uri=True)) as read:
        read.execute("PRAGMA query_only = ON")
        abouts = dict(read.execute("SELECT session, about FROM sessions").fetchall())
        started = {session: json.loads(about).get("started") for session, about in abouts.items()}
        return [
            (started[session] + time, sentence)
            for session, time, sentence in read.execute(
                "SELECT session, time, sentence FROM decisions ORDER BY session, turn, place"
            )
            if started[session] is not None
        ]


def connected(path: Path) -> sqlite3.Connection:
    """The file, made or brought up to this version."""
    try:
        # Transactions are begun by hand, where they begin.
        connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous = FULL")
        bring_up(connection, str(path))
    except sqlite3.Error as error:
        raise SpecError(f"{path} cannot be used as a store: {error}") from error
    return connection


def _write_ahead(connection: sqlite3.Connection) -> None:
    """SQLite waits for no other process here: two that make the file at once would collide."""
    end = monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or monotonic() > end:
                raise
        sleep(0.01)


def _decided(write: sqlite3.Connection, decision: Decision, time: float) -> None:
    match decision:
        case Start(jobs=jobs, group=group):
            for job in jobs:
                _placed(write, job, group)
        case Join(job=job, group=group) | Move(job=job, target=group):
            _placed(write, job, group)
        case Pause(job=job):
            write.execute(
                "UPDATE jobs SET status = 'waiting', group_name = NULL WHERE name = ?", (job,)
            )
        case Refuse(job=job, reasons=reasons):
            _ended(write, job, "refused", time, str(reasons))
        case Resize():
            pass


def _placed(write: sqlite3.Connection, job: str, group: str) -> None:
    write.execute("UPDATE jobs SET status = 'running', group_name = ? WHERE name = ?", (group, job))


def _ended(
    write: sqlite3.Connection, job: str, status: str, time: float, reason: str | None
) -> None:
    write.execute(
        "UPDATE jobs SET status = ?, group_name = NULL, ended_s = ?, reason = ? WHERE name = ?",
        (status, time, reason, job),
    )


def _job_of(record: Event | Decision) -> str | None:
    if isinstance(record, Arrival):
        return record.request.name
    return getattr(record, "job", None)


def _group_of(decision: Decision) -> str | None:
    return decision.target if isinstance(decision, Move) else getattr(decision, "group", None)


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
