"""The figures of a simulated run, by one rod for every policy: solo times are those of the true
costs with the fused kernel, whatever the policy's groups ran with.

Keys and meanings as in docs/simulation.md. Where no job was done there is nothing to take a mean
of, and such figures are None.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from tlora.costs.groups import Costs
from tlora.simulation.recorder import JobRecord, Recorder


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tail:
    p95: float | None
    max: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionTime:
    p50: float | None
    p99: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    jct_s: Spread
    """From arrival to end, of jobs that are done."""

    queue_s: Spread
    """Of that, without a group."""

    makespan_s: float
    """From the first arrival to the last end."""

    tokens_per_s: float
    """Of the cluster, over the makespan."""

    samples_per_s: float
    tokens_per_gpu_s: float | None
    """Over the GPU-seconds that groups held: what a GPU in use did."""

    util_busy: float
    """GPU-seconds held by groups / all GPU-seconds of the makespan."""

    util_effective: float
    """GPUs' worth of work / all GPU-seconds of the makespan; fused groups can bring it above 1."""

    slowdown: Tail
    """Per job: what it was due while in groups / what it got, in seconds of solo training."""

    ftf: Tail
    """Finish-time fairness: JCT / JCT with a 1/n share of the cluster throughout."""

    ftf_within: float | None
    """The part of the jobs whose ftf is at most 1.1."""

    regroups: int
    regroup_s: float
    decision_ms: DecisionTime
    cut_misses: int
    jobs_done: int
    jobs_failed: int


def measure(
    recorder: Recorder, costs: Costs, *, regroup_s: float = 0.0, cut_misses: int = 0
) -> Metrics:
    """`costs`: true, fused."""
    jobs = list(recorder.jobs.values())
    done = [job for job in jobs if job.outcome in ("completed", "exited")]
    start = min((job.request.arrival_s for job in jobs), default=0.0)
    makespan = max((job.ended_s for job in jobs if job.ended_s is not None), default=start) - start
    capacity = makespan * len(costs.cluster)
    held = sum((each.end - each.start) * len(each.gpus) for each in recorder.stretches)
    samples = sum(job.steps * job.request.load.batch_size for job in jobs)
    tokens = sum(job.steps * job.request.load.batch_tokens for job in jobs)
    worth = sum(got_s(job, costs) * job.request.gpus for job in jobs)
    fairness = finish_time_fairness(done, jobs, costs)
    decided_ms = np.array(recorder.decided_s) * 1000
    return Metrics(
        jct_s=_spread([jct_s(job) for job in done]),
        queue_s=_spread([job.state.waited_s for job in done]),
        makespan_s=makespan,
        tokens_per_s=_ratio(tokens, makespan) or 0.0,
        samples_per_s=_ratio(samples, makespan) or 0.0,
        tokens_per_gpu_s=_ratio(tokens, held),
        util_busy=_ratio(held, capacity) or 0.0,
        util_effective=_ratio(worth, capacity) or 0.0,
        slowdown=_tail([slowdown(job, costs) for job in done]),
        ftf=_tail(fairness),
        ftf_within=float(np.mean(fairness <= 1.1)) if len(fairness) else None,
        regroups=recorder.regroups,
        regroup_s=regroup_s,
        decision_ms=DecisionTime(p50=_percentile(decided_ms, 50), p99=_percentile(decided_ms, 99)),
        cut_misses=cut_misses,
        jobs_done=len(done),
        jobs_failed=len(jobs) - len(done),
    )


def jct_s(job: JobRecord) -> float:
    assert job.ended_s is not None, f"{job.request.name} has not ended"
    return job.ended_s - job.request.arrival_s


def got_s(job: JobRecord, costs: Costs) -> float:
    """Seconds of solo training that it made."""
    return job.steps * costs.figures(job.request).solo_step_s


def slowdown(job: JobRecord, costs: Costs) -> float:
    """Loading the base and warming up once is a solo run's lot too, and is no slowdown."""
    return job.due_s / (got_s(job, costs) + costs.start_s(job.request.base))


def finish_time_fairness(
    done: Sequence[JobRecord], jobs: Sequence[JobRecord], costs: Costs
) -> np.ndarray:
    """Of each of `done`. n are the jobs that are in the system at a time, itself included; a
    1/n share of G GPUs makes min(1, G / (n x GPUs it brings)) of its solo rate. Its start is due to
    it at that rate as well."""
    if not done:
        return np.zeros(0)
    times, present = _population(jobs)
    arrived = np.array([job.request.arrival_s for job in done])
    ended = np.array([job.ended_s for job in done], dtype=float)
    own_gpus = np.array([job.request.gpus for job in done])
    needed = np.array([got_s(job, costs) + costs.start_s(job.request.base) for job in done])
    due = np.zeros(len(done))
    for gpus in np.unique(own_gpus):
        mine = own_gpus == gpus
        # With it among the n until it ended, and added to them after that.
        before = _Shared(times, present, len(costs.cluster) / gpus)
        after = _Shared(times, present + 1, len(costs.cluster) / gpus)
        mark = before.total(arrived[mine])
        left = needed[mine] - (before.total(ended[mine]) - mark)
        due[mine] = np.where(
            left <= 0,
            before.time(mark + needed[mine]),
            after.time(after.total(ended[mine]) + left),
        )
    # A job that ends as it is due may come out an ulp early.
    return (ended - arrived) / np.maximum(due - arrived, 1e-9)


def _population(jobs: Collection[JobRecord]) -> tuple[np.ndarray, np.ndarray]:
    """Times at which the number of jobs changes, and the number from each on."""
    ends = [job.ended_s for job in jobs if job.ended_s is not None]
    times = np.array([job.request.arrival_s for job in jobs] + ends, dtype=float)
    steps = np.array([1] * len(jobs) + [-1] * len(ends))
    order = np.argsort(times, kind="stable")
    moments, first = np.unique(times[order], return_index=True)
    return moments, np.add.reduceat(steps[order], first).cumsum()


class _Shared:
    """The integral of a job's part of its solo rate over time, both ways."""

    def __init__(self, times: np.ndarray, present: np.ndarray, shares: float) -> None:
        """`shares`: jobs of its size that the cluster has room for."""
        self.times = times
        self.parts = np.minimum(1.0, shares / np.maximum(present, 1))
        self.totals = np.concatenate([[0.0], np.cumsum(np.diff(times) * self.parts[:-1])])

    def total(self, time: np.ndarray) -> np.ndarray:
        at = np.searchsorted(self.times, time, side="right") - 1
        return self.totals[at] + (time - self.times[at]) * self.parts[at]

    def time(self, total: np.ndarray) -> np.ndarray:
        at = np.searchsorted(self.totals, total, side="right") - 1
        return self.times[at] + (total - self.totals[at]) / self.parts[at]


def _spread(values: Sequence[float]) -> Spread:
    return Spread(
        mean=float(np.mean(values)) if len(values) else None,
        p50=_percentile(values, 50),
        p95=_percentile(values, 95),
        p99=_percentile(values, 99),
    )


def _tail(values: Sequence[float] | np.ndarray) -> Tail:
    return Tail(p95=_percentile(values, 95), max=float(np.max(values)) if len(values) else None)


def _percentile(values: Sequence[float] | np.ndarray, percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


def _ratio(amount: float, over: float) -> float | None:
    return amount / over if over > 0 else None
