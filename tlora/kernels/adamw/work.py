"""The work list of the pooled optimiser: which program owns which parameters.

Rows that lie side by side are one stretch of memory, whatever their width, so a program needs the
four addresses of its chunk, a count and whose it is. The list covers all attached jobs and stays as
it is until rows are claimed or freed; who steps now is said elsewhere (orders.py).

A job's chunks follow each other and are counted from the start of its own stretches: how its norm
is summed does not depend on its neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

COLUMNS = 8
(
    VALUE,  # addresses of float32
    GRAD,
    EXP_AVG,
    EXP_AVG_SQ,
    COUNT,  # parameters
    SLOT,  # whose they are
    ALIGNED,  # 1: may be read and written in pieces of 16 bytes
) = range(7)

CHUNK = 8192
"""Parameters of a program: 32 bytes each to move, for a row of the list of 64."""

VECTOR = 4
"""Values in 16 bytes."""


class Rows(NamedTuple):
    """Some rows of a matrix [capacity, width] and of its gradient and moments, all float32."""

    tensors: Sequence[torch.Tensor]
    """Value, gradient, first and second moment."""

    first: int
    rows: int


class Span(NamedTuple):
    """A job's part of the list."""

    first: int
    size: int


@dataclass(frozen=True)
class Work:
    """The list on the device. It holds addresses: void once one of the tensors is replaced."""

    table: torch.Tensor
    """int64 [chunks, COLUMNS]."""

    spans: tuple[Span, ...]
    """By slot."""

    span_table: torch.Tensor
    """The same on the device: int32 [slots, 2]."""

    @classmethod
    def of(
        cls, jobs: Sequence[Sequence[Rows]], device: torch.device | str, *, chunk: int = CHUNK
    ) -> "Work":
        """`jobs` has the rows of each slot."""
        table, spans = build_table(jobs, chunk=chunk)
        return cls._at(table.to(device), spans)

    @classmethod
    def joined(cls, parts: Sequence[torch.Tensor]) -> "Work":
        """Of what `chunks_of` gave for each slot, on the device: when a job comes or goes, the
        parts of the others are only copied there."""
        return cls._at(*join(parts))

    @classmethod
    def _at(cls, table: torch.Tensor, spans: tuple[Span, ...]) -> "Work":
        span_table = torch.tensor(spans, dtype=torch.int32).reshape(-1, 2)
        return cls(table, spans, span_table.to(table.device))

    @property
    def num_slots(self) -> int:
        return len(self.spans)

    def around(self, slots: Sequence[int]) -> Span:
        """The shortest part of the list that holds all chunks of these slots."""
        spans = [self.spans[slot] for slot in slots]
        first = min(span.first for span in spans)
        return Span(first, max(span.first + span.size for span in spans) - first)


def build_table(
    jobs: Sequence[Sequence[Rows]], *, chunk: int = CHUNK
) -> tuple[torch.Tensor, tuple[Span, ...]]:
    """The list in host memory, and where each slot's part of it is."""
    return join([chunks_of(job, chunk=chunk) for job in jobs])


def chunks_of(job: Sequence[Rows], *, chunk: int = CHUNK) -> torch.Tensor:
    """One slot's part of the list, in host memory: int64 [chunks, COLUMNS]."""
    if chunk % VECTOR:
        raise ValueError(f"a chunk must be a multiple of {VECTOR} parameters, got {chunk}")
    places = [_stretch(rows) for rows in job if rows.rows]
    stretches = torch.tensor(places, dtype=torch.int64).reshape(-1, COLUMNS)
    chunks = (stretches[:, COUNT] + chunk - 1) // chunk
    table = stretches.repeat_interleave(chunks, dim=0)
    # Of each chunk, the parameters of its stretch before it.
    before = torch.arange(len(table)) - (chunks.cumsum(0) - chunks).repeat_interleave(chunks)
    before *= chunk
    table[:, [VALUE, GRAD, EXP_AVG, EXP_AVG_SQ]] += 4 * before[:, None]
    table[:, COUNT] = (table[:, COUNT] - before).clamp(max=chunk)
    return table


def join(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, tuple[Span, ...]]:
    """Parts of slots as one list, where they are."""
    table = torch.cat(list(parts)) if parts else torch.zeros(0, COLUMNS, dtype=torch.int64)
    spans: list[Span] = []
    end = 0
    for slot, part in enumerate(parts):
        spans.append(Span(end, len(part)))
        end += len(part)
        table[spans[-1].first : end, SLOT] = slot
    return table, tuple(spans)


def _stretch(rows: Rows) -> list[int]:
    width = rows.tensors[0].shape[1]
    for tensor in rows.tensors:
        assert tensor.dtype == torch.float32 and tensor.is_contiguous(), "a pool is float32 rows"
        assert tensor.shape[1] == width and rows.first + rows.rows <= tensor.shape[0]
    addresses = [tensor.data_ptr() + 4 * rows.first * width for tensor in rows.tensors]
    # By the width alone: where an odd row happens to begin depends on who came before the job, and
    # the way a chunk is read decides the order of its sum.
    aligned = width % VECTOR == 0
    assert not aligned or all(address % (4 * VECTOR) == 0 for address in addresses)
    return [*addresses, rows.rows * width, 0, int(aligned), 0]
