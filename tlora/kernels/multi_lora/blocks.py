"""The work lists of the GPU kernels: which program does what, decided on the host per nano-batch.

A kernel's program reads one row of a list and needs nothing else: its tokens, its rank rows, its
columns of S, its dropout stream. Linears, ranks beyond a tile and segments of any length are all
just more rows, so the number of launches never depends on the adapters. The lists of all kernels
lie in one int32 table of fixed size: one copy to the device, the same shapes for compiled code and
captured graphs whatever jobs are attached.

Nothing in a job's rows depends on its neighbours: token blocks are counted from the segment's
start, partial sums are added in the order of the job's own tokens.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import torch

from tlora.kernels.multi_lora.tables import Segment

COLUMNS = 16
(
    START,  # first token
    COUNT,  # tokens
    LINEAR,  # which of the group's linears
    W_ROW,  # first rank row in the pool
    COL,  # first column of S
    RANK,  # rank rows; in `expand`, the largest of its pieces
    THRESHOLD,  # dropout stream; 0 for none
    KEY,
    SCALE,  # float bits
    KEEP,  # float bits of 1 / (1 - p)
    FIRST,  # `expand`: first piece; `reduce`: first row of the job's partial sums
    SIZE,  # `expand`: number of pieces; `reduce`: number of partial sums (1: none needed)
    INDEX,  # `reduce`: place of this row among them
    GROUP,  # `reduce`: which job and piece, for the counter of finished partial sums
) = range(14)

LISTS = (
    "shrink_x",  # blocks of S = drop(X) A^T
    "shrink_dy",  # blocks of dS = dY B^T
    "expand_y",  # chunks of Y = S B
    "expand_dx",  # chunks of dX = drop(dS A)
    "pieces_y",  # what they add up
    "pieces_dx",
    "reduce_a",  # chunks of dA = dS^T drop(X)
    "reduce_b",  # chunks of dB = S^T dY
)


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes that decide the lists. They may depend on the nano-batch's bucket, not on its jobs."""

    shrink_tokens: int = 128
    """Tokens of a block of S = X A^T."""

    shrink_rank: int = 128
    """Rank rows of a block of S; wider adapters read their input again."""

    expand_tokens: int = 256
    """Tokens that one program of the expand walks."""

    chunk_tokens: int = 1024
    """Tokens that one program of the gradients of A and B walks; more of them mean partial sums."""

    chunk_rank: int = 64
    """Rank rows held by a program that walks tokens."""

    @classmethod
    def for_tokens(cls, num_tokens: int) -> "Tiles":
        """Chunks short enough that a small bucket still fills the device."""
        return cls(
            expand_tokens=256 if num_tokens >= 8192 else 128,
            chunk_tokens=min(1024, max(256, num_tokens // 8)),
        )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Everything static about a group's lists: what compiled and captured code relies on."""

    num_tokens: int
    in_features: int
    out_features: tuple[int, ...]
    max_segments: int
    max_rank: int
    dropout: bool = True
    tiles: Tiles = Tiles()

    @property
    def num_linears(self) -> int:
        return len(self.out_features)

    @property
    def s_width(self) -> int:
        """Columns of S: every linear's rank, rounded up to eight (16 bytes in half precision)."""
        return self.num_linears * _round_up(self.max_rank, 8)

    def _blocks(self, tokens: int) -> int:
        return self.num_tokens // tokens + self.max_segments

    @cached_property
    def capacity(self) -> dict[str, int]:
        """Rows of each list."""
        tiles, n = self.tiles, self.num_linears
        short = self._blocks(tiles.shrink_tokens)
        long = self._blocks(tiles.chunk_tokens)
        shrink_pieces = n * ceil(self.max_rank / tiles.shrink_rank)
        chunk_pieces = n * ceil(self.max_rank / tiles.chunk_rank)
        expand = self._blocks(tiles.expand_tokens) + self.max_segments + 1
        return {
            "shrink_x": short * shrink_pieces,
            "shrink_dy": short * shrink_pieces,
            "expand_y": expand * n,
            "expand_dx": expand,
            "pieces_y": self.max_segments * chunk_pieces,
            "pieces_dx": self.max_segments * chunk_pieces,
            "reduce_a": long * chunk_pieces,
            "reduce_b": long * chunk_pieces,
        }

    @cached_property
    def first_row(self) -> dict[str, int]:
        """Where each list begins; row 0 holds their lengths."""
        rows, first = {}, 1
        for name in LISTS:
            rows[name] = first
            first += self.capacity[name]
        return rows

    @property
    def num_rows(self) -> int:
        return 1 + sum(self.capacity.values())

    @property
    def num_counters(self) -> int:
        """For a shrink's blocks; for a reduce's jobs, pieces and tiles (of 32 features or more)."""
        features = max(self.in_features, *self.out_features)
        reduce = max(self.capacity["reduce_a"], self.capacity["reduce_b"]) * ceil(features / 32)
        return max(self.capacity["shrink_x"], self.capacity["shrink_dy"], reduce)

    @property
    def partial_rows(self) -> int:
        """Rank rows of partial sums that any nano-batch may need."""
        return self._blocks(self.tiles.chunk_tokens) * self.num_linears * self.max_rank


@dataclass(frozen=True)
class Blocks:
    """A layout and its tensors on the device. Kernels that share one must run one after another."""

    layout: Layout
    table: torch.Tensor
    """The lists, which `copy` fills for each nano-batch."""
    finished: torch.Tensor
    """Counters of finished partial sums: zero before and after every launch."""

    @classmethod
    def new(cls, layout: Layout, device: torch.device | str) -> "Blocks":
        return cls(
            layout,
            table=torch.zeros(layout.num_rows, COLUMNS, dtype=torch.int32, device=device),
            finished=torch.zeros(layout.num_counters, dtype=torch.int32, device=device),
        )

    def copy(self, segments: list[Segment]) -> None:
        table = build_table(self.layout, segments)
        if self.table.is_cuda:
            # From pinned memory the host need not wait for what is running.
            table = table.pin_memory()
        self.table.copy_(table, non_blocking=True)


@dataclass(frozen=True)
class _Piece:
    """Some rank rows of one adapter. Without dropout a piece may span linears side by side."""

    linear: int
    row: int
    col: int
    rank: int


def build_table(layout: Layout, segments: list[Segment]) -> torch.Tensor:
    """All lists for these segments: int32 [rows, COLUMNS] in host memory."""
    _check(layout, segments)
    table = torch.zeros(layout.num_rows, COLUMNS, dtype=torch.int32)
    lists = _lists(layout, [s for s in segments if s.stop > s.start])
    for i, name in enumerate(LISTS):
        rows = lists[name]
        assert len(rows) <= layout.capacity[name], f"{name}: {len(rows)} rows"
        table[0, i] = len(rows)
        if rows:
            first = layout.first_row[name]
            table[first : first + len(rows)] = torch.tensor(rows, dtype=torch.int32)
    return table


def _check(layout: Layout, segments: list[Segment]) -> None:
    if len(segments) > layout.max_segments:
        raise ValueError(f"{len(segments)} segments in a layout for {layout.max_segments}")
    stop = 0
    for segment in segments:
        if segment.start < stop or segment.stop > layout.num_tokens:
            raise ValueError(f"segment [{segment.start}, {segment.stop}) overlaps or lies outside")
        if max(segment.ranks, default=0) > layout.max_rank:
            raise ValueError(f"ranks {segment.ranks} in a layout for {layout.max_rank}")
        if segment.threshold and not layout.dropout:
            raise ValueError("a segment with dropout in a layout without")
        stop = max(stop, segment.stop)


def _lists(layout: Layout, segments: list[Segment]) -> dict[str, list[list[int]]]:
    tiles = layout.tiles
    lists: dict[str, list[list[int]]] = {name: [] for name in LISTS}
    for segment in segments:
        stacked = list(_pieces(segment, tiles.shrink_rank, stacked=True))
        apart = list(_pieces(segment, tiles.shrink_rank, stacked=False, side="b"))
        for start, count in _split(segment, tiles.shrink_tokens):
            lists["shrink_x"] += [_row(segment, start, count, piece) for piece in stacked]
            lists["shrink_dy"] += [_row(segment, start, count, piece) for piece in apart]
        _expand(layout, lists, segment)
    for start, stop in _gaps(layout, segments):
        gap = Segment(start, stop, 0, (0,) * layout.num_linears, (0,) * layout.num_linears, 0.0)
        _expand(layout, lists, gap)
    lists["reduce_a"] = _reduce(tiles, segments, stacked=True)
    lists["reduce_b"] = _reduce(tiles, segments, stacked=False)
    for name in ("expand_y", "expand_dx", "reduce_a", "reduce_b"):
        lists[name].sort(key=lambda row: -row[COUNT])  # long ones first: a shorter tail
    return lists


def _expand(layout: Layout, lists: dict[str, list[list[int]]], segment: Segment) -> None:
    tiles = layout.tiles
    cases = [("dx", 0, list(_pieces(segment, tiles.chunk_rank, stacked=True)))]
    apart = list(_pieces(segment, tiles.chunk_rank, stacked=False, side="b"))
    for linear in range(layout.num_linears):
        cases.append(("y", linear, [piece for piece in apart if piece.linear == linear]))
    for name, linear, pieces in cases:
        first = len(lists[f"pieces_{name}"])
        lists[f"pieces_{name}"] += [_row(segment, 0, 0, piece) for piece in pieces]
        for start, count in _split(segment, tiles.expand_tokens):
            row = [0] * COLUMNS
            row[START], row[COUNT], row[LINEAR] = start, count, linear
            row[RANK] = max((piece.rank for piece in pieces), default=0)
            row[FIRST], row[SIZE] = layout.first_row[f"pieces_{name}"] + first, len(pieces)
            lists[f"expand_{name}"].append(row)


def _reduce(tiles: Tiles, segments: list[Segment], *, stacked: bool) -> list[list[int]]:
    side = "a" if stacked else "b"
    rows: list[list[int]] = []
    groups: dict[tuple[int, int], list[list[int]]] = {}
    for segment in segments:
        pieces = list(_pieces(segment, tiles.chunk_rank, stacked=stacked, side=side))
        for start, count in _split(segment, tiles.chunk_tokens):
            for piece in pieces:
                rows.append(_row(segment, start, count, piece))
                # Rows of A differ between linears, rows of B may not: they are in separate pools.
                key = (0 if stacked else piece.linear, piece.row)
                groups.setdefault(key, []).append(rows[-1])
    first = 0
    for i, members in enumerate(groups.values()):
        for index, row in enumerate(members):
            row[FIRST], row[SIZE], row[INDEX], row[GROUP] = first, len(members), index, i
        if len(members) > 1:
            first += len(members) * members[0][RANK]
    return rows


def _pieces(segment: Segment, cap: int, *, stacked: bool, side: str = "a") -> Iterator[_Piece]:
    """Rank rows in pieces of at most `cap`; S columns of a linear begin at multiples of eight."""
    rows, cols, row, col = [], [], segment.a_row, 0
    for rank in segment.ranks:
        rows.append(row)
        cols.append(col)
        row, col = row + rank, col + _round_up(rank, 8)
    if side == "b":
        rows = list(segment.b_rows)
    parts = list(zip(range(len(rows)), rows, cols, segment.ranks, strict=True))
    if stacked and not segment.threshold and all(rank % 8 == 0 for rank in segment.ranks):
        parts = [(0, segment.a_row, 0, segment.width)]
    for linear, row, col, rank in parts:
        for first in range(0, rank, cap):
            yield _Piece(linear, row + first, col + first, min(cap, rank - first))


def _row(segment: Segment, start: int, count: int, piece: _Piece) -> list[int]:
    row = [0] * COLUMNS
    row[START], row[COUNT] = start, count
    row[LINEAR], row[W_ROW], row[COL], row[RANK] = piece.linear, piece.row, piece.col, piece.rank
    row[THRESHOLD], row[KEY] = _signed(segment.threshold), _signed(segment.key)
    row[SCALE] = _float_bits(segment.scale)
    row[KEEP] = _float_bits(1.0 / (1.0 - segment.threshold / 2**32))
    return row


def _split(segment: Segment, tokens: int) -> list[tuple[int, int]]:
    """(start, count) of the segment's blocks, counted from its own start."""
    return [(t, min(tokens, segment.stop - t)) for t in range(segment.start, segment.stop, tokens)]


def _gaps(layout: Layout, segments: list[Segment]) -> list[tuple[int, int]]:
    """Tokens of no job, which the expand still has to write."""
    edges = [0, *(edge for s in segments for edge in (s.start, s.stop)), layout.num_tokens]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def _float_bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]
