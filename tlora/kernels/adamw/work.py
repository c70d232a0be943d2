"""The work list of the pooled optimiser: which program owns which parameters.

Rows that lie side by side are one stretch of memory, whatever their width, so a program needs the
addresses of its chunk, a count and whose it is. The list covers all attached jobs and stays as
it is until rows are claimed or freed; who steps now is said elsewhere (orders.py).

A job's chunks follow each other and are counted from the start of its own stretches: how its norm
is summed does not depend on its neighbours.
"""

from collections.abc import Iterable, Sequence
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
    ALIGNED,  # 1: may be read and written four values at a time
    COPY,  # address of the copy in half precision; 0: there is none
) = range(COLUMNS)

CHUNK = 8192
"""Parameters of a program: 32 bytes each to move, for a row of the list of 64."""

VECTOR = 4
"""Values in 16 bytes of float32, and in 8 of a copy."""

COPY_BYTES = 2
"""Of a value in a copy."""


class Rows(NamedTuple):
    """Some rows of a matrix [capacity, width] and of its gradient and moments, all float32."""

    tensors: Sequence[torch.Tensor]
    """Value, gradient, first and second moment."""

    first: int
    rows: int
    copy: torch.Tensor | None = None
    """Of the matrix, in half precision: what products are made with."""


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

    copy_dtype: torch.dtype | None = None
    """Of the copies, which is one for all; None where there are none."""

    @classmethod
    def of(
        cls, jobs: Sequence[Sequence[Rows]], device: torch.device | str, *, chunk: int = CHUNK
    ) -> "Work":
        """`jobs` has the rows of each slot."""
        copies = one_dtype(rows.copy for job in jobs for rows in job)
        tables = [chunks_of(job, chunk=chunk) for job in jobs]
        return cls.of_tables(tables, device, copy_dtype=copies)

    @classmethod
    def of_tables(
        cls,
        tables: Sequence[np.ndarray],
        device: torch.device | str,
        *,
        copy_dtype: torch.dtype | None,
    ) -> "Work":
        """`tables` has the chunks of each slot, which stay the same while its rows do."""
        table, spans = join(tables)
        span_table = torch.tensor(spans, dtype=torch.int32).reshape(-1, 2)
        return cls(_on(device, table), spans, _on(device, span_table), copy_dtype)

    @property
    def num_slots(self) -> int:
        return len(self.spans)

    def around(self, slots: Sequence[int]) -> Span:
        """The shortest part of the list that holds all chunks of these slots."""
        spans = [self.spans[slot] for slot in slots]
        first = min(span.first for span in spans)
        return Span(first, max(span.first + span.size for span in spans) - first)


def one_dtype(copies: Iterable[torch.Tensor | None]) -> torch.dtype | None:
    """The number format that these copies share; None if there are none."""
    found = {copy.dtype for copy in copies if copy is not None}
    if len(found) > 1:
        names = " and ".join(sorted(map(str, found)))
        raise ValueError(f"adapters are multiplied in {names}: the optimiser writes one of them")
    return found.pop() if found else None


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
    table[:, COPY] += np.where(table[:, COPY] != 0, COPY_BYTES * before, 0)
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
    copy = 0
    if rows.copy is not None:
        assert rows.copy.shape == shape and rows.copy.is_contiguous()
        assert rows.copy.element_size() == COPY_BYTES, "a copy is in half precision"
        copy = rows.copy.data_ptr() + COPY_BYTES * rows.first * width
        assert not aligned or copy % (COPY_BYTES * VECTOR) == 0
    return [*addresses, rows.rows * width, 0, int(aligned), copy]


def _on(device: torch.device | str, tensor: torch.Tensor) -> torch.Tensor:
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    # From pinned memory the host need not wait for what is running.
    return tensor.pin_memory().to(device, non_blocking=True)
