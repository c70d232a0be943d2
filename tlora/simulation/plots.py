"""The numbers behind the report's plots, few enough to embed: quantiles of completion times, means
over equal slices of time, and who held which GPU."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tlora.core.event import GpuFailure, GpuRepair
from tlora.simulation.compare import COMPARED, Comparison
from tlora.simulation.executor import Stretch
from tlora.simulation.metrics import jct_s
from tlora.simulation.run import Result

QUANTILES = 201
SLICES = 240
MOST_BARS = 2500
"""Of the Gantt chart of a policy; more would be thinner than can be seen."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A group with as many jobs on neighbouring GPUs."""

    first_gpu: int
    gpus: int
    start: float
    end: float
    group: str
    base: str
    jobs: int
    all_gpus: int


def plot_data(comparison: Comparison) -> dict[str, Any]:
    results = comparison.first
    origin = min(_start(result) for result in results.values())
    end = max(_end(result) for result in results.values())
    edges = np.linspace(origin, max(end, origin + 1.0), SLICES + 1)
    bars = {policy: gantt_bars(result.recorder.stretches) for policy, result in results.items()}
    window = _window(bars.values(), origin, end, _busiest(results.values(), edges))
    return {
        "policies": list(results),
        "slots": [_slot(policy, place) for place, policy in enumerate(results)],
        "gpus": comparison.setting.gpus,
        "per_node": comparison.setting.per_node,
        "seed": next(iter(results.values())).seed,
        "jct": {policy: quantiles(result) for policy, result in results.items()},
        "times": [round(float(each - origin), 3) for each in edges[1:]],
        "over_time": {policy: over_time(result, edges) for policy, result in results.items()},
        "window": [window[0] - origin, window[1] - origin, end - origin],
        "gantt": {
            policy: [_bar(bar, window, origin) for bar in each if _inside(bar, window)]
            for policy, each in bars.items()
        },
        "down": {
            policy: [
                [gpu, *_clipped(start, stop, window, origin)]
                for gpu, start, stop in outages(result)
                if start < window[1] and stop > window[0]
            ]
            for policy, result in results.items()
        },
    }


def quantiles(result: Result) -> list[float]:
    """Of completion times, at equal steps from the shortest to the longest."""
    times = [jct_s(job) for job in _done(result)]
    if not times:
        return []
    found = np.quantile(times, np.linspace(0, 1, QUANTILES))
    return [round(max(float(each), 1e-3), 3) for each in found]


def over_time(result: Result, edges: np.ndarray) -> dict[str, list[float]]:
    """Means over the slices of time between the edges."""
    stretches, costs = result.recorder.stretches, result.costs
    cluster = len(costs.cluster)
    worth = [
        sum(
            rate
            * costs.figures(result.recorder.jobs[job].request).solo_step_s
            * result.recorder.jobs[job].request.gpus
            for job, rate in each.rates.items()
        )
        for each in stretches
    ]
    starts = [each.start for each in stretches]
    ends = [each.end for each in stretches]
    busy = binned(starts, ends, [len(each.gpus) for each in stretches], edges) / cluster
    effective = binned([each.trains_from for each in stretches], ends, worth, edges) / cluster
    jobs = list(result.recorder.jobs.values())
    present = binned(
        [job.request.arrival_s for job in jobs],
        [job.request.arrival_s if job.ended_s is None else job.ended_s for job in jobs],
        [1.0] * len(jobs),
        edges,
    )
    running = binned(starts, ends, [len(each.rates) for each in stretches], edges)
    return {
        "busy": _rounded(busy),
        "effective": _rounded(effective),
        "waiting": _rounded(np.maximum(present - running, 0)),
    }


def binned(
    starts: Sequence[float], ends: Sequence[float], weights: Sequence[float], edges: np.ndarray
) -> np.ndarray:
    """The mean, over each slice, of the sum of the weights of the intervals that cover a time."""
    if not len(starts):
        return np.zeros(len(edges) - 1)
    total = _ramp(np.array(starts, float), np.array(weights, float), edges)
    total -= _ramp(np.array(ends, float), np.array(weights, float), edges)
    return np.diff(total) / np.diff(edges)


