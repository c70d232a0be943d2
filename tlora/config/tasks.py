"""A sweep file with several tasks: the same search for each of them, on one base."""

import os
from collections.abc import Mapping, Sequence

from tlora.config.reading import Document, read_source
from tlora.config.sweeps import sweep_of
from tlora.config.values import is_list, is_tree, shown
from tlora.core.errors import SpecError
from tlora.core.sweep import SweepSpec


def load_tasks(
    source: str | os.PathLike[str] | Mapping[str, object], overrides: Sequence[str] = ()
) -> tuple[SweepSpec, ...]:
    """One sweep for each task of a file, whether it has `task` or `tasks`. They share base, search,
    rules and engine. Raises as `load_sweep` does."""
    document = read_source(source)
    tree = document.tree
    tasks = tree.get("tasks")
    if "task" in tree or not is_list(tasks) or len(tasks) < 2:
        return (sweep_of(document, overrides),)
    rest = {key: value for key, value in tree.items() if key != "tasks"}
    found: list[SweepSpec] = []
    for number, task in enumerate(tasks):
        if not is_tree(task):
            what = "a mapping with a name and data, as a job is"
            raise SpecError(f"must be {what}, got {shown(task)}", field=f"tasks.{number}")
        found.append(sweep_of(Document({**rest, "task": task}, document.folder), overrides))
    names = [spec.task.name for spec in found]
    for name in names:
        if names.count(name) > 1:
            raise SpecError("is the name of two tasks", job=name, field="tasks.name")
    return tuple(found)
