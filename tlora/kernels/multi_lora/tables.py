"""The table that says which rows of a nano-batch belong to which adapter.

A table is a tensor of fixed size, so that compiled code and captured graphs see only its values
change. Row 0 holds the number of segments; row i the i-th segment:

    start, stop     its tokens
    a_row           the first of its rank rows in the pool's A
    threshold, key  its dropout stream (kernels/streams.py)
    rank, b_row     per linear of the group: 0 where the job has no adapter there

Rank rows of the group's linears follow each other in A, in the order of the linears.
"""

import functools
import struct
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.utils.weak import WeakTensorKeyDictionary

FIXED_COLUMNS = 5

_last_read = WeakTensorKeyDictionary()
"""By table: its version when it was read, and the segments. Every linear reads the same table."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The contiguous tokens of one job (or of one sequence, where bits must not depend on the
    cut)."""

    start: int
    stop: int
    a_row: int
    ranks: tuple[int, ...]
    b_rows: tuple[int, ...]
    scale: float
    threshold: int = 0
    key: int = 0
    zero_grad: bool = False
    """Whether its gradients are known to be zero before this nano-batch: kernels may skip reading
    them. Not in a table, whose kernels read them anyway."""

    @property
    def width(self) -> int:
        """Rank rows over all linears of the group."""
        return sum(self.ranks)


def new_table(capacity: int, num_linears: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.zeros(
        capacity + 1, FIXED_COLUMNS + 2 * num_linears, dtype=torch.int64, device=device
    )


def write_table(segments: list[Segment], table: torch.Tensor, scales: torch.Tensor) -> None:
    """Put the segments into a table and its scales, both on any device."""
    assert len(segments) < len(table), f"{len(segments)} segments in a table of {len(table) - 1}"
    rows = [[len(segments)] + [0] * (table.shape[1] - 1)]
    for segment in segments:
        pairs = [
            value for pair in zip(segment.ranks, segment.b_rows, strict=True) for value in pair
        ]
        rows.append(
            [segment.start, segment.stop, segment.a_row, segment.threshold, segment.key, *pairs]
        )
    # Scales first: the version of the table says that both are new.
    if segments:
        scales[: len(segments)].copy_(torch.tensor([s.scale for s in segments], dtype=scales.dtype))
    table[: len(rows)].copy_(torch.tensor(rows, dtype=torch.int64))


def read_table(table: torch.Tensor, scales: torch.Tensor) -> list[Segment]:
    """The segments of a table: waits for the device if it is not in host memory."""
    last = _last_read.get(table)
    if last is None or last[0] != table._version:
        last = _last_read[table] = (table._version, _parse(table, scales))
    return last[1]


def _parse(table: torch.Tensor, scales: torch.Tensor) -> list[Segment]:
    count = int(table[0, 0])
    return [
        Segment(
            start=row[0],
            stop=row[1],
            a_row=row[2],
            threshold=row[3],
            key=row[4],
            ranks=tuple(row[FIXED_COLUMNS::2]),
            b_rows=tuple(row[FIXED_COLUMNS + 1 :: 2]),
            scale=scale,
        )
        for row, scale in zip(table[1 : count + 1].tolist(), scales[:count].tolist(), strict=True)
    ]


@functools.lru_cache(maxsize=4096)
def s_columns(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Where the linears of a job begin in S: at multiples of eight, 16 bytes in half precision."""
    return tuple(accumulate((round_up(rank, 8) for rank in ranks), initial=0))[:-1]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def float_bits(value: float) -> int:
    """As an int32 of a table."""
    return struct.unpack("<i", struct.pack("<f", value))[0]
