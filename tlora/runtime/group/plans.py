"""Whether a run can be carried out under a plan."""

from dataclasses import asdict
from typing import Any

from tlora.core.errors import SpecError
from tlora.core.job import RunSpec
from tlora.core.plan import Plan
from tlora.schedule import plan_check


def plan_as_json(plan: Plan) -> dict[str, Any]:
    return asdict(plan) | {"spread": list(plan.spread)}


def spans(plan: Plan, job: str) -> bool:
    """Whether every rank takes a part of the job."""
    return plan.adapters == "data_parallel" or job in plan.spread


def check_plan(plan: Plan, spec: RunSpec, *, world: int | None = None) -> tuple[str, ...]:
    """Refuse what cannot be carried out, before anything is loaded; what a person should know of
    the rest. On as many ranks as the plan has, unless said otherwise."""
    ranks = plan.gpus if world is None else world
    notes = plan_check.check_plan(plan, world=ranks, jobs=[job.name for job in spec.jobs])
    if spec.engine.isolation == "exact" and plan.gpus > 1:
        if plan.adapters != "rank_local":
            raise SpecError(
                "a sum over ranks has other bits than a sum on one: with engine.isolation: exact "
                "use adapters: rank_local",
                field="plan.adapters",
            )
        if plan.fsdp > 1:
            raise SpecError(
                "engine.isolation: exact is shown on this machine before a run, product by product "
                "on whole matrices, which no rank has here: use replicas with fsdp: 1",
                field="plan.fsdp",
            )
    if spec.base.quantization != "none" and plan.fsdp > 1:
        raise SpecError(
            f"weights in {spec.base.quantization} are not laid over GPUs in shards; use a plan "
            "with fsdp: 1, or leave quantization out",
            field="base.quantization",
        )
    return notes
