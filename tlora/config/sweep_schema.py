"""JSON schema of a sweep file, for editors: that of a job file with a task and a search in place of
its jobs."""

from typing import cast

from pydantic import TypeAdapter

from tlora.config.fields import JOB
from tlora.config.schema import DIALECT, docstring, json_schema, unwrapped
from tlora.config.sweeps import RANGES, check_tried
from tlora.config.values import Tree
from tlora.core.errors import SpecError
from tlora.core.sweep import EarlyExitSpec, ObjectiveSpec, SearchSpec

ENDS: Tree = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
LIST: Tree = {"type": "array", "minItems": 1}
WHEN: Tree = {
    "type": "object",
    "description": "Only beside these values of other fields of the space.",
}
COUNT: Tree = {"type": "integer", "minimum": 1}


def sweep_schema() -> Tree:
    """`base`, `defaults`, `task`, `search`, `early_exit`, `engine`, `report_to`."""
    schema = json_schema()
    properties = dict(cast(dict[str, Tree], schema["properties"]))
    task = cast(Tree, properties.pop("jobs")["items"])
    properties["task"] = {**task, "description": "What every trial is, but for the space."}
    properties["tasks"] = {"type": "array", "items": task, "minItems": 1}
    search = section_of(SearchSpec)
    inner = cast(dict[str, Tree], search["properties"])
    inner["space"] = space_schema()
    objective = section_of(ObjectiveSpec)
    inner["objective"] = {"anyOf": [{"type": "string"}, objective]}
    properties["search"] = {**search, "required": ["space"]}
    properties["early_exit"] = {"anyOf": [{"type": "string"}, section_of(EarlyExitSpec)]}
    return {
        **schema,
        "$schema": DIALECT,
        "title": "tlora sweep file",
        "description": "Many settings of one LoRA job, tried together on one frozen base model.",
        "properties": properties,
        "required": ["base", "search"],
        "oneOf": [{"required": ["task"]}, {"required": ["tasks"]}],
    }


def section_of(spec: type[object]) -> Tree:
    found = cast(Tree, unwrapped(TypeAdapter(spec).json_schema()))
    fields = cast(dict[str, Tree], found["properties"])
    return {
        "type": "object",
        "description": docstring(spec),
        "properties": {
            name: {key: value for key, value in field.items() if key not in ("title", "default")}
            for name, field in fields.items()
        },
        "additionalProperties": False,
    }


def space_schema() -> Tree:
    axis: Tree = {
        "anyOf": [
            LIST,
            {
                "type": "object",
                "properties": {
                    "values": LIST,
                    **dict.fromkeys(RANGES, ENDS),
                    "step": COUNT,
                    "points": COUNT,
                    "when": WHEN,
                },
                "additionalProperties": False,
            },
        ]
    }
    return {
        "type": "object",
        "description": "Field -> a list of values, or a range.",
        "properties": {name: axis for name in JOB.fields if can_be_tried(name)},
        "additionalProperties": axis,
    }


def can_be_tried(field: str) -> bool:
    try:
        check_tried(field)
    except SpecError:
        return False
    return True
