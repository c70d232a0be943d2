"""Several policies over one trace, several seeds each: what `tlora simulate` runs, and its JSON.

A seed draws the jobs' ranks and bases, the predictor's mistakes and what befalls the cluster; every
policy meets the same of all these.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from tlora.core.cluster import Cluster, uniform_cluster
from tlora.core.errors import SpecError
from tlora.costs.groups import Costs
from tlora.costs.profile import Profile, find_profile
from tlora.schedule import POLICIES
from tlora.simulation.mapping import LENGTH, LOAD, bases_of, demanded_gpus, map_jobs
from tlora.simulation.metrics import Metrics
from tlora.simulation.run import MAX_RUNNABLE, Result, simulate
from tlora.simulation.traces import Trace
from tlora.simulation.world import World

COMPARED = ("tlora", "solo", "fifo-memory", "tlora-no-scheduler", "tlora-no-kernel", "srtf")
GPUS = 32
LARGEST_ERROR = 2.0
"""Beyond it half of all predictions are off by more than a factor of four."""

DEFAULT_PROFILE = "h200-llama-8b"
"""Measured, and shipped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Everything that the figures of a comparison depend on."""

    trace: Trace
    policies: tuple[str, ...] = COMPARED
    gpus: int = GPUS
    per_node: int = 8
    nodes_per_rack: int = 4
    load: float | None = LOAD
    """None: arrivals as the trace has them."""

    predictor_error: float = 0.0
    seeds: int = 1
    profile_name: str = DEFAULT_PROFILE
    profile: Profile = field(default_factory=lambda: choose_profile(None)[1])
    """Of every base."""

    lengths: tuple[tuple[int, ...], ...] = ((LENGTH,),)
    max_runnable: int | None = MAX_RUNNABLE
    world: World = field(default_factory=World)

    def __post_init__(self) -> None:
        if not self.policies:
            raise SpecError("name at least one", field="--policy")
        for name in self.policies:
            if name not in POLICIES:
                raise SpecError(f"'{name}' is none of {', '.join(POLICIES)}", field="--policy")
        if len(set(self.policies)) < len(self.policies):
            raise SpecError("names one twice", field="--policy")
        for name, value in (
            ("--gpus", self.gpus),
            ("--per-node", self.per_node),
            ("--nodes-per-rack", self.nodes_per_rack),
            ("--seeds", self.seeds),
        ):
            if value < 1:
                raise SpecError(f"must be at least 1, got {value}", field=name)
        if not 0 <= self.predictor_error <= LARGEST_ERROR:
            raise SpecError(
                f"must be between 0 and {LARGEST_ERROR:g}, got {self.predictor_error}",
                field="--predictor-error",
            )
        if not self.trace.jobs:
            raise SpecError("leaves no job of the trace", field="--skip-days, --days")

    @property
    def cluster(self) -> Cluster:
        return uniform_cluster(
            self.gpus, per_node=self.per_node, nodes_per_rack=self.nodes_per_rack
        )

    @property
    def profiles(self) -> dict[str, Profile]:
        return dict.fromkeys(bases_of(self.trace.jobs), self.profile)


@dataclass(frozen=True, slots=True)
class Comparison:
    setting: Setting
    load: float | None
    """As it came out; None where all jobs arrive together."""

    metrics: dict[str, list[Metrics]]
    """Policy -> of each seed."""

    first: dict[str, Result]
    """Policy -> the whole result of the first seed, for plots."""

    def mean(self, policy: str) -> dict[str, Any]:
        return mean_of([asdict(each) for each in self.metrics[policy]])

    def as_json(self) -> dict[str, Any]:
        setting = self.setting
        return {
            "v": 1,
            "kind": "simulate",
            "trace": setting.trace.name,
            "load": self.load,
            "gpus": setting.gpus,
            "seeds": setting.seeds,
            "predictor_error": setting.predictor_error,
            "profile": setting.profile_name,
            "jobs": len(setting.trace.jobs),
            "skipped_rows": len(setting.trace.skipped),
            "policies": {policy: self.mean(policy) for policy in setting.policies},
            "per_seed": [
                {
                    "seed": seed,
                    "policies": {name: asdict(each[seed]) for name, each in self.metrics.items()},
                }
                for seed in range(setting.seeds)
            ],
        }


def compare(
    setting: Setting, on_progress: Callable[[str, int, int], None] | None = None
) -> Comparison:
    """`on_progress`: policy, seed and the number of jobs that are through."""
    metrics: dict[str, list[Metrics]] = {policy: [] for policy in setting.policies}
    first: dict[str, Result] = {}
    load = None
    for seed in range(setting.seeds):
        for policy in setting.policies:
            said = None
            if on_progress is not None:
                said = _saying(on_progress, policy, seed)
                said(0)
            result = run_one(setting, policy, seed, said)
            metrics[policy].append(result.metrics)
            if seed == 0:
                first[policy] = result
                requests = [job.request for job in result.recorder.jobs.values()]
                demanded = demanded_gpus(requests, result.costs)
                load = None if demanded is None else demanded / setting.gpus
    return Comparison(setting, load, metrics, first)


def run_one(
    setting: Setting,
    policy: str,
    seed: int,
    on_progress: Callable[[int], None] | None = None,
) -> Result:
    """One policy under one seed."""
    cluster, profiles = setting.cluster, setting.profiles
    requests = map_jobs(
        setting.trace.jobs,
        Costs(profiles, cluster),
        seed=seed,
        load=setting.load,
        bases=tuple(profiles),
        lengths=setting.lengths,
    )
    return simulate(
        requests,
        policy,
        cluster,
        profiles,
        predictor_error=setting.predictor_error,
        seed=seed,
        world=setting.world,
        max_runnable=setting.max_runnable,
        on_progress=on_progress,
    )


def mean_of(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure over the seeds; of a largest value the largest. None where any is None."""
    return {name: _mean(name, [each[name] for each in records]) for name in records[0]}


def choose_profile(name: str | None) -> tuple[str, Profile]:
    """A shipped one by its name, or a file; all of them were measured."""
    name = name or DEFAULT_PROFILE
    return Path(name).name.removesuffix(".json"), find_profile(name)


def _saying(
    on_progress: Callable[[str, int, int], None], policy: str, seed: int
) -> Callable[[int], None]:
    return lambda done: on_progress(policy, seed, done)


def _mean(name: str, values: Sequence[Any]) -> Any:
    if isinstance(values[0], dict):
        return mean_of(values)
    if any(value is None for value in values):
        return None
    return max(values) if name == "max" else fmean(values)
