"""A job file turned into a checked `RunSpec`, or into the full list of what is wrong with it.

The file's defaults, each job and the overrides are read as layers, laid over one another, and built
into the frozen dataclasses of `core/job.py`, whose own checks have the last word.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

from tlora.config.building import build_job, build_run
from tlora.config.fields import JOB, RUN, SWEEP_KEYS, Vocabulary
from tlora.config.layers import Fault, Layer, Place, finish, merge, read_layer
from tlora.config.overrides import Override, read_override
from tlora.config.reading import Document, read_source
from tlora.config.values import Tree, convert, is_list, is_tree, shown
from tlora.core.errors import SpecError, SpecErrors
from tlora.core.job import JobSpec, RunSpec


def load_spec(
    source: str | os.PathLike[str] | Mapping[str, object],
    overrides: Sequence[str] = (),
    *,
    base: object = None,
) -> RunSpec:
    """The run that a YAML or JSON file, or a mapping, asks for.

    `overrides` are texts `FIELD=VALUE`, as after `-o`. `base` is that of a file without one. Raises
    SpecError for one problem and SpecErrors, with all of them in `.problems`, for several.
    """
    document = read_source(source)
    refuse_sweep(document)
    if base is not None:
        document = replace(document, tree={"base": base, **document.tree})
    problems = Problems()
    spec = load_document(document, overrides, problems)
    problems.raise_if_any()
    assert spec is not None
    return spec


def refuse_sweep(document: Document) -> None:
    """Said by itself: every other message would be about what a sweep file has and lacks."""
    found = [key for key in SWEEP_KEYS if key in document.tree]
    if found and "jobs" not in document.tree:
        raise SpecError(
            f"{document.name} is a sweep file: it has '{found[0]}' in place of 'jobs'; "
            "run it with tlora tune (load_sweep or load_tasks in Python)"
        )


def load_document(
    document: Document, overrides: Sequence[str], problems: "Problems"
) -> RunSpec | None:
    """None where there are problems, which are added to those known."""
    layers = read_layers(document.tree, overrides, problems)
    top = build_run(layers.run.values, document.folder)
    if isinstance(top, list):
        problems.add_faults(top, layers.run)
    jobs = [load_job(stack, layers.shared, document.folder, problems) for stack in layers.stacks]
    refuse_same_names(jobs, problems)
    if problems.found:
        return None
    assert not isinstance(top, list)
    return RunSpec(
        base=top.base,
        engine=top.engine,
        report_to=top.report_to,
        jobs=tuple(job for job in jobs if job is not None),
    )


class Problems:
    """What is wrong so far, each thing once."""

    def __init__(self) -> None:
        self.found: dict[str, SpecError] = {}

    def add(self, *problems: SpecError) -> None:
        for problem in problems:
            self.found.setdefault(str(problem), problem)

    def add_faults(self, faults: Sequence[Fault], layer: Layer) -> None:
        """A field that was written but not readable has been complained about already."""
        for fault in faults:
            if fault.field not in layer.broken:
                self.add(layer.place.problem(fault.field, fault.message))

    def raise_if_any(self) -> None:
        problems = list(self.found.values())
        if problems:
            raise SpecErrors(problems) if len(problems) > 1 else problems[0]


@dataclass(frozen=True, slots=True)
class Stack:
    """What one job is made of, lowest layer first."""

    own: Layer
    layers: list[Layer]


@dataclass(frozen=True, slots=True)
class Layers:
    run: Layer
    shared: list[Layer]
    """Layers under or over every job, highest first: their faults are told once for all jobs."""

    stacks: list[Stack]


def read_layers(tree: Tree, override_texts: Sequence[str], problems: Problems) -> Layers:
    run = read(
        {k: v for k, v in tree.items() if k not in ("defaults", "jobs")}, RUN, Place(), problems
    )
    defaults = read_defaults(tree, problems)
    own_layers = read_jobs(tree, problems)
    overrides = read_overrides(override_texts, own_layers, problems)
    for override in overrides:
        if override.scope == "run":
            run = laid_over(run, override.layer)
        elif override.scope == "defaults":
            defaults = laid_over(defaults, override.layer)
    everywhere = [o.layer for o in reversed(overrides) if o.scope == "every job"]
    stacks = [
        Stack(own, [defaults, own, *(o.layer for o in overrides if o.reaches(own.place.job))])
        for own in own_layers
    ]
    return Layers(run, [*everywhere, defaults], stacks)


def read(raw: Tree, vocabulary: Vocabulary, place: Place, problems: Problems) -> Layer:
    layer, found = read_layer(raw, vocabulary, place)
    problems.add(*found)
    return layer


def read_defaults(tree: Tree, problems: Problems) -> Layer:
    raw = tree.get("defaults")
    place = Place(prefix="defaults.")
    if raw is None:
        return Layer({}, place)
    if not is_tree(raw):
        problems.add(SpecError(f"must be a mapping of fields, got {shown(raw)}", field="defaults"))
        return Layer({}, place)
    if "name" in raw:
        problems.add(place.problem("name", "each job needs a name of its own; give it there"))
    return read({k: v for k, v in raw.items() if k != "name"}, JOB, place, problems)


def read_jobs(tree: Tree, problems: Problems) -> list[Layer]:
    raw_jobs = tree.get("jobs")
    if not raw_jobs:
        problems.add(SpecError("the file lists no jobs", field="jobs"))
        return []
    if not is_list(raw_jobs):
        problems.add(SpecError(f"must be a list of jobs, got {shown(raw_jobs)}", field="jobs"))
        return []
    layers: list[Layer] = []
    for index, raw in enumerate(raw_jobs):
        if is_tree(raw):
            layers.append(read(raw, JOB, job_place(raw, index), problems))
        else:
            problem = f"must be a mapping of fields, got {shown(raw)}"
            problems.add(SpecError(problem, field=f"jobs[{index}]"))
    return layers


def job_place(raw: Tree, index: int) -> Place:
    """A job goes by its name in messages; without one, by its place in the list."""
    try:
        name = convert(raw.get("name"), str)
    except ValueError:
        name = None
    return Place(job=name) if isinstance(name, str) and name else Place(prefix=f"jobs[{index}].")


def read_overrides(
    texts: Sequence[str], own_layers: Sequence[Layer], problems: Problems
) -> list[Override]:
    names = [layer.place.job for layer in own_layers if layer.place.job is not None]
    overrides: list[Override] = []
    for text in texts:
        try:
            override, found = read_override(text, names)
        except SpecError as error:
            problems.add(error)
        else:
            problems.add(*found)
            overrides.append(override)
    return overrides


def laid_over(lower: Layer, upper: Layer) -> Layer:
    """One layer in the lower one's place."""
    return Layer(merge(lower.values, upper.values), lower.place, lower.broken | upper.broken)


def load_job(
    stack: Stack, shared: Sequence[Layer], folder: Path, problems: Problems
) -> JobSpec | None:
    job = reduce(laid_over, stack.layers)
    built = build_job(finish(job.values), folder)
    if not isinstance(built, list):
        return built
    for fault in built:
        origin = next((layer for layer in shared if is_from(layer, fault, folder)), stack.own)
        problems.add_faults([fault], Layer({}, origin.place, job.broken))
    return None


def is_from(layer: Layer, fault: Fault, folder: Path) -> bool:
    """Whether a shared layer has this fault all by itself."""
    values = finish(layer.values)
    if fault.field not in values:
        return False
    alone = build_job(values, folder)
    return isinstance(alone, list) and fault in alone


def refuse_same_names(jobs: Sequence[JobSpec | None], problems: Problems) -> None:
    seen: set[str] = set()
    for job in jobs:
        if job is not None and job.name in seen:
            problems.add(SpecError("two jobs have this name", job=job.name, field="name"))
        elif job is not None:
            seen.add(job.name)
