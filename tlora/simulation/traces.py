"""Readers of job traces. The header tells which kind a file is; a row that cannot be a job is named
with file and line, and refused or skipped as asked."""

import csv
import gzip
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from tlora.core.errors import DataError
from tlora.core.request import PRIORITIES

OnBad = Literal["raise", "skip"]
DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What our own CSV says of a job; other traces leave it to the mapping."""

    steps: int
    rank: int
    batch: int
    length: int
    base: str | None = None
    priority: float = 1.0


@dataclass(frozen=True, slots=True)
class TraceJob:
    name: str
    arrival_s: float
    duration_s: float | None
    """On the GPUs it had; None where steps are given instead."""

    gpus: int
    """Part of a GPU counts as one."""

    tenant: str = "default"
    status: str = ""
    given: Given | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    jobs: tuple[TraceJob, ...]
    """In order of arrival."""

    skipped: tuple[str, ...] = ()
    """A message for each row that was bad."""

    left_out: int = 0
    """Rows that are well but no jobs for us: no GPU asked for, or never run."""

    def first(
        self, *, days: float | None = None, jobs: int | None = None, skip_days: float = 0.0
    ) -> "Trace":
        """Those of the first days after the ones that are skipped, and no more than so many."""
        kept = self.jobs
        if skip_days and kept:
            start = kept[0].arrival_s + skip_days * DAY_S
            kept = tuple(job for job in kept if job.arrival_s >= start)
        if days is not None and kept:
            end = kept[0].arrival_s + days * DAY_S
            kept = tuple(job for job in kept if job.arrival_s < end)
        return Trace(self.name, kept[:jobs], self.skipped, self.left_out)


YEAR_S = 366 * DAY_S
MOST_SECONDS = 10 * YEAR_S
"""Of a job: more is another unit, and would be simulated to its end."""


class _BadRow(Exception):
    """What is wrong with it; the reader adds where."""


Row = Mapping[str, str]


def read_trace(path: str | Path, *, on_bad: OnBad = "raise", sort: bool = False) -> Trace:
    """Raises DataError for a file that is no trace and, unless they are to be skipped, for the
    first bad row. `sort`: rows out of order are put in order and are not bad."""
    path = Path(path).expanduser()
    rows = _rows(path)
    if not rows:
        raise DataError("is empty; a trace begins with a header", path=str(path))
    header = [name.strip() for name in rows[0][1]]
    parse = _format(header, path)
    jobs: list[TraceJob] = []
    skipped: list[str] = []
    names: set[str] = set()
    left_out, latest = 0, -math.inf
    for line, cells in rows[1:]:
        try:
            job = parse(_named(header, cells))
            if job is None:
                left_out += 1
                continue
            if job.name in names:
                raise _BadRow(f"job '{job.name}' is there already")
            if job.arrival_s < latest and not sort:
                raise _BadRow("arrives before the row above it (--sort puts rows in order)")
        except _BadRow as error:
            bad = DataError(str(error), path=str(path), line=line)
            if on_bad == "raise":
                raise bad from None
            skipped.append(str(bad))
            continue
        names.add(job.name)
        latest = max(latest, job.arrival_s)
        jobs.append(job)
    if not jobs:
        raise DataError("holds no job that could be run", path=str(path))
    jobs.sort(key=lambda job: job.arrival_s)
    name = path.name.removesuffix(".gz").removesuffix(".csv")
    return Trace(name, tuple(jobs), tuple(skipped), left_out)


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    """With their line numbers; empty ones at the end are none."""
    opener: Callable[..., object] = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:  # type: ignore[attr-defined]
            reader = csv.reader(file)
            rows = [(reader.line_num, cells) for cells in reader]
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise DataError("is not a whole gzip file", path=str(path)) from None
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", path=str(path)) from None
    except (UnicodeDecodeError, csv.Error):
        raise DataError("is not a CSV text file", path=str(path)) from None
    while rows and not any(rows[-1][1]):
        rows.pop()
    return rows


def _named(header: Sequence[str], cells: Sequence[str]) -> Row:
    if not any(cell.strip() for cell in cells):
        raise _BadRow("is empty")
    if len(cells) != len(header):
        raise _BadRow(f"has {len(cells)} cells, the header has {len(header)}")
    return {name: cell.strip() for name, cell in zip(header, cells, strict=True)}


def _cluster_job(row: Row) -> TraceJob | None:
    """job_id, submit_time_s, submit_time, duration_s, gpus, vc, status."""
    if row["submit_time_s"]:
        arrival = _number(row, "submit_time_s")
    else:
        arrival = _timestamp(row, "submit_time")
    return _job(
        name=_text(row, "job_id"),
        arrival_s=arrival,
        duration_s=_number(row, "duration_s"),
        gpus=_number(row, "gpus"),
        tenant=row["vc"],
        status=row["status"],
    )


def _acme_job(row: Row) -> TraceJob | None:
    """AcmeTrace, as in trace_seren.csv; `gpu_num` counts the GPUs of all its nodes."""
    return _job(
        name=_text(row, "job_id"),
        arrival_s=_timestamp(row, "submit_time"),
        duration_s=_number(row, "duration"),
        gpus=_number(row, "gpu_num"),
        tenant=row["user"],
        status=row["state"],
    )


def _own_job(row: Row) -> TraceJob | None:
    """name, arrival_s, steps, gpus, rank, batch, length; base, tenant, priority if wanted."""
    priority = _number(row, "priority") if row.get("priority") else 1.0
    least, most = PRIORITIES
    if not least <= priority <= most:
        raise _BadRow(f"priority: must be between {least:g} and {most:g}, got {priority:g}")
    return TraceJob(
        name=_text(row, "name"),
        arrival_s=_number(row, "arrival_s"),
        duration_s=None,
        gpus=_count(row, "gpus"),
        tenant=row.get("tenant") or "default",
        given=Given(
            steps=_count(row, "steps"),
            rank=_count(row, "rank"),
            batch=_count(row, "batch"),
            length=_count(row, "length"),
            base=row.get("base") or None,
            priority=priority,
        ),
    )


def _job(
    *, name: str, arrival_s: float, duration_s: float, gpus: float, tenant: str, status: str
) -> TraceJob | None:
    """None for a row that asked for no GPU or never ran."""
    if duration_s > MOST_SECONDS:
        raise _BadRow(f"a duration is in seconds and at most ten years, got {duration_s:g}")
    if not gpus or not duration_s:
        return None
    return TraceJob(name, arrival_s, duration_s, math.ceil(gpus), tenant or "default", status)


FORMATS: dict[tuple[str, ...], Callable[[Row], TraceJob | None]] = {
    ("job_id", "submit_time_s", "submit_time", "duration_s", "gpus", "vc", "status"): _cluster_job,
    ("job_id", "user", "gpu_num", "state", "submit_time", "duration"): _acme_job,
    ("name", "arrival_s", "steps", "gpus", "rank", "batch", "length"): _own_job,
}
"""Columns that a header must have -> how its rows are read. Further columns are left alone."""


def _format(header: Sequence[str], path: Path) -> Callable[[Row], TraceJob | None]:
    if len(set(header)) < len(header):
        raise DataError("names a column twice", path=str(path), line=1)
    for columns, parse in FORMATS.items():
        if set(columns) <= set(header):
            return parse
    nearest = max(FORMATS, key=lambda columns: len(set(columns) & set(header)))
    missing = [name for name in nearest if name not in header]
    known = "; ".join(",".join(columns) for columns in FORMATS)
    if len(missing) < len(nearest):
        message = f"lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
    else:
        message = "is no trace that is known"
    raise DataError(f"{message}; headers that are read: {known}", path=str(path), line=1)


def _text(row: Row, name: str) -> str:
    if not row[name]:
        raise _BadRow(f"{name}: is empty")
    return row[name]


def _number(row: Row, name: str) -> float:
    text = _text(row, name)
    try:
        value = float(text)
    except ValueError:
        raise _BadRow(f"{name}: must be a number, got '{text[:40]}'") from None
    if not math.isfinite(value) or value < 0:
        raise _BadRow(f"{name}: must be at least 0, got {text[:40]}")
    return value


def _count(row: Row, name: str) -> int:
    value = _number(row, name)
    if value < 1 or value != int(value):
        raise _BadRow(f"{name}: must be a whole number of at least 1, got {row[name]}")
    return int(value)


def _timestamp(row: Row, name: str) -> float:
    """Without a zone it is taken as UTC: only differences matter."""
    text = _text(row, name)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise _BadRow(f"{name}: must be a date and time, got '{text[:40]}'") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
