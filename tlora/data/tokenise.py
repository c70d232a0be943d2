"""From examples to token ids and labels.

The whole text of a row is tokenised once, so the tokens are those the model would see at inference,
and the spans of trained characters are carried over by the tokenizer's offsets. The rule: **a token
is trained on if its first visible character lies inside a trained span**, or its first character
where all are white space. So a token that reaches from the last word of the prompt into the answer
is not trained on, and the answer's first word is, even where the tokenizer draws the space before
it into its token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from tlora.core.sequence import IGNORED
from tlora.data.examples import Example, Preference, Tokens
from tlora.data.render import Renderer
from tlora.data.rendered import Rendered
from tlora.data.rows import Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TEXT = -1
"""Start and end of a token that stands for no character of the text."""

BATCH_CHARACTERS = 1 << 19
"""Handed to the tokenizer at once; its answer for twice as many, at 1.7 to a token, took 213 MB."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One whole row in tokens, however long."""

    input_ids: np.ndarray
    """int32 [length]."""

    labels: np.ndarray
    """int32 [length]; IGNORED where a token is not trained on."""

    origin: Origin

    text: str = ""
    """What was tokenised."""

    ranges: np.ndarray | None = None
    """int64 [length, 2]: the characters of `text` that each token stands for; None where
    unknown."""

    empty_answer: bool = False
    """Whether the end is all that is trained on of one of its answers."""


