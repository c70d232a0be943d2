"""Which task was on which device, when: from the events of a sweep over several devices."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]

OF_WORKERS = ("nano_batch", "joined", "detached", "ended", "lost")
"""What a time can be read off."""


@dataclass(frozen=True, slots=True)
class Stay:
    """A trial on a device; seconds of running, stops left out."""

    device: int
    task: str
    trial: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Bar:
    """A task on a device, from the first of its trials that came until none was left."""

    device: int
    task: str
    begin: float
    end: float
    trials: int


@dataclass(frozen=True, slots=True)
class Timeline:
    devices: int
    seconds: float
    """Until the last trial was over: the makespan."""

    stays: tuple[Stay, ...]
    busy: dict[tuple[int, str], float]
    """Seconds of nano-batches by device and task."""

    plans: int
    """How often tasks were dealt by a new plan."""

    @property
    def bars(self) -> tuple[Bar, ...]:
        return tuple(bars_of(self.stays))

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(stay.task for stay in self.stays))

    @property
    def busy_share(self) -> float:
        """Of all devices, from the beginning to the end."""
        return sum(self.busy.values()) / max(self.devices * self.seconds, 1e-9)

    def device_seconds(self, task: str) -> float:
        return sum(seconds for (_, name), seconds in self.busy.items() if name == task)


def read_timeline(root: Path, tasks: Mapping[str, str], devices: int) -> Timeline | None:
    """`tasks`: of each trial. None if nothing says which device a trial was on, or no time had
    passed there when the sweep was stopped."""
    try:
        lines = (root / "events.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = timeline_of(_records(lines), tasks, devices)
    return found if found.stays and found.seconds > 0 else None


def _records(lines: Iterable[str]) -> Iterable[Json]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            # The last one of a process that was killed.
            continue


def timeline_of(records: Iterable[Json], tasks: Mapping[str, str], devices: int) -> Timeline:
    before = began = last = 0.0
    there: dict[str, tuple[int, float]] = {}
    stays: list[Stay] = []
    busy: dict[tuple[int, str], float] = {}
    plans = 0

    def leave(trial: str, at: float) -> None:
        device, begin = there.pop(trial)
        stays.append(Stay(device, tasks[trial], trial, begin, max(begin, at)))

    for record in records:
        kind, job, device = record["kind"], record.get("job"), record.get("device")
        if kind == "began":
            # An earlier process may have been killed: who was there was there until its end.
            for trial in list(there):
                leave(trial, last)
            before, began = last, record["time"]
            continue
        if kind == "planned":
            plans += 1
        if kind not in OF_WORKERS or device is None:
            # The leading process says things before the workers are there.
            continue
        # Messages of two workers may come out of order.
        now = before + record["time"] - began
        last = max(last, now)
        if kind == "nano_batch":
            share = sum(record["tokens"].values()) or 1
            for trial, tokens in record["tokens"].items():
                key = (device, tasks[trial])
                busy[key] = busy.get(key, 0.0) + record["seconds"] * tokens / share
        elif kind == "joined" and job is not None:
            if job in there:
                leave(job, now)
            there[job] = (device, now)
        elif kind in ("detached", "ended") and job in there:
            leave(job, now)
        elif kind == "lost":
            for trial in [each for each, (where, _) in there.items() if where == device]:
                leave(trial, now)
    for trial in list(there):
        leave(trial, last)
    end = max((stay.end for stay in stays), default=0.0)
    return Timeline(devices, end, tuple(stays), busy, plans)


def bars_of(stays: Iterable[Stay]) -> list[Bar]:
    bars: list[Bar] = []
    open_bars: dict[tuple[int, str], Bar] = {}
    for stay in sorted(stays, key=lambda each: (each.begin, each.end, each.trial)):
        key = (stay.device, stay.task)
        bar = open_bars.get(key)
        if bar is None or stay.begin > bar.end:
            if bar is not None:
                bars.append(bar)
            open_bars[key] = Bar(stay.device, stay.task, stay.begin, stay.end, 1)
        else:
            end = max(bar.end, stay.end)
            open_bars[key] = Bar(bar.device, bar.task, bar.begin, end, bar.trials + 1)
    return sorted([*bars, *open_bars.values()], key=lambda each: (each.device, each.begin))
