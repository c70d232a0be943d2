"""Laws that a turn's decisions must keep, whatever policy made them; for tests and audits.

Bounds and memory are looked at by the plain prediction of what will be there, not by what the
policy reckoned with.
"""

import copy
from collections.abc import Mapping, Sequence

from tlora.core.decision import Decision, Refuse
from tlora.core.plan import Plan
from tlora.core.request import JobRequest
from tlora.core.state import GroupState, JobState, State
from tlora.costs.groups import Costs, GroupPrediction
from tlora.schedule.fairness import fair_gpus
from tlora.schedule.placement import choose_gpus

ROUNDING = 1e-6
LAST_DIGITS = 1e-12

ALREADY_OVER = 0.05
"""A job that is beyond its bound already, because dues rose since it was placed, may become so much
slower by a change of its group that relieves others: another mix of tokens in the same nano-batch
is never quite as fast."""


def broken_laws(
    state: State, decisions: Sequence[Decision], costs: Costs, *, bounds: bool = True
) -> list[str]:
    """What is wrong, in words: a GPU booked twice, memory over-committed, a job refused that would
    run alone in the whole cluster, nothing that runs though a job that waits could; and, with
    `bounds`, a job of a group that was touched that is slower than its bound and than it was before
    (but for ALREADY_OVER)."""
    after = copy.deepcopy(state)
    for decision in decisions:
        try:
            after.apply(decision)
        except AssertionError as error:
            return [f"{decision}: {error}"]
    try:
        after.check()
    except AssertionError as error:
        return [str(error)]
    fair = fair_gpus(after)
    refused = [decision.job for decision in decisions if isinstance(decision, Refuse)]
    found = [
        f"{name} is refused and would run alone in the whole cluster"
        for name in refused
        if _would_run(State(state.cluster), state.jobs[name], costs, bounds=bounds)
    ]
    # After a refusal the loop asks again at once.
    if not after.groups and not refused:
        found += [
            f"{job.name} waits, could run alone, and nothing runs"
            for job in after.waiting()
            if _would_run(after, job, costs, bounds=bounds)
        ]
    for group in after.groups.values():
        old = state.groups.get(group.name)
        if old is not None and _same(old, group):
            continue
        predicted = _predict(after, group, costs)
        if not predicted.fits:
            found.append(f"{group.name} does not fit into memory")
        if bounds:
            before = _slowdowns(state, old, costs, fair) if old is not None else {}
            for name, slowdown in _slowdowns(after, group, costs, fair).items():
                bound = after.jobs[name].request.slowdown_bound
                limit = max(bound, before.get(name, 0.0) * (1 + ALREADY_OVER))
                if slowdown > limit * (1 + ROUNDING):
                    found.append(f"{name} in {group.name}: slowdown {slowdown:.3f} over {bound}")
    return found


def _same(one: GroupState, other: GroupState) -> bool:
    return (one.jobs, one.gpus, one.plan) == (other.jobs, other.gpus, other.plan)


def _would_run(state: State, job: JobState, costs: Costs, *, bounds: bool) -> bool:
    """Alone on GPUs that are up: on those that it brings, or, where bounds count, on as many as
    hold its own. A state that it is not in is one in which it is alone."""
    request, up = job.request, set(range(len(state.cluster))) - state.down
    solo = costs.figures(request).solo_plan.replicas
    if not bounds:
        return solo <= len(up) and costs.solo(request).fits
    fair = fair_gpus(state).get(job.name, float(min(request.gpus, len(up))))
    due = fair / request.gpus / costs.figures(request).solo_step_s
    fast = {gpu for gpu in up if gpu not in state.speed}
    for count in range(1, min(solo, len(up)) + 1):
        gpus = choose_gpus(state.cluster, fast if count <= len(fast) else up, count)
        assert gpus is not None
        for bucket in costs.base(request.base).buckets:
            plan = Plan(replicas=count, bucket=bucket)
            group = GroupState("", request.base, gpus, plan, {job.name: 1.0}, 0.0, 0.0)
            predicted = _predict_jobs([request], state, group, costs)
            slowdown = due / predicted.steps_per_s[0]
            if predicted.fits and slowdown <= request.slowdown_bound * (1 + LAST_DIGITS):
                return True
    return False


def _predict(state: State, group: GroupState, costs: Costs) -> GroupPrediction:
    return _predict_jobs([state.jobs[name].request for name in group.jobs], state, group, costs)


def _predict_jobs(
    requests: Sequence[JobRequest], state: State, group: GroupState, costs: Costs
) -> GroupPrediction:
    return costs.predict(
        requests,
        list(group.jobs.values()),
        group.plan,
        state.cluster.tier(group.gpus),
        speed=min(state.speed.get(gpu, 1.0) for gpu in group.gpus),
    )


def _slowdowns(
    state: State, group: GroupState, costs: Costs, fair: Mapping[str, float]
) -> dict[str, float]:
    """Fair rate / rate of each job of the group."""
    rates = _predict(state, group, costs).steps_per_s
    result: dict[str, float] = {}
    for name, rate in zip(group.jobs, rates, strict=True):
        request = state.jobs[name].request
        due = fair.get(name, 0.0) / request.gpus / costs.figures(request).solo_step_s
        result[name] = due / rate
    return result
