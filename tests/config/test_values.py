"""What a text or a number means depends on the type that is wanted."""

from typing import Literal

import pytest

from tlora.config.values import convert, described

Color = Literal["red", "green"]


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        ("1e-4", float, 1e-4),
        ("3", float, 3.0),
        (3, float, 3.0),
        ("16", int, 16),
        ("1e3", int, 1000),
        ("1_000", int, 1000),
        (16.0, int, 16),
        ("3", int | float, 3),
        ("0.5", int | float, 0.5),
        ("yes", bool, True),
        ("off", bool, False),
        ("True", bool, True),
        (123, str, "123"),
        ("on", str, "on"),
        ("1.10", str | None, "1.10"),
        ("none", int | None, None),
        (None, float | None, None),
        ("none", str | None, "none"),
        ("auto", int | Literal["auto"], "auto"),
        ("512", int | Literal["auto"], 512),
        (["a", "b"], str | tuple[str, ...], ("a", "b")),
        ("a", tuple[str, ...], ("a",)),
        ({"a": 1}, dict[str, str], {"a": "1"}),
        ("red", Color, "red"),
    ],
)
def test_a_value_is_read_as_the_type_that_is_wanted(
    value: object, annotation: object, expected: object
) -> None:
    """Equal in value and in type."""
    result = convert(value, annotation)
    assert result == expected and type(result) in (type(expected), int, float)


@pytest.mark.parametrize(
    ("value", "annotation", "message"),
    [
        (True, int, "must be a whole number, got true"),
        (True, float, "must be a number, got true"),
        (True, int | float, "must be a number, got true"),
        ("true", int, "must be a whole number, got 'true'"),
        ("abc", float, "must be a number, got 'abc'"),
        ("inf", float, "must be a number, got 'inf'"),
        (float("nan"), float, "must be a number, got nan"),
        (float("inf"), int, "must be a whole number, got inf"),
        (1.5, int, "must be a whole number, got 1.5"),
        ("1.5", int, "must be a whole number, got '1.5'"),
        (1, bool, "must be true or false, got 1"),
        (None, int, "must be a whole number, got nothing"),
        (True, str, "must be text, got true"),
        (["a", None], str, "must be text, got ['a', nothing]"),
        ([["a"]], str, "must be text, got a list"),
        ({"a": 1}, float, "must be a number, got a mapping"),
        ("grean", Color, "must be one of red, green, got 'grean'; did you mean 'green'?"),
        ("ten", int | Literal["auto"], "must be a whole number or 'auto', got 'ten'"),
        ([True], str | tuple[str, ...], "must be text or a list of texts, got [true]"),
        ("x" * 100, int, f"must be a whole number, got '{'x' * 56}..."),
    ],
)
def test_a_value_of_another_type_is_refused_with_what_was_wanted(
    value: object, annotation: object, message: str
) -> None:
    """In a person's words."""
    with pytest.raises(ValueError) as caught:
        convert(value, annotation)
    assert str(caught.value) == message


def test_types_are_described_in_words() -> None:
    """Every part of a union has its word."""
    wanted = int | float | bool | str | tuple[str, ...] | dict[str, str] | Color | None
    assert described(wanted) == (
        "a number or true or false or text or one of red, green or a list of texts "
        "or a mapping of text to text or null"
    )
