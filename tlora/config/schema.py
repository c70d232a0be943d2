"""JSON schema of what a person may write in a job file, for editors.

pydantic makes the schema of the resolved dataclasses; here it is opened to the spellings that
`fields.py` knows: aliases, flat fields in a job, `defaults`, and short forms.
"""

from functools import cache
from typing import cast, get_type_hints

from pydantic import TypeAdapter

from tlora.config.fields import (
    ACCUMULATION,
    ALIASES,
    JOB,
    MIN_LR_RATE,
    OTHER_WORDS,
    PER_DEVICE,
    RUN,
    RUN_ALIASES,
    SCHEDULER_KWARGS,
    Vocabulary,
)
from tlora.config.values import Tree
from tlora.core.job import JobSpec, RunSpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"

PART_SCHEMAS: dict[str, Tree] = {
    PER_DEVICE: {
        "type": "integer",
        "minimum": 1,
        "description": "One factor of batch_size; the other is gradient_accumulation_steps.",
    },
    ACCUMULATION: {
        "type": "integer",
        "minimum": 1,
        "description": "One factor of batch_size; the other is per_device_train_batch_size.",
    },
    MIN_LR_RATE: {
        "type": "number",
        "description": "min_lr as a share of learning_rate.",
    },
}

SECTION_TEXTS = {SCHEDULER_KWARGS: "Settings of the schedule, as transformers names them."}
"""Sections without a dataclass, hence without a docstring."""


def json_schema() -> Tree:
    """The schema of a job file: `base`, `defaults`, `jobs`, `engine`, `report_to`."""
    run = section_schema(RUN, "")
    properties = cast(dict[str, Tree], run["properties"])
    job = section_schema(JOB, "")
    job_properties = cast(dict[str, Tree], job["properties"])
    job_properties["name"] = {**job_properties["name"], "type": ["string", "integer"]}
    shared = {key: value for key, value in job_properties.items() if key != "name"}
    properties["defaults"] = {
        **job,
        "properties": shared,
        "description": "Settings of every job that does not say otherwise.",
    }
    properties["jobs"] = {
        "type": "array",
        "minItems": 1,
        "items": {**job, "required": ["name"], "description": "One adapter to train."},
        "description": "The adapters to train.",
    }
    return {
        "$schema": DIALECT,
        "title": "tlora job file",
        "description": "Many LoRA jobs on one frozen base model.",
        **run,
        "required": ["base", "jobs"],
    }


def section_schema(vocabulary: Vocabulary, section: str) -> Tree:
    """The mapping that may stand at the top or in one of the sections."""
    properties: Tree = {}
    for key, target in vocabulary.sections[section].items():
        if target in vocabulary.sections:
            properties[key] = described_section(vocabulary, target)
        else:
            properties[key] = field_schema(target, key)
    return {"type": "object", "properties": properties, "additionalProperties": False}


def described_section(vocabulary: Vocabulary, section: str) -> Tree:
    text = SECTION_TEXTS.get(section) or section_texts()[section]
    mapping = section_schema(vocabulary, section)
    if section == "base":
        mapping["required"] = ["model"]
    short_form = vocabulary.shorthands.get(section)
    if short_form is None:
        return {**mapping, "description": text}
    bare = {k: v for k, v in field_schema(short_form, "").items() if k != "description"}
    return {"anyOf": [bare, mapping], "description": text}


def field_schema(name: str, key: str) -> Tree:
    """The schema of a field, under one of its spellings."""
    schema = dict(PART_SCHEMAS.get(name) or leaf_schemas()[name])
    if key == "warmup_ratio":
        text = "Warm-up as a fraction of all steps; the same as a fraction in warmup_steps."
        return {"type": "number", "minimum": 0, "exclusiveMaximum": 1, "description": text}
    if "enum" in schema:
        schema["enum"] = [*cast(list[str], schema["enum"]), *OTHER_WORDS.get(name, {})]
        # The words of others need not be text.
        schema.pop("type", None)
    if name == "report_to":
        items = cast(Tree, schema["items"])
        single = {"enum": [*cast(list[str], items["enum"]), "none"]}
        return {"anyOf": [single, {"type": "array", "items": items}], **only(schema, "description")}
    if key in ALIASES or key in RUN_ALIASES:
        schema["description"] = f"The same as {name}. {schema['description']}"
    return schema


def only(schema: Tree, *keys: str) -> Tree:
    return {key: schema[key] for key in keys}


@cache
def pydantic_schema() -> Tree:
    return cast(Tree, unwrapped(TypeAdapter(RunSpec).json_schema()))


def unwrapped(schema: object) -> object:
    """Descriptions on one line each, however the docstrings are wrapped."""
    if isinstance(schema, dict):
        tree = cast(dict[str, object], schema)
        return {
            key: " ".join(value.split())
            if key == "description" and isinstance(value, str)
            else unwrapped(value)
            for key, value in tree.items()
        }
    if isinstance(schema, list):
        return [unwrapped(each) for each in cast(list[object], schema)]
    return schema


def definitions() -> dict[str, Tree]:
    """The schema of each dataclass."""
    return cast(dict[str, Tree], pydantic_schema()["$defs"])


def run_and_job_properties() -> dict[str, Tree]:
    return {
        **cast(dict[str, Tree], pydantic_schema()["properties"]),
        **cast(dict[str, Tree], definitions()["JobSpec"]["properties"]),
    }


def definition_of(schema: Tree) -> str | None:
    """The dataclass that a property refers to, if it is one."""
    reference = schema.get("$ref")
    return reference.rpartition("/")[2] if isinstance(reference, str) else None


def section_texts() -> dict[str, str]:
    """Section -> the docstring of its dataclass."""
    types = get_type_hints(RunSpec) | get_type_hints(JobSpec)
    return {
        name: docstring(types[name])
        for name, schema in run_and_job_properties().items()
        if definition_of(schema)
    }


def docstring(spec: type[object]) -> str:
    """On one line. pydantic tells it from 2.13 on."""
    return " ".join(str(spec.__doc__).split())


@cache
def leaf_schemas() -> dict[str, Tree]:
    """Canonical dotted name -> the field's own schema, titles left out."""
    leaves: dict[str, Tree] = {}
    for name, schema in run_and_job_properties().items():
        definition = definition_of(schema)
        if definition is None:
            leaves[name] = untitled(schema)
            continue
        inner = cast(dict[str, Tree], definitions()[definition]["properties"])
        leaves |= {f"{name}.{key}": untitled(value) for key, value in inner.items()}
    return leaves


def untitled(schema: Tree) -> Tree:
    return {key: value for key, value in schema.items() if key != "title"}
