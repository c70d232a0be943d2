"""Recognises what kind of rows a dataset holds and turns each into an `Example`.

The first row decides, by its keys alone; every other row must be of the same shape. `data.columns`
renames keys before anything is looked at, and `data.shape` replaces the guess.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from tlora.core.errors import DataError
from tlora.core.job import DataSpec, Shape
from tlora.data.examples import Example
from tlora.data.rows import Origin, Row
from tlora.data.shape_readers import (
    TOKEN_MASKS,
    read_alpaca_row,
    read_chat_row,
    read_preference_row,
    read_prompt_completion_row,
    read_sharegpt_row,
    read_text_row,
    read_tokens_row,
)

Values = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ShapeRule:
    """How one shape is told from the others and read."""

    required: tuple[tuple[str, ...], ...]
    """Each entry is a key that must be there, or several of which one must."""

    optional: tuple[str, ...]
    read: Callable[[Values, Origin], Example]

    def fits(self, values: Values) -> bool:
        return all(any(key in values for key in keys) for keys in self.required)

    def wanted(self) -> str:
        return ", ".join(" or ".join(keys) for keys in self.required)


# The order matters: a row that would fit several shapes is taken for the first of them.
SHAPES: dict[Shape, ShapeRule] = {
    "preference": ShapeRule((("chosen",), ("rejected",)), ("prompt", "tools"), read_preference_row),
    "tokens": ShapeRule((("input_ids",),), ("labels", *TOKEN_MASKS), read_tokens_row),
    "chat": ShapeRule((("messages",),), ("tools",), read_chat_row),
    "sharegpt": ShapeRule((("conversations",),), ("system", "tools"), read_sharegpt_row),
    "alpaca": ShapeRule(
        (("instruction",), ("output",)), ("input", "system", "history"), read_alpaca_row
    ),
    "prompt_completion": ShapeRule(
        (("prompt",), ("completion", "response")), ("tools",), read_prompt_completion_row
    ),
    "text": ShapeRule((("text",),), (), read_text_row),
}

KNOWN_KEYS = sorted(
    {key for rule in SHAPES.values() for keys in rule.required for key in keys}
    | {key for rule in SHAPES.values() for key in rule.optional}
)


@dataclass(frozen=True, slots=True)
class Detection:
    """The shape of a dataset, and how we came to it."""

    shape: Shape
    text: str
    """For people: the shape and the keys it was told by."""


def renamed(values: Values, columns: Mapping[str, str]) -> Values:
    """The row under our names; a column that was renamed is not seen under its old name any
    more."""
    if not columns:
        return values
    theirs = set(columns.values())
    kept = {key: value for key, value in values.items() if key not in theirs}
    return kept | {ours: values[name] for ours, name in columns.items() if name in values}


def detect(row: Row, data: DataSpec) -> Detection:
    """The shape of the dataset that starts with this row."""
    _check_columns(row, data)
    values = renamed(row.values, data.columns)
    if data.shape != "auto":
        _require(SHAPES[data.shape], values, row.origin, data.shape)
        return Detection(data.shape, f"{data.shape} as asked for")
    for shape, rule in SHAPES.items():
        if rule.fits(values):
            known = {key for keys in rule.required for key in keys} | set(rule.optional)
            return Detection(
                shape, f"{shape} (keys {', '.join(key for key in values if key in known)})"
            )
    shapes = "; ".join(f"{shape}: {rule.wanted()}" for shape, rule in SHAPES.items())
    raise row.origin.error(
        f"cannot tell the kind of rows from the keys {_listed(row.values)}. Known are {shapes}. "
        "If the content is there under other names, map them in data.columns, "
        "for example {prompt: question, completion: answer}"
    )


def read_examples(
    rows: Iterable[Row], data: DataSpec, detection: Detection
) -> Iterator[tuple[Example, Origin]]:
    """Each row as an example; raises at the first row of another shape than was detected."""
    rule = SHAPES[detection.shape]
    unseen = set(data.columns.values())
    for row in rows:
        if unseen:
            unseen -= row.values.keys()
        values = renamed(row.values, data.columns)
        _require(rule, values, row.origin, detection.shape)
        yield rule.read(values, row.origin), row.origin
    if unseen:
        raise DataError(
            f"data.columns names {_listed(sorted(unseen))}, which no row of the dataset has"
        )


def _check_columns(row: Row, data: DataSpec) -> None:
    for ours in data.columns:
        if ours not in KNOWN_KEYS:
            raise DataError(
                f"data.columns maps our key to yours; '{ours}' is not one of our keys: "
                f"{', '.join(KNOWN_KEYS)}"
            )
    always = {key for rule in SHAPES.values() for keys in rule.required for key in keys}
    for ours, theirs in data.columns.items():
        if ours in always and theirs not in row.values:
            raise row.origin.error(
                f"data.columns maps {ours} to '{theirs}', but the row has the keys "
                f"{_listed(row.values)}"
            )


def _require(rule: ShapeRule, values: Values, origin: Origin, shape: Shape) -> None:
    if not rule.fits(values):
        raise origin.error(
            f"expected a row of shape {shape} with the keys {rule.wanted()}, "
            f"got the keys {_listed(values)}"
        )


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(f"'{key}'" for key in keys) or "(none)"
