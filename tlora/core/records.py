"""Small frozen dataclasses to JSON and back, told apart by `kind`.

For what is stored and replayed: events, decisions. Floats survive exactly (Python writes the
shortest text that reads back the same). Reading is strict: an unknown kind or a field that is
missing or too many is an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from tlora.core.errors import SpecError

R = TypeVar("R")


class Record:
    """Subclasses are frozen dataclasses with a `kind` of their own; a family shares a base."""

    kind: ClassVar[str]
    __slots__ = ()


def as_json(record: Any) -> dict[str, Any]:
    """Nested dataclasses become objects, tuples become lists."""
    plain = {each.name: _plain(getattr(record, each.name)) for each in fields(record)}
    return {"kind": record.kind} | plain if isinstance(record, Record) else plain


def of_json(family: Sequence[type[R]], data: Mapping[str, Any]) -> R:
    """The record of this family that the data is of."""
    kinds: dict[str, type[R]] = {each.kind: each for each in family}  # type: ignore[attr-defined]
    if data.get("kind") not in kinds:
        raise SpecError(f"'{data.get('kind')}' is none of {', '.join(kinds)}", field="kind")
    rest = {name: value for name, value in data.items() if name != "kind"}
    return _built(kinds[data["kind"]], rest)


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return as_json(value)
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]  # type: ignore[misc]
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}  # type: ignore[misc]
    return value


def _built(kind: type[R], data: Mapping[str, Any]) -> R:
    hints = _hints(kind)
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    for name in data:
        if name not in known:
            raise SpecError("is not known here", field=f"{kind.__name__}.{name}")
    for name, each in known.items():
        needed = each.default is MISSING and each.default_factory is MISSING
        if needed and name not in data:
            raise SpecError("is missing", field=f"{kind.__name__}.{name}")
    return kind(**{name: _value(hints[name], value) for name, value in data.items()})


def _value(hint: Any, value: Any) -> Any:
    if is_dataclass(hint) and isinstance(hint, type):
        return _built(hint, value)
    origin = get_origin(hint)
    if origin is UnionType:
        choices = [each for each in get_args(hint) if each is not NoneType]
        return None if value is None else _value(choices[0], value)
    if origin is tuple:
        inner = get_args(hint)
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(_value(inner[0], each) for each in value)
        return tuple(_value(each, one) for each, one in zip(inner, value, strict=True))
    if origin is dict:
        return {name: _value(get_args(hint)[1], each) for name, each in value.items()}
    return value