def gantt_bars(stretches: Iterable[Stretch]) -> list[Bar]:
    """Neighbours in time that look the same are one bar; GPUs that are apart are bars of their
    own."""
    open_bars: dict[str, tuple[tuple[int, ...], int, float, float, str]] = {}
    bars: list[Bar] = []
    for each in stretches:
        known = open_bars.get(each.group)
        looks = (each.gpus, len(each.rates))
        if known and known[:2] == looks and known[3] == each.start:
            open_bars[each.group] = (*looks, known[2], each.end, each.base)
            continue
        if known:
            bars += _bars_of(each.group, *known)
        open_bars[each.group] = (*looks, each.start, each.end, each.base)
    for group, known in open_bars.items():
        bars += _bars_of(group, *known)
    return bars


def outages(result: Result) -> list[tuple[int, float, float]]:
    """GPU, from, to."""
    began: dict[int, float] = {}
    found: list[tuple[int, float, float]] = []
    for event in result.world:
        if isinstance(event, GpuFailure):
            began |= dict.fromkeys(event.gpus, event.time)
        elif isinstance(event, GpuRepair):
            found += [(gpu, began.pop(gpu), event.time) for gpu in event.gpus if gpu in began]
    return found


def _slot(policy: str, place: int) -> int:
    """Of its colour and dashes."""
    return COMPARED.index(policy) if policy in COMPARED else len(COMPARED) + place


def _bars_of(
    group: str, gpus: tuple[int, ...], jobs: int, start: float, end: float, base: str
) -> list[Bar]:
    bars: list[Bar] = []
    row = sorted(gpus)
    first = 0
    for at in range(1, len(row) + 1):
        if at == len(row) or row[at] != row[at - 1] + 1:
            bars.append(Bar(row[first], at - first, start, end, group, base, jobs, len(gpus)))
            first = at
    return bars


def _window(
    bars: Iterable[Sequence[Bar]], origin: float, end: float, centre: float
) -> tuple[float, float]:
    """The whole time, or as much of it around the centre as can be drawn."""
    all_bars = list(bars)
    length, window = end - origin, (origin, end)
    while any(sum(_inside(bar, window) for bar in each) > MOST_BARS for each in all_bars):
        length /= 2
        start = min(max(origin, centre - length / 2), end - length)
        window = (start, start + length)
    return window


def _busiest(results: Iterable[Result], edges: np.ndarray) -> float:
    """The middle of the slice in which most jobs of the first policy are there."""
    jobs = list(next(iter(results)).recorder.jobs.values())
    ends = [job.request.arrival_s if job.ended_s is None else job.ended_s for job in jobs]
    present = binned([job.request.arrival_s for job in jobs], ends, [1.0] * len(jobs), edges)
    at = int(np.argmax(present))
    return float(edges[at] + edges[at + 1]) / 2


def _inside(bar: Bar, window: tuple[float, float]) -> bool:
    return bar.start < window[1] and bar.end > window[0]


def _bar(bar: Bar, window: tuple[float, float], origin: float) -> list[Any]:
    clipped = _clipped(bar.start, bar.end, window, origin)
    return [bar.first_gpu, bar.gpus, *clipped, bar.group, bar.base, bar.jobs, bar.all_gpus]


def _clipped(
    start: float, end: float, window: tuple[float, float], origin: float
) -> tuple[float, float]:
    low, high = max(start, window[0]) - origin, min(end, window[1]) - origin
    return round(low, 1), round(high, 1)


def _ramp(times: np.ndarray, weights: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """At each edge: the sum over earlier times of weight x time since."""
    order = np.argsort(times)
    times, weights = times[order], weights[order]
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    moments = np.concatenate([[0.0], np.cumsum(weights * times)])
    at = np.searchsorted(times, edges, side="right")
    return sums[at] * edges - moments[at]


def _rounded(values: np.ndarray) -> list[float]:
    return [round(float(each), 4) + 0.0 for each in values]


def _done(result: Result) -> list[Any]:
    jobs = result.recorder.jobs.values()
    return [job for job in jobs if job.outcome in ("completed", "exited")]


def _start(result: Result) -> float:
    return min(job.request.arrival_s for job in result.recorder.jobs.values())


def _end(result: Result) -> float:
    return max(job.ended_s or 0.0 for job in result.recorder.jobs.values())
