"""Plans as people write them, and whether a run can be carried out under one."""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from tlora.core.errors import SpecError
from tlora.core.job import RunSpec
from tlora.core.plan import Plan


def read_plan(path: Path) -> Plan:
    """A YAML or JSON file with the fields of a plan."""
    try:
        tree = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise SpecError(f"--plan: {path} cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise SpecError(f"--plan: {path} must hold the fields of a plan, such as replicas: 2")
    return plan_of(tree, str(path))


def plan_of(tree: dict[str, Any], where: str = "the plan") -> Plan:
    known = {field.name: field for field in fields(Plan)}
    for name, value in tree.items():
        if name not in known:
            raise SpecError(
                f"--plan: {where} has a field '{name}', which is not known; there are "
                f"{', '.join(known)}"
            )
        if name in ("adapters",):
            continue
        if name == "spread":
            if not isinstance(value, list | tuple) or not all(isinstance(x, str) for x in value):
                raise SpecError("must be a list of job names", field="plan.spread")
        elif not isinstance(value, int) or isinstance(value, bool):
            raise SpecError(f"must be a whole number, got {value!r}", field=f"plan.{name}")
    if "bucket" not in tree:
        raise SpecError("is missing: the tokens of a nano-batch, 4096 say", field="plan.bucket")
    return Plan(**{**tree, "spread": tuple(tree.get("spread", ()))})


def plan_as_json(plan: Plan) -> dict[str, Any]:
    return asdict(plan) | {"spread": list(plan.spread)}


def spans(plan: Plan, job: str) -> bool:
    """Whether every rank takes a part of the job."""
    return plan.adapters == "data_parallel" or job in plan.spread


def check_plan(plan: Plan, spec: RunSpec) -> None:
    """Refuse what cannot be carried out, before anything is loaded."""
    names = {job.name for job in spec.jobs}
    for name in plan.spread:
        if name not in names:
            raise SpecError(f"names '{name}', which is no job of the file", field="plan.spread")
    if spec.engine.isolation == "exact" and plan.gpus > 1:
        if plan.adapters != "rank_local":
            raise SpecError(
                "a sum over ranks has other bits than a sum on one: with engine.isolation: exact "
                "use adapters: rank_local",
                field="plan.adapters",
            )
        if plan.fsdp > 1:
            raise SpecError(
                "exact isolation is proven on whole matrices, which no rank has here: use replicas "
                "with fsdp: 1",
                field="plan.fsdp",
            )
