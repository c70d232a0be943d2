"""The schema for editors allows what the loader takes and refuses what it refuses."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tlora.config import json_schema, load_spec
from tlora.config.fields import ALIASES, JOB, RUN
from tlora.core.errors import SpecError

KINDS = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}

EXAMPLE = """
base: {model: org/model, dtype: bf16}
engine: {nano_batch_tokens: auto, isolation: exact}
report_to: none
defaults:
  data: {columns: {prompt: q}}
  lora:  {rank: 16, alpha: 32, target_modules: [q_proj]}
  train: {lr: 2.0e-4, warmup_ratio: 0.03, save_steps: 7, lr_scheduler_kwargs: {min_lr: 0}}
jobs:
  - {name: a, data: org/rows, r: 64, per_device_train_batch_size: 4}
  - {name: 2, data: {path: [org/rows, org/more]}, max_grad_norm: null}
"""


def allows(schema: dict[str, Any], value: Any) -> bool:
    """The few keywords of JSON schema that ours uses."""
    if "anyOf" in schema:
        return any(allows(option, value) for option in schema["anyOf"])
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if kinds and not any(is_kind(value, kind) for kind in kinds):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if isinstance(value, list):
        return len(value) >= schema.get("minItems", 0) and all(
            allows(schema.get("items", {}), item) for item in value
        )
    if isinstance(value, dict):
        return allows_keys(schema, value)
    return True


def is_kind(value: object, kind: str) -> bool:
    return isinstance(value, KINDS[kind]) and (kind == "boolean") == isinstance(value, bool)


def allows_keys(schema: dict[str, Any], value: dict[str, Any]) -> bool:
    if any(key not in value for key in schema.get("required", [])):
        return False
    others = schema.get("additionalProperties", True)
    for key, item in value.items():
        inner = schema.get("properties", {}).get(key, others)
        if inner is False or (inner is not True and not allows(inner, item)):
            return False
    return True


def properties(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every property at any depth, with its path."""
    for option in (schema, *schema.get("anyOf", []), schema.get("items", {})):
        for key, inner in option.get("properties", {}).items():
            yield f"{path}{key}", inner
            yield from properties(inner, f"{path}{key}.")


def test_a_file_that_loads_is_allowed() -> None:
    """Aliases, flat fields, short forms and lists included."""
    tree = yaml.safe_load(EXAMPLE)
    load_spec(tree)
    assert allows(json_schema(), tree)


@pytest.mark.parametrize(
    "override",
    [
        {"lora": {"rnk": 4}},
        {"learning": 1},
        {"report_to": "wandb"},
        {"r": "four"},
        {"r": True},
        {"data": {"shape": "chatty"}},
        {"lora": 4},
    ],
)
def test_a_file_that_does_not_load_is_not_allowed(override: dict[str, object]) -> None:
    """The same mistakes are marked in the editor."""
    tree = {"base": "org/m", "jobs": [{"name": "a", "data": "org/rows", **override}]}
    with pytest.raises(SpecError):
        load_spec(tree)
    assert not allows(json_schema(), tree)


@pytest.mark.parametrize(
    ("fields", "loads"),
    [
        ({"load_in_4bit": True}, True),
        ({"load_in_4bit": False}, True),
        ({"quantization_bit": 4}, True),
        ({"quantization": None}, True),
        ({"quantization": "nf4"}, True),
        ({"quantization_bit": 8}, False),
        ({"quantization": "int4"}, False),
    ],
)
def test_bits_of_a_base_are_marked_as_the_loader_takes_them(
    fields: dict[str, object], loads: bool
) -> None:
    """Also where another tool's word for them is no text."""
    tree = {"base": {"model": "org/m", **fields}, "jobs": [{"name": "a", "data": "org/rows"}]}
    if loads:
        load_spec(tree)
    else:
        with pytest.raises(SpecError):
            load_spec(tree)
    assert allows(json_schema(), tree) is loads


@pytest.mark.parametrize("missing", ["base", "jobs"])
def test_base_and_jobs_are_required(missing: str) -> None:
    """And a job needs its name."""
    tree = {"base": "org/m", "jobs": [{"name": "a"}]}
    assert allows(json_schema(), tree)
    assert not allows(json_schema(), {k: v for k, v in tree.items() if k != missing})
    assert not allows(json_schema(), {**tree, "jobs": [{}]})


def test_every_property_has_a_description() -> None:
    """It is what an editor shows."""
    without = [path for path, schema in properties(json_schema()) if not schema.get("description")]
    assert without == []


def test_no_mapping_of_fields_allows_other_keys() -> None:
    """Only `columns` is open."""
    open_paths = {
        path
        for path, schema in properties(json_schema())
        for option in (schema, *schema.get("anyOf", []))
        if option.get("type") == "object" and option.get("additionalProperties") is not False
    }
    assert {path.rpartition(".")[2] for path in open_paths} == {"columns"}


def test_every_field_and_alias_has_its_property() -> None:
    """Nested under its section, and flat in a job where that is accepted."""
    paths = {path for path, _ in properties(json_schema())}
    assert set(RUN.fields) <= paths
    assert {f"jobs.{name}" for name in JOB.fields} <= paths
    assert {f"defaults.{name}" for name in JOB.fields if name != "name"} <= paths
    assert {f"jobs.{alias}" for alias in ALIASES} <= paths
    assert "defaults.name" not in paths