class Encoder:
    """Renders and tokenises examples for one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", renderer: Renderer) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._vocabulary_size = len(tokenizer)
        self._begin = _begin_token(tokenizer)
        self._end = _token_id(tokenizer.eos_token_id)

    def encode(self, examples: list[tuple[Example, Origin]]) -> list[Encoded]:
        """Tokenises a batch, in order, a pair as two rows, the chosen one first; raises DataError
        at the first row that cannot be trained on."""
        examples = [(side, origin) for example, origin in examples for side in _sides(example)]
        texts = [
            (self._renderer.render(example, origin), origin)
            for example, origin in examples
            if not isinstance(example, Tokens)
        ]
        tokenised = self._tokenise(texts)
        encoded = [
            self._take_tokens(example, origin) if isinstance(example, Tokens) else next(tokenised)
            for example, origin in examples
        ]
        for row in encoded:
            if not (row.labels[1:] != IGNORED).any():
                raise row.origin.error(
                    "the row has no token to train on; it needs an answer that is not empty and, "
                    "in a chat, an assistant message without weight: 0"
                )
        return encoded

    def _tokenise(self, texts: list[tuple[Rendered, Origin]]) -> Iterator[Encoded]:
        if not self._tokenizer.is_fast:
            yield from (self._tokenise_pieces(rendered, origin) for rendered, origin in texts)
            return
        for chunk in _chunks(texts):
            batch = self._tokenizer(
                [rendered.text for rendered, _ in chunk],
                add_special_tokens=False,
                return_offsets_mapping=True,
                return_attention_mask=False,
                verbose=False,  # a long row is cut later, so the library need not warn of it
            )
            table = zip(chunk, batch["input_ids"], batch["offset_mapping"], strict=True)  # pyright: ignore
            for (rendered, origin), ids, offsets in table:
                yield self._from_offsets(rendered, origin, ids, offsets)

    def _from_offsets(
        self, rendered: Rendered, origin: Origin, ids: list[int], offsets: list[tuple[int, int]]
    ) -> Encoded:
        ranges = token_ranges(offsets)
        starts = visible_starts(rendered, ranges)
        trained = np.zeros(len(ids), dtype=bool)
        for start, end in rendered.spans:
            trained |= (starts >= start) & (starts < end)
        return self._frame(rendered, origin, np.array(ids, dtype=np.int32), trained, ranges)

    def _tokenise_pieces(self, rendered: Rendered, origin: Origin) -> Encoded:
        """Without offsets (tokenizers written in Python), each span is tokenised on its own."""
        ids: list[int] = []
        trained: list[bool] = []
        edges = [0, *(edge for span in rendered.spans for edge in span), len(rendered.text)]
        for place, (start, end) in enumerate(pairwise(edges)):
            piece = self._tokenizer.encode(rendered.text[start:end], add_special_tokens=False)
            ids += piece
            trained += [place % 2 == 1] * len(piece)
        return self._frame(
            rendered, origin, np.array(ids, dtype=np.int32), np.array(trained, dtype=bool), None
        )

    def _frame(
        self,
        rendered: Rendered,
        origin: Origin,
        ids: np.ndarray,
        trained: np.ndarray,
        ranges: np.ndarray | None,
    ) -> Encoded:
        head = _unless_there(self._begin, ids[:1]) if rendered.framed else []
        tail = _unless_there(self._end, ids[-1:]) if rendered.framed else []
        ids = np.concatenate((head, ids, tail)).astype(np.int32)
        trained = np.concatenate(([False for _ in head], trained, [True for _ in tail])).astype(
            bool
        )
        if ranges is not None:
            around = [np.full((len(tokens), 2), NO_TEXT) for tokens in (head, tail)]
            ranges = np.concatenate((around[0], ranges, around[1]))
        labels = np.where(trained, ids, np.int32(IGNORED))
        return Encoded(ids, labels, origin, rendered.text, ranges, rendered.empty_answer)

    def _take_tokens(self, example: Tokens, origin: Origin) -> Encoded:
        labels = example.input_ids if example.labels is None else example.labels
        learnt = [label for label in labels if label != IGNORED]
        for name, numbers in (("input_ids", example.input_ids), ("labels", learnt)):
            strange = next((n for n in numbers if not 0 <= n < self._vocabulary_size), None)
            if strange is not None:
                raise origin.error(
                    f"{name} holds {strange}, which is outside the tokenizer's vocabulary of "
                    f"{self._vocabulary_size}; was the row tokenised for another model?"
                )
        return Encoded(
            np.array(example.input_ids, dtype=np.int32), np.array(labels, dtype=np.int32), origin
        )


def _sides(example: Example) -> tuple[Example, ...]:
    pair = isinstance(example, Preference)
    return (example.chosen, example.rejected) if pair else (example,)


def _chunks(texts: list[tuple[Rendered, Origin]]) -> Iterator[list[tuple[Rendered, Origin]]]:
    """Runs of at most BATCH_CHARACTERS, or of one text."""
    chunk: list[tuple[Rendered, Origin]] = []
    size = 0
    for rendered, origin in texts:
        if chunk and size + len(rendered.text) > BATCH_CHARACTERS:
            yield chunk
            chunk, size = [], 0
        chunk.append((rendered, origin))
        size += len(rendered.text)
    if chunk:
        yield chunk


def token_ranges(offsets: list[tuple[int, int]]) -> np.ndarray:
    """Where each token's characters begin and end, a gap counted to the token after it."""
    ranges = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    reached = np.maximum.accumulate(np.concatenate(([0], ranges[:, 1])))[:-1]
    ranges[:, 0] = np.minimum(ranges[:, 0], reached)
    return ranges


def visible_starts(rendered: Rendered, ranges: np.ndarray) -> np.ndarray:
    """Where each token counts as beginning. Only at the edges of spans does white space matter."""
    starts, ends = ranges[:, 0].copy(), ranges[:, 1]
    for edge in (edge for span in rendered.spans for edge in span):
        for place in np.flatnonzero((starts < edge) & (ends > edge)):
            before, after = rendered.text[starts[place] : edge], rendered.text[edge : ends[place]]
            if before.isspace() and not after.isspace():
                starts[place] = edge
    return starts


def _begin_token(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The begin token, where the tokenizer puts one before a text by itself. Having one is not
    enough: a server that tokenises the prompt would not send it."""
    begin = _token_id(tokenizer.bos_token_id)
    ids = tokenizer.encode("a", add_special_tokens=True)
    return begin if begin is not None and ids[:1] == [begin] else None


def _unless_there(token: int | None, present: np.ndarray) -> list[int]:
    return [] if token is None or present.tolist() == [token] else [token]


def _token_id(value: object) -> int | None:
    return value if isinstance(value, int) else None
