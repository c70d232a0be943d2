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

import numpy as np
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
        return cls.of_tables([chunks_of(job, chunk=chunk) for job in jobs], device)

    @classmethod
    def of_tables(cls, tables: Sequence[np.ndarray], device: torch.device | str) -> "Work":
        """`tables` has the chunks of each slot, which stay the same while its rows do."""
        table, spans = join(tables)
        span_table = torch.tensor(spans, dtype=torch.int32).reshape(-1, 2)
        return cls(_on(device, table), spans, _on(device, span_table))

    @property
    def num_slots(self) -> int:
        return len(self.spans)

    def around(self, slots: Sequence[int]) -> Span:
        """The shortest part of the list that holds all chunks of these slots."""
        spans = [self.spans[slot] for slot in slots]
        first = min(span.first for span in spans)
        return Span(first, max(span.first + span.size for span in spans) - first)


def join(tables: Sequence[np.ndarray]) -> tuple[torch.Tensor, tuple[Span, ...]]:
    """The list of all slots in host memory, and where each slot's part of it is."""
    table = np.concatenate([np.zeros((0, COLUMNS), dtype=np.int64), *tables])
    sizes = [len(each) for each in tables]
    table[:, SLOT] = np.repeat(np.arange(len(tables)), sizes)
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    spans = tuple(Span(end - size, size) for end, size in zip(ends, sizes, strict=True))
    return torch.from_numpy(table), spans


def chunks_of(job: Sequence[Rows], *, chunk: int = CHUNK) -> np.ndarray:
    """int64 [chunks, COLUMNS] of one job, whose slot is still open."""
    if chunk % VECTOR:
        raise ValueError(f"a chunk must be a multiple of {VECTOR} parameters, got {chunk}")
    places = [_stretch(rows) for rows in job if rows.rows]
    stretches = np.array(places, dtype=np.int64).reshape(-1, COLUMNS)
    counts = -(-stretches[:, COUNT] // chunk)
    table = np.repeat(stretches, counts, axis=0)
    # Of each chunk, the parameters of its stretch before it.
    before = np.arange(len(table)) - np.repeat(np.cumsum(counts) - counts, counts)
    before *= chunk
    table[:, [VALUE, GRAD, EXP_AVG, EXP_AVG_SQ]] += 4 * before[:, None]
    table[:, COUNT] = np.minimum(table[:, COUNT] - before, chunk)
    return table


def _stretch(rows: Rows) -> list[int]:
    shape = rows.tensors[0].shape
    capacity, width = shape
    assert rows.first + rows.rows <= capacity
    for tensor in rows.tensors:
        assert tensor.dtype == torch.float32 and tensor.is_contiguous(), "a pool is float32 rows"
        assert tensor.shape == shape
    addresses = [tensor.data_ptr() + 4 * rows.first * width for tensor in rows.tensors]
    # By the width alone: where an odd row happens to begin depends on who came before the job, and
    # the way a chunk is read decides the order of its sum.
    aligned = width % VECTOR == 0
    assert not aligned or all(address % (4 * VECTOR) == 0 for address in addresses)
    return [*addresses, rows.rows * width, 0, int(aligned), 0]


def _on(device: torch.device | str, tensor: torch.Tensor) -> torch.Tensor:
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    # From pinned memory the host need not wait for what is running.
    return tensor.pin_memory().to(device, non_blocking=True)
