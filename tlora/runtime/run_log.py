"""What a run has left on disk, read back: for reports on runs of any age, finished or not.

Nothing is demanded but run.json. A last line that a crash cut short is passed over.
"""

import json
import sqlite3
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tlora.core.errors import SpecError
from tlora.runtime.settings import flat
from tlora.store.sqlite import decisions_of
from tlora.training.size_search import Action, ControllerSettings, Decision, Measure

WAITS = "waits"
"""For a place, in a run that was stopped while it had one, say."""

CAME, WENT = ("attached", "joined"), ("ended", "detached", WAITS)
BEGINS = ("attached", "began")
"""Kinds of events."""

Record = dict[str, Any]
"""A line of a JSONL file."""


@dataclass(frozen=True, slots=True)
class NanoBatch:
    """One forward and backward pass, or a forward pass of an evaluation."""

    ended: float
    """Running time, in seconds."""

    rows: int
    tokens: dict[str, int]
    evaluation: bool
    broke_off: bool
    measure: Measure | None = None
    """What the nano-batch controller was told, if there was one."""

    device: int | None = None
    """Of several."""

    seconds: float = 0.0
    """That it took."""


@dataclass(frozen=True, slots=True)
class Attendance:
    """A job came or went."""

    at: float
    job: str
    came: bool
    device: int | None = None
    """Of several."""

    ranks: int = 1
    """That it spans, from that device on."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The nano-batch controller decided something."""

    at: float
    decision: Decision


@dataclass(frozen=True, slots=True)
class Placed:
    """The scheduler decided who trains where."""

    at: float
    sentence: str


@dataclass(frozen=True, slots=True)
class Lost:
    """A group of ranks ended before its jobs did."""

    at: float
    cause: str


@dataclass(frozen=True, slots=True)
class Sessions:
    """Wall time to running time: a run that was stopped and went on has a gap, which is cut out."""

    wall: list[float]
    running: list[float]

    def running_time(self, wall: float) -> float:
        at = max(0, bisect_right(self.wall, wall) - 1)
        return max(0.0, wall - self.wall[at]) + self.running[at]


@dataclass(frozen=True, slots=True)
class JobLog:
    name: str
    settings: dict[str, object]
    train: list[Record]
    evaluations: list[Record]
    result: Record | None


@dataclass(frozen=True, slots=True)
class RunLog:
    root: Path
    about: Record
    """run.json"""

    engine: dict[str, object]
    jobs: list[JobLog]
    nano_batches: list[NanoBatch]
    attendance: list[Attendance]
    tuned: list[Tuned]
    placed: list[Placed]
    lost: list[Lost]
    sessions: Sessions

    @property
    def seconds(self) -> float:
        return self.nano_batches[-1].ended if self.nano_batches else 0.0


def read_run(root: Path) -> RunLog:
    about = read_about(root)
    spec = read_spec(root / "resolved.yaml")
    settings = {str(job["name"]): flat(job) for job in spec.get("jobs", [])}
    names = dict.fromkeys([*settings, *about.get("jobs", [])])
    # Those of several devices are written in turns.
    events = sorted(read_lines(root / "events.jsonl"), key=lambda event: event["time"])
    sessions = find_sessions(events)
    return RunLog(
        root=root,
        about=about,
        engine=flat(spec.get("engine", {})),
        jobs=[read_job(root / name, settings.get(name, {"name": name})) for name in names],
        nano_batches=[
            NanoBatch(
                ended=sessions.running_time(event["time"]),
                rows=event["rows"],
                tokens=event["tokens"],
                evaluation=event["purpose"] == "eval",
                broke_off=event["error"] is not None,
                measure=Measure(**event["measure"]) if "measure" in event else None,
                device=event.get("device"),
                seconds=event.get("seconds", 0.0),
            )
            for event in events
            if event["kind"] == "nano_batch" and event["purpose"] is not None
        ],
        attendance=[
            Attendance(
                sessions.running_time(e["time"]),
                e["job"],
                e["kind"] in CAME,
                e.get("device"),
                e.get("ranks", 1),
            )
            for e in events
            if e["kind"] in (*CAME, *WENT)
        ],
        tuned=[
            Tuned(sessions.running_time(e["time"]), read_decision(e))
            for e in events
            if e["kind"] == "tuned"
        ],
        placed=[
            Placed(sessions.running_time(wall), sentence)
            for wall, sentence in read_placed(root / "state.sqlite")
        ],
        lost=[
            Lost(sessions.running_time(e["time"]), e["cause"])
            for e in events
            if e["kind"] == "group_lost"
        ],
        sessions=sessions,
    )


