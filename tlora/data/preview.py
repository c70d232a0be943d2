"""Shows rows as the model will see them: token by token, with what is trained on."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tlora.core.job import DataSpec
from tlora.core.sequence import IGNORED
from tlora.data.prepare import resolve_template
from tlora.data.reading import read_rows
from tlora.data.render import Renderer
from tlora.data.rows import Origin, Row
from tlora.data.shapes import detect, read_examples
from tlora.data.sources import find_sources
from tlora.data.tokenise import Encoded, Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Piece(NamedTuple):
    """The text of one token, or of the few that make up one character."""

    text: str
    trained: bool


@dataclass(frozen=True, slots=True)
class RowPreview:
    origin: Origin
    pieces: tuple[Piece, ...]
    num_tokens: int
    num_trained: int
    side: str = ""
    """Of a pair: chosen or rejected."""


def preview_rows(
    data: DataSpec, tokenizer: "PreTrainedTokenizerBase", *, limit: int
) -> Iterator[RowPreview]:
    """The first rows of a dataset, whole; nothing is cached."""
    rows = read_rows(find_sources(data.paths))
    yield from _previews(islice(rows, limit), data, tokenizer)


def preview_row(row: Row, data: DataSpec, tokenizer: "PreTrainedTokenizerBase") -> list[Piece]:
    """One row, taken for the first of its dataset."""
    return list(next(_previews(iter((row,)), data, tokenizer)).pieces)


def _previews(
    rows: Iterator[Row], data: DataSpec, tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[RowPreview]:
    first = next(rows, None)
    if first is None:
        return
    renderer = Renderer(
        tokenizer, template=resolve_template(data.chat_template), train_on=data.train_on
    )
    encoder = Encoder(tokenizer, renderer)
    for example in read_examples(chain((first,), rows), data, detect(first, data)):
        found = encoder.encode([example])
        sides = ("chosen", "rejected") if len(found) == 2 else ("",)
        for row, side in zip(found, sides, strict=True):
            yield RowPreview(
                origin=row.origin,
                pieces=tuple(pieces(row, tokenizer)),
                num_tokens=len(row.input_ids),
                num_trained=int((row.labels[1:] != IGNORED).sum()),
                side=side,
            )


def pieces(row: Encoded, tokenizer: "PreTrainedTokenizerBase") -> list[Piece]:
    trained = row.labels != IGNORED
    shown: list[Piece] = []
    seen = 0
    for place, token in enumerate(row.input_ids.tolist()):
        text, seen = _token_text(row, place, token, seen, tokenizer)
        if text or not shown:
            shown.append(Piece(text, bool(trained[place])))
    return shown


def _token_text(
    row: Encoded, place: int, token: int, seen: int, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[str, int]:
    """The token's text that was not shown yet, and how far the row's text is shown after it."""
    if row.ranges is None or np.all(row.ranges[place] < 0):
        return str(tokenizer.decode([token])), seen
    start, end = (int(edge) for edge in row.ranges[place])
    return row.text[max(start, seen) : end], max(seen, end)
