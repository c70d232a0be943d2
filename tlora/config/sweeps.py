"""A sweep file turned into a checked `SweepSpec`: a job file with a task in place of its jobs, and
a search.

The task is read as a job, with its defaults and overrides. The fields of the space are those of a
job, under any of their spellings; their values are read as the fields' own types.
"""

import os
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, cast

from tlora.config.building import build
from tlora.config.fields import (
    JOB,
    MIN_LR_RATE,
    PARTS,
    RUN,
    SWEEP_KEYS,
    Vocabulary,
    leaves,
    nearest,
    section_of,
    short,
    usual_word,
)
from tlora.config.layers import Fault, Layer, Place, entries, merge, read_layer
from tlora.config.loading import Problems, laid_over, load_document, read_layers
from tlora.config.overrides import nest
from tlora.config.reading import Document, parse_yaml, read_source
from tlora.config.values import Tree, alternatives, convert, is_list, is_tree, shown
from tlora.core.errors import SpecError
from tlora.core.job import RunSpec
from tlora.core.sweep import (
    MEASURE,
    AxisSpec,
    EarlyExitSpec,
    Kind,
    SearchSpec,
    SweepSpec,
    When,
)

SPACE = "search.space"
RANGES = ("uniform", "log", "integer")
AXIS_KEYS = ("values", *RANGES, "step", "points", "when")
FIXED = {
    "name": "trials are named by the sweep",
    "data": "all trials of a sweep learn from the same data",
    "eval": "all trials of a sweep are evaluated alike",
    "save": "it changes nothing that is learnt",
    "init_from": "all trials of a sweep start alike",
    **{name: f"{why}; set it in the task" for name, why in MEASURE.items()},
}
"""Fields and sections that trials do not differ in."""


def sweep_vocabulary() -> Vocabulary:
    """`search` without its space, and `early_exit`."""
    known = {
        name: annotation
        for name, annotation in {
            **leaves(SearchSpec, "search."),
            **leaves(EarlyExitSpec, "early_exit."),
        }.items()
        if name != SPACE
    }
    sections: dict[str, dict[str, str]] = {"": {"search": "search", "early_exit": "early_exit"}}
    for name in known:
        sections.setdefault(section_of(name), {})[short(name)] = name
    sections["search"]["objective"] = "search.objective"
    return Vocabulary(
        known,
        sections,
        {"early_exit": "early_exit.method", "search.objective": "search.objective.metric"},
    )


SWEEP = sweep_vocabulary()
RUN_KEYS = (*RUN.sections[""], "defaults")
"""At the top of a sweep file, as at that of a job file."""


def load_sweep(
    source: str | os.PathLike[str] | Mapping[str, object], overrides: Sequence[str] = ()
) -> SweepSpec:
    """The sweep that a YAML or JSON file, or a mapping, asks for. Raises as `load_spec` does."""
    return sweep_of(read_source(source), overrides)


def sweep_of(document: Document, overrides: Sequence[str] = ()) -> SweepSpec:
    refuse_jobs(document)
    problems = Problems()
    refuse_unknown(document.tree, problems)
    own = [text for text in overrides if re.split(r"[.=]", text)[0].strip() in SWEEP_KEYS]
    others = [text for text in overrides if text not in own and not misplaced(text, problems)]
    run = load_task(document, others, problems)
    settings = read_settings(document.tree, own, problems)
    space = read_space(document.tree, problems)
    refuse_min_lr_rate(document.tree, others, space, problems)
    # A space that cannot be read is not empty too.
    search = built(SearchSpec, settings, "search", problems, space=space or stand_in(problems))
    exits = built(EarlyExitSpec, settings, "early_exit", problems)
    problems.raise_if_any()
    assert run is not None and search is not None and exits is not None
    return SweepSpec(
        base=run.base,
        task=run.jobs[0],
        search=search,
        early_exit=exits,
        engine=run.engine,
        report_to=run.report_to,
    )


def refuse_unknown(tree: Tree, problems: Problems) -> None:
    """At the top of the file, which has other keys than that of a job file."""
    for key in tree:
        if key not in (*RUN_KEYS, *SWEEP_KEYS, "jobs"):
            problems.add(SpecError(f"unknown key; {where_it_belongs(key)}", field=key))


def where_it_belongs(key: str) -> str:
    if key in JOB.sections[""]:
        return f"'{key}' belongs in 'task' or in 'defaults'"
    sections = {**RUN.sections, **SWEEP.sections, "search": {"space", *SWEEP.sections["search"]}}
    homes = [f"'{name}'" for name, keys in sections.items() if name and key in keys]
    if homes:
        return f"'{key}' belongs in {' or '.join(homes)}"
    return nearest(key, [*RUN_KEYS, *SWEEP_KEYS])


