"""Who trained on which device, and when: intervals from comings and goings, laid side by side.

A pure choice; the report draws it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tlora.runtime.run_log import Attendance


@dataclass(frozen=True, slots=True)
class Stay:
    job: str
    device: int
    began: float
    ended: float
    lane: int
    """Among those of its device: no two of one lane overlap."""


def stays(attendance: Iterable[Attendance], until: float) -> list[Stay]:
    """By device and begin. Jobs that are still there stay until then; comings and goings of a run
    on one device, which have no device, are left out."""
    open_: dict[str, tuple[int, float]] = {}
    found: list[tuple[int, float, float, str]] = []
    for each in attendance:
        # One that comes again without having gone was lost with its device.
        if (before := open_.pop(each.job, None)) is not None:
            found.append((*before, each.at, each.job))
        if each.came and each.device is not None:
            open_[each.job] = (each.device, each.at)
    found += [(*there, max(until, there[1]), job) for job, there in open_.items()]
    return in_lanes(sorted(found))


def in_lanes(intervals: Sequence[tuple[int, float, float, str]]) -> list[Stay]:
    """Each into the first lane of its device that is free; they are sorted by device and begin."""
    free_at: dict[int, list[float]] = {}
    placed: list[Stay] = []
    for device, began, ended, job in intervals:
        lanes = free_at.setdefault(device, [])
        lane = next((at for at, free in enumerate(lanes) if free <= began), len(lanes))
        if lane == len(lanes):
            lanes.append(ended)
        else:
            lanes[lane] = ended
        placed.append(Stay(job, device, began, ended, lane))
    return placed
