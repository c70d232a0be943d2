"""The plan of a run, asked of the planner: for jobs that are left, on the devices there are."""

from dataclasses import replace
from pathlib import Path

from tlora.core.job import RunSpec
from tlora.core.plan import Plan
from tlora.model.loading import resolve_device
from tlora.parallel.mesh import shares_gpus
from tlora.runtime.devices import check_count
from tlora.runtime.directory import RunDirectory
from tlora.runtime.planning import Ground, look_into
from tlora.runtime.resuming import finished, saved_steps
from tlora.schedule import plan_check, ways
from tlora.schedule.planner import Planner
from tlora.schedule.ways import Way


def ground_of(spec: RunSpec, *, output: Path | None, profile: str | None) -> Ground | None:
    """Of what is left of the run in `output`; None if all of its jobs are over."""
    steps: dict[str, int] = {}
    if output is not None:
        directory = RunDirectory(output)
        left = tuple(job for job in spec.jobs if finished(directory, job) is None)
        if not left:
            return None
        spec = replace(spec, jobs=left)
        steps = {job.name: saved_steps(directory, job.name) for job in left}
    return look_into(spec, profile=profile, steps=steps)


def planner_for(
    spec: RunSpec,
    gpus: int,
    *,
    output: Path | None = None,
    profile: str | None = None,
    per_node: int | None = None,
) -> Planner | None:
    """For what is left of the run in `output`; None if all of its jobs are over."""
    ground = ground_of(spec, output=output, profile=profile)
    return None if ground is None else ground.planner(gpus, per_node=per_node or gpus)


def way_over_devices(
    spec: RunSpec, devices: int, *, output: Path | None, profile: str | None
) -> Way:
    """For `tlora train --devices N`. `output` is None where the run starts over."""
    check_count(resolve_device(spec.engine.device), devices, share=shares_gpus())
    ground = ground_of(spec, output=output, profile=profile)
    if ground is None:
        return Way(None, "")
    way = ways.choose_way(ground.planner(devices, per_node=devices), devices)
    return _with_source(way, ground)


def fastest_plan(
    spec: RunSpec,
    ranks: int,
    *,
    output: Path | None = None,
    profile: str | None = None,
    per_node: int | None = None,
    use_all: bool = False,
) -> Way:
    """Of the jobs as one group; the same on every rank that asks."""
    if not use_all:
        check_count(resolve_device(spec.engine.device), ranks, share=shares_gpus())
    ground = ground_of(spec, output=output, profile=profile)
    if ground is None:
        # Nothing is left to be trained, unless somebody has asked for a job again: for any of them,
        # and no reason to refuse anything.
        planner = look_into(spec, profile=profile).planner(ranks, per_node=per_node or ranks)
        return Way(planner.choose(ranks, use_all=use_all).candidates[0].plan, "")
    planner = ground.planner(ranks, per_node=per_node or ranks)
    return _with_source(ways.group_plan(planner, ranks, use_all=use_all), ground)


def _with_source(way: Way, ground: Ground) -> Way:
    return replace(way, sentence=f"{way.sentence}. Profile: {ground.chosen.source}")


def check_memory(
    spec: RunSpec,
    plan: Plan,
    *,
    output: Path | None = None,
    profile: str | None = None,
    per_node: int | None = None,
) -> None:
    """Refuse a plan that does not fit, as far as memory is known."""
    found = planner_for(spec, plan.gpus, output=output, profile=profile, per_node=per_node)
    if found is not None:
        names = [job.name for job in spec.jobs]
        plan_check.check_plan(plan, world=plan.gpus, jobs=names, planner=found)