def read_about(root: Path) -> Record:
    """run.json, without which nothing is a run."""
    if not root.is_dir():
        raise SpecError(f"{root} is {'a file' if root.exists() else 'not there'}; name a directory")
    try:
        about = json.loads((root / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        inside = sorted(path.parent.name for path in root.glob("*/run.json"))
        hint = f"; did you mean {root / inside[0]}?" if inside else ""
        raise SpecError(
            f"{root} is not the directory of a run: it holds no run.json{hint}"
        ) from None
    except (OSError, ValueError) as error:
        raise SpecError(f"{root} is not the directory of a run: run.json: {error}") from error
    if not isinstance(about, dict):
        raise SpecError(f"{root} is not the directory of a run: run.json holds no mapping")
    return about


def read_job(folder: Path, settings: dict[str, object]) -> JobLog:
    records = list(read_lines(folder / "metrics.jsonl"))
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        result = None
    return JobLog(
        name=folder.name,
        settings=settings,
        train=[record for record in records if record["kind"] == "train"],
        evaluations=[record for record in records if record["kind"] == "eval"],
        result=result,
    )


def read_decision(event: Record) -> Decision:
    fields = ("nano_batch", "measured", "tokens_per_s", "budget", "why")
    return Decision(action=Action(event["action"]), **{name: event[name] for name in fields})


def read_placed(path: Path) -> list[tuple[float, str]]:
    """(Time of day, sentence) of every decision; of a store that cannot be read, none."""
    try:
        return decisions_of(path)
    except sqlite3.Error:
        return []


def read_tunings(events: Iterable[Record]) -> Iterator[tuple[ControllerSettings, list[Measure]]]:
    """What the controller of each session was set to, and all that it was told: enough to replay
    its decisions."""
    settings: ControllerSettings | None = None
    measures: list[Measure] = []
    for event in events:
        if event["kind"] == "tuning":
            if settings is not None:
                yield settings, measures
            told = event["settings"]
            settings, measures = ControllerSettings(**told | {"sizes": tuple(told["sizes"])}), []
        elif event["kind"] == "nano_batch" and "measure" in event:
            measures.append(Measure(**event["measure"]))
    if settings is not None:
        yield settings, measures


def read_spec(path: Path) -> dict[str, Any]:
    """Without the checks of a job file: what was right then need not be right now."""
    try:
        # The C loader where there is one: a hundred jobs are thousands of lines.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        spec = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    except (OSError, yaml.YAMLError):
        return {}
    return spec if isinstance(spec, dict) else {}


def read_lines(path: Path) -> Iterator[Record]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def find_sessions(events: list[Record]) -> Sessions:
    """A run begins, and goes on, by attaching its jobs; one over several devices says so itself,
    for its jobs come at any time."""
    wall: list[float] = []
    running: list[float] = []
    last: float | None = None
    for event in events:
        now = event["time"]
        if not wall:
            wall.append(now)
            running.append(0.0)
        elif event["kind"] in BEGINS and last is not None:
            running.append(running[-1] + last - wall[-1])
            wall.append(now)
        if event["kind"] in BEGINS:
            # Between attaching and the first pass there is nothing to cut.
            last = None
        elif last is not None or event["kind"] != "joined":
            # Of older runs: a worker's first job came before whoever led heard that it is there.
            last = now
    return Sessions(wall or [0.0], running or [0.0])
