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


def stays(attendance: Iterable[Attendance], until: float, lost: Sequence[float] = ()) -> list[Stay]:
    """By device and begin; a job that spans ranks stays on each of them. Jobs that are still there
    stay until then, or until their group was `lost`; comings and goings of a run on one device,
    which have no device, are left out."""
    open_: dict[str, tuple[range, float]] = {}
    found: list[tuple[int, float, float, str]] = []

    def close(job: str, at: float) -> None:
        # One that comes again without having gone was lost with its device.
        devices, began = open_.pop(job, (range(0), 0.0))
        found.extend((device, began, max(at, began), job) for device in devices)

    losses = sorted(lost, reverse=True)
    for each in attendance:
        while losses and losses[-1] <= each.at:
            at = losses.pop()
            for job in list(open_):
                close(job, at)
        close(each.job, each.at)
        if each.came and each.device is not None:
            open_[each.job] = (range(each.device, each.device + each.ranks), each.at)
    for job in list(open_):
        close(job, min([until, *losses]))
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
