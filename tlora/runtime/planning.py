"""`tlora plan`: what would be grouped with what, where, how fast, and why. Also the profile and the
costs that plans and scheduled runs rest on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tlora.core.assets import DEMO
from tlora.core.cluster import Cluster, cluster_of
from tlora.core.decision import Decision
from tlora.core.errors import SpecError
from tlora.core.event import Arrival
from tlora.core.job import RunSpec
from tlora.core.plan import Plan
from tlora.core.records import as_json
from tlora.core.request import JobRequest
from tlora.core.state import GroupState, State
from tlora.costs.groups import Costs
from tlora.costs.layout import BaseLayout
from tlora.costs.profile import Profile, find_profile, shipped_profiles
from tlora.costs.rounds import Kernel
from tlora.model.loading import context_length, load_shape, resolve_device
from tlora.model.quantising import saved_bytes
from tlora.model.targets import find_targets
from tlora.runtime.assumed import assumed_profile
from tlora.runtime.benchmark.machine import device_name
from tlora.runtime.benchmark.shapes import Shape, look_at
from tlora.runtime.budget import default_budget
from tlora.runtime.checking import check_targets, prepare_jobs
from tlora.runtime.environment import quieten_libraries
from tlora.runtime.layouts import layout_of
from tlora.runtime.requests import requests_of, widths
from tlora.schedule import POLICIES, Settings, make_policy
from tlora.schedule.fairness import fair_gpus
from tlora.schedule.planner import PlanChoice, Planner, choice_as_json

MOST_NAMED = 64
"""GPUs: where nothing fits, no larger number is tried for what would."""

DEMO_NAMES = ("demo", str(DEMO / "base"))


@dataclass(frozen=True, slots=True)
class ChosenProfile:
    profile: Profile
    source: str
    """For a person: which one it is, and why."""


@dataclass(frozen=True, slots=True)
class PlannedJob:
    name: str
    rank: int
    batch_size: int
    steps: int
    group: str | None
    tokens_per_s: float | None
    solo_tokens_per_s: float
    slowdown: float | None
    """Against its fair due, as the bounds are."""

    seconds: float | None
    """Until it is through, if its group stays as it is."""


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    name: str
    gpus: tuple[int, ...]
    plan: Plan
    jobs: tuple[str, ...]
    tokens_per_s: float
    memory_bytes: float | None
    worth: float
    """GPUs that the same work would take with every job alone."""

    inside: PlanChoice | None = None
    """How it could be laid over its GPUs; None for one GPU."""

    def as_json(self) -> dict[str, Any]:
        plain = as_json(replace(self, inside=None))
        return plain | {"inside": None if self.inside is None else choice_as_json(self.inside)}


@dataclass(frozen=True, slots=True)
class RunPlan:
    policy: str
    gpus: int
    profile: ChosenProfile
    groups: tuple[PlannedGroup, ...]
    jobs: tuple[PlannedJob, ...]
    decisions: tuple[Decision, ...]
    refused: tuple[str, ...]
    one_group: PlanChoice | None = None
    """All jobs as one group on all GPUs, in lock-step; None for one GPU."""

    @property
    def waiting(self) -> tuple[str, ...]:
        return tuple(
            job.name for job in self.jobs if job.group is None and job.name not in self.refused
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "v": 1,
            "kind": "plan",
            "policy": self.policy,
            "gpus": self.gpus,
            "profile": {
                "device": self.profile.profile.device,
                "shape": self.profile.profile.shape,
                "source": self.profile.source,
            },
            "groups": [group.as_json() for group in self.groups],
            "jobs": [as_json(job) for job in self.jobs],
            "decisions": [as_json(each) | {"sentence": str(each)} for each in self.decisions],
            "waiting": list(self.waiting),
            "refused": list(self.refused),
            "one_group": None if self.one_group is None else choice_as_json(self.one_group),
        }


@dataclass(frozen=True, slots=True)
class Ground:
    """What plans of a run rest on."""

    requests: tuple[JobRequest, ...]
    device_type: str
    chosen: ChosenProfile
    layout: BaseLayout
    exact: bool
    """Bits count: no job may span ranks, and no base be in shards."""

    whole: bool
    """No base may be in shards: its linears are quantised."""

    def planner(self, gpus: int, *, per_node: int = 8) -> Planner:
        """For so many GPUs, and for what would fit on more."""
        cluster = cluster_of(self.device_type, max(gpus, MOST_NAMED), per_node=per_node)
        costs = new_costs(self.chosen.profile, self.requests, cluster)
        return Planner(costs, self.requests, layout=self.layout, exact=self.exact, whole=self.whole)


def look_into(
    spec: RunSpec, *, profile: str | None = None, steps: Mapping[str, int] | None = None
) -> Ground:
    """Of these jobs, some of which have taken `steps` already. Raises what `tlora check` would
    raise."""
    quieten_libraries()
    shape = load_shape(spec.base)
    targets = find_targets(shape)
    check_targets(spec, targets)
    device = resolve_device(spec.engine.device)
    chosen = choose_profile(spec, profile, device)
    data = prepare_jobs(spec, limit=context_length(shape.config))
    requests = requests_of(spec, data, targets, base=spec.base.model)
    taken = steps or {}
    return Ground(
        requests=tuple(
            replace(each, total_steps=max(1, each.total_steps - taken.get(each.name, 0)))
            for each in requests
        ),
        device_type=device.type,
        chosen=chosen,
        layout=layout_of(shape, name=chosen.profile.shape, itemsize=_itemsize(chosen.profile)),
        exact=spec.engine.isolation == "exact",
        whole=spec.base.quantization != "none",
    )


def plan_run(
    spec: RunSpec, *, gpus: int, profile: str | None = None, policy: str = "tlora"
) -> RunPlan:
    """Trains nothing. Raises what `tlora check` would raise."""
    check_policy(policy)
    ground = look_into(spec, profile=profile)
    return plan_requests(
        ground.requests,
        cluster_of(ground.device_type, gpus),
        ground.chosen,
        policy=policy,
        layout=ground.layout,
        exact=ground.exact,
        whole=ground.whole,
    )


def plan_requests(
    requests: Sequence[JobRequest],
    cluster: Cluster,
    chosen: ChosenProfile,
    *,
    policy: str,
    settings: Settings | None = None,
    layout: BaseLayout | None = None,
    exact: bool = False,
    whole: bool = False,
) -> RunPlan:
    """What the policy decides with all of them there at once and nothing running, and how each of
    its groups, or all jobs as one group, could be laid over their GPUs."""
    costs = new_costs(chosen.profile, requests, cluster, kernel=POLICIES[policy].kernel)
    state = State(cluster)
    arrivals = [Arrival(0.0, request) for request in requests]
    for arrival in arrivals:
        state.happen(arrival)
    decisions = make_policy(policy, costs, settings).decide(state, arrivals)
    for decision in decisions:
        state.apply(decision)
    state.check()
    rates: dict[str, float] = {}
    planner = partial(Planner, costs, layout=layout, exact=exact, whole=whole)
    groups = [
        _planned_group(group, state, costs, rates, planner) for group in state.groups.values()
    ]
    fair = fair_gpus(state)
    return RunPlan(
        policy=policy,
        gpus=len(cluster),
        profile=chosen,
        groups=tuple(groups),
        jobs=tuple(_planned_job(each, state, costs, rates, fair) for each in requests),
        decisions=tuple(decisions),
        refused=tuple(name for name, how in state.outcomes.items() if how == "refused"),
        one_group=planner(requests).choose(len(cluster)) if len(cluster) > 1 else None,
    )


def check_policy(name: str) -> None:
    if name not in POLICIES:
        raise SpecError(f"'{name}' is none of {', '.join(POLICIES)}", field="--policy")


def new_costs(
    profile: Profile, requests: Sequence[JobRequest], cluster: Cluster, *, kernel: Kernel = "fused"
) -> Costs:
    bases = {request.base for request in requests}
    return Costs(dict.fromkeys(bases, profile), cluster, kernel=kernel)


def choose_profile(spec: RunSpec, asked: str | None, device: torch.device) -> ChosenProfile:
    """The one asked for, by file or by the name of a shipped one; a shipped one of this device and
    base; or assumed figures."""
    name = "demo" if spec.base.model in DEMO_NAMES else spec.base.model
    shape = look_at(name, spec.base.dtype, device)
    if asked is not None:
        found = find_profile(asked)
        _check_fits(found, shape, asked)
        return ChosenProfile(_of_run(found, spec, shape), f"{asked}, as asked for")
    for title, found in shipped_profiles().items():
        same_device = found.device == device_name(device) or (
            device.type == "cpu" and found.device.startswith("cpu")
        )
        if same_device and found.parameters_per_rank == widths(shape.targets):
            return ChosenProfile(_of_run(found, spec, shape), f"{title}, which comes with tlora")
    budget = default_budget(device, shape.parameters)
    found = assumed_profile(
        shape,
        device.type,
        budget=budget,
        device_bytes=torch.cuda.get_device_properties(device).total_memory
        if device.type == "cuda"
        else None,
        recomputed=spec.engine.gradient_checkpointing,
    )
    return ChosenProfile(
        _of_run(found, spec, shape),
        "assumed from the base's shape: times are rough; `tlora profile` measures them",
    )


def _itemsize(profile: Profile) -> int:
    return getattr(torch, profile.dtype).itemsize


def _check_fits(profile: Profile, shape: Shape, asked: str) -> None:
    if profile.parameters_per_rank != widths(shape.targets):
        raise SpecError(
            f"{asked} is of a base with other linears ({profile.shape}) than {shape.name}; make "
            "one with `tlora profile --shape`",
            field="--profile",
        )


def _of_run(profile: Profile, spec: RunSpec, shape: Shape) -> Profile:
    """Profiles are of weights in full; what quantised ones change of the time is not known."""
    how = spec.base.quantization
    if how != "none":
        saved = saved_bytes(shape.targets, how, _itemsize(profile))
        weights = profile.memory.weights_bytes - saved
        profile = replace(profile, memory=replace(profile.memory, weights_bytes=weights))
    return _sized(profile, spec)


def _sized(profile: Profile, spec: RunSpec) -> Profile:
    """Under the nano-batches that the file asks for, if it does."""
    tokens = spec.engine.nano_batch_tokens
    if isinstance(tokens, str) or tokens == profile.budget_tokens:
        return profile
    buckets = sorted({max(1, round(size)) for size in profile.sizes(tokens)})
    return replace(profile, budget_tokens=tokens, buckets=tuple(buckets))


def _planned_group(
    group: GroupState,
    state: State,
    costs: Costs,
    rates: dict[str, float],
    planner: Callable[..., Planner],
) -> PlannedGroup:
    requests = [state.jobs[name].request for name in group.jobs]
    found = costs.predict(
        requests, list(group.jobs.values()), group.plan, state.cluster.tier(group.gpus)
    )
    rates.update(zip(group.jobs, found.steps_per_s, strict=True))
    inside = None
    if len(group.gpus) > 1:
        weighted = planner(requests, weights=list(group.jobs.values()))
        inside = weighted.choose(len(group.gpus), gpus=group.gpus)
    return PlannedGroup(
        name=group.name,
        gpus=group.gpus,
        plan=group.plan,
        jobs=tuple(group.jobs),
        tokens_per_s=found.tokens_per_s,
        memory_bytes=found.memory_bytes,
        worth=found.worth,
        inside=inside,
    )


def _planned_job(
    request: JobRequest,
    state: State,
    costs: Costs,
    rates: dict[str, float],
    fair: Mapping[str, float],
) -> PlannedJob:
    figures = costs.figures(request)
    rate = rates.get(request.name)
    due = fair.get(request.name, 0.0) / request.gpus / figures.solo_step_s
    return PlannedJob(
        name=request.name,
        rank=request.load.rank,
        batch_size=request.load.batch_size,
        steps=request.total_steps,
        group=state.jobs[request.name].group if request.name in state.jobs else None,
        tokens_per_s=None if rate is None else rate * figures.batch_tokens,
        solo_tokens_per_s=figures.solo_tokens_per_s,
        slowdown=None if rate is None else due / rate,
        seconds=None if rate is None else request.total_steps / rate,
    )
