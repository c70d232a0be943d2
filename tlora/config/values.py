"""One value of a job file, read as the type its field wants.

Files hold text (`reading.py` leaves YAML scalars alone), Python callers hold numbers, and both may
write `1e-4` or `yes`. The type of the field decides what a text means; pydantic, in strict mode,
has the last word.
"""

import math
from collections.abc import Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeGuard, Union, cast, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tlora.config.fields import nearest

Tree = dict[str, object]

BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NULLS = ("null", "none", "~")


def is_tree(value: object) -> TypeGuard[Tree]:
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list)


def convert(value: object, annotation: object) -> object:
    """The value as the annotated type. Raises ValueError saying what was wanted."""
    adapted = adapt(value, annotation)
    try:
        return adapter(annotation).validate_python(adapted, strict=True)
    except ValidationError:
        raise ValueError(complaint(value, annotation)) from None


@cache
def adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False))


def alternatives(annotation: object) -> tuple[object, ...]:
    """The members of a union, opened all the way; any other type alone."""
    if get_origin(annotation) in (Union, UnionType):
        return tuple(inner for member in get_args(annotation) for inner in alternatives(member))
    return (annotation,)


def words(annotation: object) -> list[str]:
    """The texts that a Literal allows."""
    return [
        str(word)
        for member in alternatives(annotation)
        if get_origin(member) is Literal
        for word in get_args(member)
    ]


def list_member(annotation: object) -> object | None:
    """The type inside `tuple[type, ...]`, or None."""
    for member in alternatives(annotation):
        if get_origin(member) is tuple:
            return get_args(member)[0]
    return None


def adapt(value: object, annotation: object) -> object:
    """A best try at the type that is wanted; leaves alone what it cannot read."""
    wanted = alternatives(annotation)
    member = list_member(annotation)
    if isinstance(value, str):
        if str in wanted or value in words(annotation):
            return value
        return (adapt(value, member),) if member is not None else adapt_text(value, wanted)
    if is_list(value) and member is not None:
        return tuple(adapt(item, member) for item in value)
    if is_tree(value) and dict[str, str] in wanted:
        return {key: adapt(item, str) for key, item in value.items()}
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return adapt_number(value, wanted)
    return value


def adapt_text(text: str, wanted: tuple[object, ...]) -> object:
    if NoneType in wanted and text.lower() in NULLS:
        return None
    if bool in wanted:
        return BOOLEANS.get(text.lower(), text)
    if int in wanted and (whole := parse(text, int)) is not None:
        return whole
    if int in wanted or float in wanted:
        number = parse(text, float)
        return text if number is None else adapt_number(number, wanted)
    return text


def adapt_number(number: float, wanted: tuple[object, ...]) -> object:
    if int in wanted or float in wanted:
        only_whole = float not in wanted and math.isfinite(number) and number == int(number)
        return int(number) if only_whole else number
    return str(number) if str in wanted else number


def parse(text: str, kind: type[int] | type[float]) -> int | float | None:
    try:
        return kind(text)
    except ValueError:
        return None


def complaint(value: object, annotation: object) -> str:
    message = f"must be {described(annotation)}, got {shown(value)}"
    options = words(annotation)
    if isinstance(value, str) and len(options) > 1:
        guess = nearest(value, options)
        message += f"; {guess}" if guess.startswith("did you mean") else ""
    return message


def described(annotation: object) -> str:
    """The type in a person's words: "a whole number or null"."""
    wanted = alternatives(annotation)
    parts: list[str] = []
    if float in wanted:
        parts.append("a number")
    elif int in wanted:
        parts.append("a whole number")
    if bool in wanted:
        parts.append("true or false")
    if str in wanted:
        parts.append("text")
    if options := words(annotation):
        parts.append(f"one of {', '.join(options)}" if len(options) > 1 else f"'{options[0]}'")
    if (member := list_member(annotation)) is not None:
        options = words(member)
        parts.append(f"a list of {', '.join(options)}" if options else "a list of texts")
    if dict[str, str] in wanted:
        parts.append("a mapping of text to text")
    if NoneType in wanted:
        parts.append("null")
    return " or ".join(parts)


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first few, and how many more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def shown(value: object) -> str:
    """The value as a person would know it again, cut to a line."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if is_tree(value):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        members = cast(Sequence[object], value)
        if any(is_tree(each) or isinstance(each, (list, tuple)) for each in members):
            return "a list"
        text = f"[{', '.join(map(shown, members))}]"
    else:
        text = f"'{value}'" if isinstance(value, str) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."