def misplaced(text: str, problems: Problems) -> bool:
    """An override that names a field of the search or the rules without saying so; told here, for a
    job knows no such field and would guess at another one."""
    key = text.partition("=")[0].strip()
    homes = [name for name in ("search", "early_exit") if key in SWEEP.sections[name]]
    if not homes or is_job_field(key):
        return False
    problems.add(
        SpecError(f"belongs in '{homes[0]}': -o {homes[0]}.{text}", field=key),
    )
    return True


def is_job_field(key: str) -> bool:
    try:
        canonical(key)
    except SpecError:
        return False
    return True


def refuse_jobs(document: Document) -> None:
    """As `refuse_sweep`, the other way round."""
    if "jobs" in document.tree and not any(key in document.tree for key in SWEEP_KEYS):
        raise SpecError(
            f"{document.name} is a job file: it lists jobs and has no search; train them with "
            "tlora train (load_spec in Python), or write a task and a search: docs/sweeps.md"
        )


def stand_in(problems: Problems) -> tuple[AxisSpec, ...]:
    wrong = any((each.field or "").startswith(SPACE) for each in problems.found.values())
    return (AxisSpec(field="lora.r", kind="values", values=(1,)),) if wrong else ()


def load_task(document: Document, overrides: Sequence[str], problems: Problems) -> RunSpec | None:
    """The file without its search, its task as the only job."""
    tree = document.tree
    if "jobs" in tree:
        problems.add(
            SpecError("a sweep has one task and no jobs; tlora train trains jobs", field="jobs")
        )
    tasks = tree["tasks"] if "tasks" in tree else [tree.get("task")]
    if not is_list(tasks) or len(tasks) != 1 or ("task" in tree and "tasks" in tree):
        problems.add(SpecError("give one task; several are a list under tasks", field="tasks"))
        return None
    task = tasks[0]
    if not is_tree(task):
        what = "a mapping with a name and data, as a job is"
        problems.add(SpecError(f"must be {what}, got {shown(task)}", field="task"))
        return None
    rest = {key: value for key, value in tree.items() if key in RUN_KEYS}
    return load_document(Document({**rest, "jobs": [task]}, document.folder), overrides, problems)


def refuse_min_lr_rate(
    tree: Tree, overrides: Sequence[str], space: Sequence[AxisSpec], problems: Problems
) -> None:
    """It is a share of the learning rate, and would be taken of the task's own for all trials.
    Wherever it was written: what counts is the task with all that is laid under and over it."""
    if all(axis.field != "train.learning_rate" for axis in space):
        return
    tasks = tree["tasks"] if "tasks" in tree else [tree.get("task")]
    as_jobs: Tree = {"defaults": tree.get("defaults"), "jobs": tasks}
    # What else is wrong with them has been told.
    for stack in read_layers(as_jobs, overrides, Problems()).stacks:
        if MIN_LR_RATE in reduce(laid_over, stack.layers).values:
            message = "is a share of learning_rate, which is tried; give min_lr, or try it too"
            problems.add(SpecError(message, field=MIN_LR_RATE))


def read_settings(tree: Tree, overrides: Sequence[str], problems: Problems) -> Layer:
    raw: Tree = {}
    for key in ("search", "early_exit"):
        value = tree.get(key)
        if key in tree:
            without = {k: v for k, v in value.items() if k != "space"} if is_tree(value) else value
            raw[key] = without
    layer, found = read_layer(raw, SWEEP, Place())
    problems.add(*found)
    for text in overrides:
        key, _, value = text.partition("=")
        place = Place(note=f" (override '{text}')")
        upper, found = read_layer(nest(key.strip(), parse_yaml(value, text)), SWEEP, place)
        problems.add(*found)
        layer = Layer(merge(layer.values, upper.values), layer.place, layer.broken | upper.broken)
    return layer


def built(spec: Any, layer: Layer, section: str, problems: Problems, **more: object) -> Any:
    tree: Tree = dict(more)
    for name, value in layer.values.items():
        head, *rest = name.split(".")
        if head == section:
            inner = tree
            for part in rest[:-1]:
                inner = cast(Tree, inner.setdefault(part, {}))
            inner[rest[-1]] = value
    found = build(spec, tree)
    if isinstance(found, list):
        named = [
            fault
            if fault.field.startswith(section)
            else Fault(f"{section}.{fault.field}", fault.message)
            for fault in cast(list[Fault], found)
        ]
        problems.add_faults(named, layer)
        return None
    return found


def read_space(tree: Tree, problems: Problems) -> tuple[AxisSpec, ...]:
    search = tree.get("search")
    raw = search.get("space") if is_tree(search) else None
    if raw is None:
        return ()
    if not is_tree(raw):
        problems.add(SpecError(f"must be a mapping of fields, got {shown(raw)}", field=SPACE))
        return ()
    axes: dict[str, AxisSpec] = {}
    for key, value in raw.items():
        try:
            axis = read_axis(key, value)
            if axis.field in axes:
                raise SpecError("is given twice, under two spellings")
            axes[axis.field] = axis
        except SpecError as error:
            problems.add(SpecError(error.message, field=f"{SPACE}.{key}"))
    return tuple(axes.values())


