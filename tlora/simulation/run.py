"""One policy over one list of jobs on a cluster that is only computed.

The loop, the policy and the state are those of a real run; here its clock is moved by hand, its
executor computes, and its store keeps what metrics need.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tlora.control import Loop
from tlora.control.loop import uncollected
from tlora.core.clock import ManualClock
from tlora.core.cluster import Cluster
from tlora.core.errors import SpecError
from tlora.core.event import Event
from tlora.core.request import JobRequest
from tlora.core.state import State
from tlora.costs.groups import Costs
from tlora.costs.profile import Profile
from tlora.schedule import POLICIES, Settings, make_policy
from tlora.schedule.fairness import fair_gpus
from tlora.simulation.executor import SimulatedExecutor
from tlora.simulation.mapping import solo_seconds
from tlora.simulation.metrics import Metrics, measure
from tlora.simulation.recorder import Recorder
from tlora.simulation.world import World, draw_events

MAX_RUNNABLE = 128


@dataclass(frozen=True, slots=True)
class Result:
    policy: str
    seed: int
    metrics: Metrics
    recorder: Recorder
    """What became of every job and group."""

    costs: Costs
    """True ones with the fused kernel: what the metrics were taken with."""

    world: tuple[Event, ...] = ()
    """Failures and slow spells that it met."""


def simulate(
    requests: Sequence[JobRequest],
    policy: str,
    cluster: Cluster,
    profiles: Mapping[str, Profile],
    *,
    predictor_error: float = 0.0,
    seed: int = 0,
    world: World | Sequence[Event] = (),
    max_runnable: int | None = MAX_RUNNABLE,
    shares: Mapping[str, float] | None = None,
    exits: Mapping[str, tuple[float, str]] | None = None,
    settings: Settings | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Result:
    """Until every job is done. `predictor_error`: see `Costs`; the world itself goes by the true
    costs, and so does a policy that is there as a bound. `world`: what befalls the cluster, drawn
    from the seed or given. `on_progress` is called with the number of jobs that are through. The
    same arguments give the same result, but for the time that decisions took."""
    _check(requests, shares or {}, max_runnable)
    known = Costs(profiles, cluster)
    make_policy(policy, known)  # An unknown name is said before anything else.
    entry = POLICIES[policy]
    kernel = entry.kernel
    events = (
        draw_events(world, cluster, until_s=_horizon(requests, known), seed=seed)
        if isinstance(world, World)
        else list(world)
    )
    clock = ManualClock()
    state = State(cluster, shares=dict(shares or {}), max_runnable=max_runnable)
    recorder = Recorder(state)
    executor = SimulatedExecutor(
        clock=clock,
        costs=Costs(profiles, cluster, kernel=kernel),
        arrivals=requests,
        world=events,
        exits=exits,
        watcher=recorder,
        fair_gpus=lambda: fair_gpus(state),
    )
    error = 0.0 if entry.is_bound else predictor_error
    predictor = Costs(profiles, cluster, kernel=kernel, error=error, seed=seed)
    decider = make_policy(policy, predictor, settings)
    loop = Loop(state=state, policy=decider, executor=executor, store=recorder, clock=clock)
    told = 0
    # What befalls an empty cluster after the last job is of no interest.
    with uncollected():
        while state.jobs or recorder.done < len(requests):
            loop.step()
            if on_progress is not None and recorder.done > told:
                told = recorder.done
                on_progress(told)
    metrics = measure(
        recorder,
        known,
        regroup_s=executor.regroup_s,
        cut_misses=getattr(decider, "cut_misses", 0),
    )
    return Result(policy, seed, metrics, recorder, known, tuple(events))


def _check(
    requests: Sequence[JobRequest], shares: Mapping[str, float], max_runnable: int | None
) -> None:
    """Raises SpecError for what would end the loop."""
    names = Counter(request.name for request in requests)
    for name, count in names.items():
        if count > 1:
            raise SpecError(f"is that of {count} jobs", job=name, field="name")
    for tenant, share in shares.items():
        if not 0 < share < math.inf:
            raise SpecError(f"{tenant}: must be above 0, got {share:g}", field="shares")
    if max_runnable is not None and max_runnable < 1:
        raise SpecError(f"must be at least 1, got {max_runnable}", field="max_runnable")


def _horizon(requests: Sequence[JobRequest], costs: Costs) -> float:
    """Beyond any makespan of a policy that is not worse than all jobs one after the other in a
    quarter of the cluster."""
    works = [solo_seconds(each, costs) for each in requests]
    demanded = sum(work * each.gpus for work, each in zip(works, requests, strict=True))
    last = max((each.arrival_s for each in requests), default=0.0)
    return last + 4 * (demanded / len(costs.cluster) + max(works, default=0.0))
