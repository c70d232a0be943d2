"""A resolved run as plain values and as YAML, and what differs between two jobs."""

from dataclasses import asdict, fields, is_dataclass

import yaml

from tlora.config.reading import plain
from tlora.config.values import Tree, is_tree
from tlora.core.job import JobSpec, RunSpec

DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's where it is there: a quarter of the time for a hundred jobs, and the same text."""


def resolved(spec: RunSpec) -> Tree:
    """Every field under its canonical name; `load_spec` reads it back into an equal run."""
    tree = plain(asdict(spec))
    assert is_tree(tree)
    return tree


def dump_spec(spec: RunSpec) -> str:
    """The resolved run as a YAML job file."""
    return yaml.dump(resolved(spec), Dumper=DUMPER, sort_keys=False, allow_unicode=True)


def changed_fields(old: JobSpec, new: JobSpec) -> list[str]:
    """Dotted names of the fields that differ, in the order of their declaration."""
    return differences(old, new, "")


def differences(old: object, new: object, prefix: str) -> list[str]:
    if not is_dataclass(old):
        return [] if old == new else [prefix]
    found: list[str] = []
    for field in fields(old):
        name = f"{prefix}.{field.name}" if prefix else field.name
        found += differences(getattr(old, field.name), getattr(new, field.name), name)
    return found