def read_axis(key: str, raw: object) -> AxisSpec:
    """Raises SpecError for what the field cannot be."""
    field = canonical(key)
    check_tried(field)
    if is_list(raw):
        return AxisSpec(field=field, kind="values", values=read_values(field, raw))
    if not is_tree(raw):
        raise SpecError(
            f"must be a list of values or a range such as {{log: [1e-5, 1e-2]}}, got {shown(raw)}; "
            "what all trials share belongs in the task"
        )
    for name in raw:
        if name not in AXIS_KEYS:
            raise SpecError(f"unknown key '{name}'; known here: {', '.join(AXIS_KEYS)}")
    kinds = [name for name in ("values", *RANGES) if name in raw]
    if len(kinds) != 1:
        raise SpecError(f"must have one of {', '.join(('values', *RANGES))}")
    kind = cast(Kind, kinds[0])
    when = read_conditions(raw.get("when"))
    if "step" in raw and kind != "integer":
        raise SpecError(f"step does nothing beside {kind}; it is of {{integer: [low, high]}}")
    if "points" in raw and kind == "values":
        raise SpecError("points does nothing beside values, which are all tried; take it out")
    if kind == "values":
        values = raw["values"]
        if not is_list(values):
            raise SpecError(f"values must be a list, got {shown(values)}")
        return AxisSpec(field=field, kind=kind, values=read_values(field, values), when=when)
    low, high = read_ends(field, kind, raw[kind])
    numbers = {
        name: read_number(raw[name], int, name) for name in ("step", "points") if name in raw
    }
    return AxisSpec(field=field, kind=kind, low=low, high=high, when=when, **numbers)


def canonical(key: str) -> str:
    """The field that a key of the space stands for; raises SpecError if there is none."""
    found = next(entries(nest(key, "x"), JOB), None)
    if isinstance(found, Fault):
        raise SpecError(found.message)
    if found is None or found.name in JOB.sections:
        raise SpecError("is no field of a job")
    return found.name


def check_tried(field: str) -> None:
    why = FIXED.get(field) or FIXED.get(section_of(field))
    if why is not None:
        raise SpecError(f"cannot be tried: {why}")
    if field in PARTS:
        instead = "min_lr" if field == MIN_LR_RATE else "train.batch_size"
        raise SpecError(f"cannot be tried; try {instead}")


def read_values(field: str, raw: Sequence[object]) -> tuple[object, ...]:
    return tuple(read_value(field, each) for each in raw)


def read_value(field: str, raw: object) -> object:
    try:
        return convert(usual_word(field, raw), JOB.fields[field])
    except ValueError as error:
        raise SpecError(str(error)) from None


def read_ends(field: str, kind: Kind, raw: object) -> tuple[float, float]:
    wanted = alternatives(JOB.fields[field])
    if kind == "integer" and not {int, float} & set(wanted):
        raise SpecError("is no number: list its values")
    if kind != "integer" and float not in wanted:
        also = "; use integer, or list its values" if int in wanted else ": list its values"
        raise SpecError(f"cannot be just any number{also}")
    if not is_list(raw) or len(raw) != 2:
        raise SpecError(f"{kind} must have two ends, [low, high], got {shown(raw)}")
    number = int if kind == "integer" else float
    low, high = (read_number(each, number, kind) for each in raw)
    return low, high


def read_number(raw: object, kind: type[int] | type[float], name: str) -> Any:
    try:
        return convert(raw, kind)
    except ValueError as error:
        raise SpecError(f"{name} {error}") from None


def read_conditions(raw: object) -> tuple[When, ...]:
    if raw is None:
        return ()
    if not is_tree(raw):
        raise SpecError(f"when must be a mapping of a field to its values, got {shown(raw)}")
    found: list[When] = []
    for key, value in raw.items():
        field = canonical(key)
        values = value if is_list(value) else [value]
        found.append(When(field=field, values=read_values(field, values)))
    return tuple(found)


def read_changes(texts: Sequence[str]) -> Tree:
    """`FIELD=VALUE` for a trial that is cloned, under canonical names. Raises SpecError."""
    changes: Tree = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise SpecError(f"override '{text}': must read FIELD=VALUE, such as train.lr=1e-3")
        try:
            field = canonical(key.strip())
            check_tried(field)
            changes[field] = read_value(field, parse_yaml(value, f"override '{text}'"))
        except SpecError as error:
            raise SpecError(error.message, field=key.strip()) from None
    return changes
