"""Reads a JSON array of objects element by element, holding no more than one of them and a block of
text.

The standard library parses whole documents only; its `raw_decode` parses one value from a place in
a text and says where it ended. We give it a buffer that grows until the next element is whole.
"""

import json
from collections.abc import Iterator
from io import TextIOWrapper

from tlora.core.errors import DataError
from tlora.data.rows import Origin, Row

BLOCK_CHARACTERS = 1 << 16
LONGEST_ELEMENT_CHARACTERS = 1 << 26
"""A damaged element never becomes whole; this is where we stop reading on for its end."""

WHITESPACE = " \t\r\n"


class _Buffer:
    """A window over the text: `position` is the next unread character."""

    def __init__(self, text: TextIOWrapper) -> None:
        self._source = text
        self.text = ""
        self.position = 0

    def grow(self) -> bool:
        """Reads on, at least doubling what is unread; False at the end of the file."""
        unread = len(self.text) - self.position
        block = self._source.read(max(BLOCK_CHARACTERS, unread))
        self.text = self.text[self.position :] + block
        self.position = 0
        return bool(block)

    def peek(self) -> str:
        """The next character that is not white space, or "" at the end of the file."""
        while True:
            while self.position < len(self.text):
                if self.text[self.position] not in WHITESPACE:
                    return self.text[self.position]
                self.position += 1
            if not self.grow():
                return ""


def read_json_array(text: TextIOWrapper, *, path: str) -> Iterator[Row]:
    """Rows of `[{...}, {...}]`; a row's line is the number of its element."""
    buffer = _Buffer(text)
    number = 0
    try:
        assert buffer.peek() == "["
        buffer.position += 1
        while (mark := buffer.peek()) != "]":
            if number:
                _expect_comma(buffer, mark, Origin(path, number))
            origin = Origin(path, number + 1)
            if buffer.peek() != "{":
                raise origin.error(
                    "expected a JSON object as the next element of the array; "
                    "each row is written as {...}"
                )
            yield Row(_next_object(buffer, origin), origin)
            number += 1
        buffer.position += 1
        if buffer.peek():
            raise Origin(path, number).error("there is text after the end of the JSON array")
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8 somewhere after element {number}: {error.reason}; save the file as UTF-8",
            path=path,
        ) from error


def _expect_comma(buffer: _Buffer, mark: str, origin: Origin) -> None:
    if mark == "":
        raise origin.error("the file ends inside the JSON array, after this element")
    if mark != ",":
        raise origin.error(f"expected a comma or ] after this element of the array, got {mark!r}")
    buffer.position += 1


def _next_object(buffer: _Buffer, origin: Origin) -> dict[str, object]:
    decoder = json.JSONDecoder()
    while True:
        try:
            value, buffer.position = decoder.raw_decode(buffer.text, buffer.position)
            return value
        except (ValueError, RecursionError) as error:
            may_be_cut = isinstance(error, json.JSONDecodeError)
            too_long = len(buffer.text) - buffer.position > LONGEST_ELEMENT_CHARACTERS
            if not may_be_cut or too_long or not buffer.grow():
                raise origin.error(
                    f"this element of the array is not valid JSON: {error}"
                ) from error
