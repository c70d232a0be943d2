"""Streams rows from the sources of a job, one at a time, each with its origin.

No file is held whole: JSON lines and CSV go line by line, JSON arrays element by element, Parquet
by record batches. Lines are cut from bytes and decoded one by one, so that a wrong byte can be
named by its line.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator

from tlora.core.errors import DataError
from tlora.data.hub import read_hub
from tlora.data.json_array import read_json_array
from tlora.data.parquet import read_parquet
from tlora.data.rows import Origin, Row
from tlora.data.sources import FileSource, HubSource, Source
from tlora.data.streams import ByteStream, open_bytes

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PEEKED_BYTES = 512
LONGEST_CELL_CHARACTERS = 1 << 26
"""Of a CSV cell; an unclosed quote would otherwise take in the rest of the file."""


def read_rows(sources: Iterable[Source]) -> Iterator[Row]:
    """All rows of all sources, in order."""
    for source in sources:
        match source:
            case HubSource():
                yield from read_hub(source)
            case FileSource(format="parquet"):
                yield from read_parquet(source)
            case FileSource():
                with open_bytes(source) as stream:
                    yield from _read_text_format(source, stream)


def _read_text_format(source: FileSource, stream: ByteStream) -> Iterator[Row]:
    if source.format == "csv":
        return _read_csv(stream, path=source.name)
    if _starts_an_array(stream):
        text = io.TextIOWrapper(stream, encoding="utf-8-sig")
        return read_json_array(text, path=source.name)
    return _read_json_lines(stream, path=source.name)


def _starts_an_array(stream: ByteStream) -> bool:
    """No row of JSON lines starts with a bracket, so one character tells an array, whatever the
    name."""
    return stream.peek(PEEKED_BYTES).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")


def _decoded_lines(stream: ByteStream, *, path: str) -> Iterator[str]:
    for number, line in enumerate(stream, start=1):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Origin(path, number).error(
                f"not UTF-8 (byte {error.object[error.start]:#04x} at place {error.start + 1} "
                "of the line); save the file as UTF-8"
            ) from error


def _read_json_lines(stream: ByteStream, *, path: str) -> Iterator[Row]:
    for number, line in enumerate(_decoded_lines(stream, path=path), start=1):
        if not line.strip():
            continue
        origin = Origin(path, number)
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:  # a number may be too long to be read
            raise origin.error(
                f"not valid JSON: {error}; write one object on each line, or one array of objects"
            ) from error
        if not isinstance(values, dict):
            raise origin.error(
                f"expected a JSON object ({{...}}), got {type(values).__name__}; "
                "each row needs named keys"
            )
        yield Row(values, origin)


def _read_csv(stream: ByteStream, *, path: str) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_CELL_CHARACTERS)
    reader = csv.reader(_decoded_lines(stream, path=path), strict=True)
    header: list[str] | None = None
    while True:
        origin = Origin(path, reader.line_num + 1)
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise origin.error(f"not valid CSV: {error}") from error
        if cells is None:
            return
        if not cells:
            continue
        if header is None:
            header = _checked_header(cells, origin)
            continue
        if len(cells) != len(header):
            raise origin.error(
                f"expected {len(header)} cells ({', '.join(header)}), got {len(cells)}; "
                'quote cells that hold commas or line breaks with "'
            )
        yield Row(dict(zip(header, cells, strict=True)), origin)


def _checked_header(cells: list[str], origin: Origin) -> list[str]:
    if len(set(cells)) < len(cells) or "" in cells:
        raise DataError(
            f"the first line must name each column once, got: {', '.join(cells)}",
            path=origin.path,
            line=origin.line,
        )
    return cells
