"""A plan file: how one group is laid over its GPUs, written by hand or by `tlora plan --output`.

The fields are those of `core/plan.py`, and its own checks have the last word. A file that does not
say where adapters are has each job on one rank: nothing of it is sent then.
"""

import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from tlora.config.dumping import DUMPER
from tlora.config.fields import nearest
from tlora.config.reading import parse_json, parse_yaml, plain
from tlora.config.values import Tree, convert, is_tree, shown
from tlora.core.errors import SpecError, SpecErrors
from tlora.core.plan import Plan


def load_plan(source: str | os.PathLike[str] | Mapping[str, object]) -> Plan:
    """From a YAML or JSON file, or a mapping. Raises SpecError naming the field, or SpecErrors
    with all that is wrong."""
    if isinstance(source, Mapping):
        return plan_of(plain(source))
    path = Path(source).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SpecError(f"{path}: cannot be read: {reason}", field="--plan") from None
    parse = parse_json if path.suffix == ".json" else parse_yaml
    return plan_of(parse(text, str(path)))


def plan_of(tree: object) -> Plan:
    if not is_tree(tree):
        raise SpecError(
            f"must be a mapping such as 'replicas: 2, bucket: 8192', got {shown(tree)}",
            field="plan",
        )
    hints: dict[str, Any] = get_type_hints(Plan)
    problems: list[SpecError] = []
    values: Tree = {}
    for name, value in tree.items():
        if name not in hints:
            problems.append(
                SpecError(f"no such field; {nearest(name, list(hints))}", field=f"plan.{name}")
            )
            continue
        try:
            values[name] = convert(value, hints[name])
        except ValueError as error:
            problems.append(SpecError(str(error), field=f"plan.{name}"))
    for field in fields(Plan):
        if field.default is MISSING and field.name not in tree:
            problems.append(
                SpecError("is missing: tokens of a nano-batch on one rank", field="plan.bucket")
            )
    if problems:
        raise SpecErrors(problems) if len(problems) > 1 else problems[0]
    return Plan(**{"adapters": "rank_local", **values})  # type: ignore[arg-type]


def dump_plan(plan: Plan) -> str:
    """As YAML that `load_plan` reads back into an equal plan; fields at their defaults are left
    out, but for the number of replicas and shards and where adapters are."""
    defaults = {field.name: field.default for field in fields(Plan)}
    chosen = {
        name: value
        for name, value in asdict(plan).items()
        if name in ("replicas", "fsdp", "adapters") or value != defaults[name]
    }
    tree = plain(chosen)
    return yaml.dump(tree, Dumper=DUMPER, sort_keys=False, allow_unicode=True)
