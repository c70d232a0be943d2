"""Resolved settings built into the frozen dataclasses, with every complaint as a `Fault` of ours.

pydantic builds and checks; its texts stay here. A section's own `__post_init__` speaks in
SpecErrors, which come through unchanged.
"""

from functools import cache
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from tlora.config.layers import Fault, nested
from tlora.config.paths import locate_job, locate_model
from tlora.config.values import Tree, shown
from tlora.core.errors import SpecError
from tlora.core.job import JobSpec, RunSpec, check_job_name

Spec = TypeVar("Spec")

PLACEHOLDER = "unnamed"
"""Stands in for a bad name or for jobs not yet built, so that the rest can be checked too."""

REQUIRED = {
    "base.model": ": a model's name on the Hub, its directory, or demo",
    "data.path": ": a file or directory with the job's rows",
}
"""What to write where something is missing."""


def build_job(values: Tree, folder: Path) -> JobSpec | list[Fault]:
    located, faults = locate_job(values, folder)
    faults += check_name(located)
    if faults and any(fault.field == "name" for fault in faults):
        located["name"] = PLACEHOLDER
    built = build(JobSpec, with_section("data", nested(located)))
    if isinstance(built, list):
        return faults + built
    return faults or built


def build_run(values: Tree, folder: Path) -> RunSpec | list[Fault]:
    """The run with a placeholder for its jobs."""
    faults: list[Fault] = []
    located = dict(values)
    model = values.get("base.model")
    if isinstance(model, str):
        located["base.model"], faults = locate_model(model, folder)
    jobs = [{"name": PLACEHOLDER, "data": {"path": PLACEHOLDER}}]
    built = build(RunSpec, with_section("base", {**nested(located), "jobs": jobs}))
    if isinstance(built, list):
        return faults + built
    return faults or built


def with_section(name: str, tree: Tree) -> Tree:
    """With the section there, if empty, so that what it lacks is told by its full name."""
    empty: Tree = {}
    return {name: empty, **tree}


def check_name(values: Tree) -> list[Fault]:
    name = values.get("name")
    if not isinstance(name, str) or not name:
        return [Fault("name", "every job needs a name")]
    try:
        check_job_name(name)
    except SpecError as error:
        return [Fault("name", error.message)]
    return []


@cache
def adapter(spec: type[Spec]) -> TypeAdapter[Spec]:
    return TypeAdapter(spec)


def build(spec: type[Spec], tree: Tree) -> Spec | list[Fault]:
    try:
        return adapter(spec).validate_python(tree)
    except ValidationError as error:
        return [fault_of(details) for details in error.errors()]


def fault_of(details: ErrorDetails) -> Fault:
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, SpecError):
        return Fault(cause.field or "", cause.message)
    field = ".".join(str(part) for part in details["loc"])
    if details["type"] == "missing":
        return Fault(field, f"is required{REQUIRED.get(field, '')}")
    return Fault(field, f"cannot be {shown(details['input'])}")
