"""The work lists of the GPU kernels: which program does what, decided on the host per nano-batch.

A kernel's program reads one row of a list and needs nothing else: its tokens, its rank rows, its
columns of S, its dropout stream. Linears, ranks beyond a tile and segments of any length are all
just more rows, so the number of launches never depends on the adapters. The lists of all kernels
lie in one int32 table of fixed size: one copy to the device, the same shapes for compiled code and
captured graphs whatever jobs are attached.

Nothing in a job's rows depends on its neighbours: token blocks are counted from the segment's
start, partial sums are added in the order of the job's own tokens.
"""

import functools
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple

import numpy as np
import torch

from tlora.kernels.multi_lora import pages, settings
from tlora.kernels.multi_lora.pages import Pages, Way, Ways
from tlora.kernels.multi_lora.tables import Segment, float_bits, round_up, s_columns

COLUMNS = 16
_NO_ROWS = np.zeros((0, COLUMNS), dtype=np.int32)
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
    # `expand`: first piece, and how many; `reduce`: first row of the job's partial sums, and how
    # many of them (1: none needed); pieces of Y: first column of B turned, and how many
    FIRST,
    SIZE,
    INDEX,  # `reduce`: place of this row among them
    GROUP,  # `reduce`: which job and piece, for the counter of finished partial sums
    ZERO,  # `reduce`: 1 if the gradient is known to be zero and need not be read
) = range(15)

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

ENDS = {"expand_y": len(LISTS), "reduce_b": len(LISTS) + 2}
"""Lists whose linears may differ in width: where row 0 says how many rows the first linear has, and
how many the first two have. Where they do differ, rows of a linear follow each other, so that a
kernel can count items without those that a narrow linear does not have."""

GRADIENT_TOKENS = 5
"""As many tokens as a rank row of a gradient costs: 2 bytes a feature, and 2 of B and 8 of it."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes that decide the lists. They may depend on the nano-batch's bucket, not on its jobs."""

    shrink_tokens: int = 128
    """Tokens of a block of S = X A^T."""

    shrink_rank: int = settings.SHRINK_RANK
    """Rank rows of a block of S; wider adapters read their input again."""

    expand_tokens: int = 256
    """Tokens that one program of the expand walks."""

    chunk_tokens: int = 1024
    """Tokens that one program of the gradients of A and B walks; more of them mean partial sums."""

    chunk_rank: int = settings.CHUNK_RANK
    """Rank rows held by a program that walks tokens."""

    stack_rank: int = settings.STACK_RANK
    """The same for the gradient of A, whose linears are one problem: beyond it X is read again."""

    @classmethod
    def for_tokens(cls, num_tokens: int, *, dropout: bool = False) -> "Tiles":
        """What settings.py says."""
        return cls(
            shrink_tokens=settings.shrink_tokens(dropout),
            expand_tokens=settings.expand_tokens(num_tokens),
            chunk_tokens=settings.chunk_tokens(num_tokens),
            stack_rank=settings.STACK_RANK,
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
    inside: Ways = ()
    """Which of the group's products may take the update in their own loop."""

    tiles: Tiles = Tiles()

    @property
    def num_linears(self) -> int:
        return len(self.out_features)

    @property
    def s_width(self) -> int:
        """Columns of S: every linear's rank, rounded up to eight (16 bytes in half precision)."""
        return self.num_linears * round_up(self.max_rank, 8)

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
            "reduce_a": long * n * ceil(self.max_rank / tiles.stack_rank),
            "reduce_b": long * chunk_pieces,
        }

    def most_rank(self, name: str) -> int:
        """Rank rows of the widest row that a list may have."""
        tiles = self.tiles
        caps = {"reduce_a": tiles.stack_rank}
        caps |= dict.fromkeys(("shrink_x", "shrink_dy"), tiles.shrink_rank)
        is_stacked = name in ("shrink_x", "expand_dx", "reduce_a")
        return min(caps.get(name, tiles.chunk_rank), self.s_width if is_stacked else self.max_rank)

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
        """Of the lists, and of the pages behind them."""
        ints = pages.num_ints(self.num_tokens, self.page_lists)
        return self._list_rows + -(-ints // COLUMNS)

    @property
    def _list_rows(self) -> int:
        return 1 + sum(self.capacity.values())

    @property
    def page_lists(self) -> int:
        return pages.num_lists(self.num_linears, self.inside)

    def lists_of(self, way: Way) -> range:
        """Its lists of pages: one of each linear, or one of all."""
        first = pages.first_list(self.num_linears, self.inside, way)
        return range(first, first + (self.num_linears if way == "forward" else 1))

    @property
    def turned_columns(self) -> int:
        return pages.turned_columns(self.max_segments, self.max_rank)

    def first_head(self, number: int) -> int:
        """Where the heads of a list of pages begin in the table, in numbers."""
        blocks = pages.num_blocks(self.num_tokens)
        return self._list_rows * COLUMNS + number * blocks * pages.HEAD

    def first_page(self, number: int) -> int:
        """Where its pages themselves do: those of all lists follow the heads of all."""
        pages_of = pages.num_blocks(self.num_tokens) * pages.SLOTS * pages.PAGE_COLUMNS
        return self.first_head(self.page_lists) + number * pages_of

    @property
    def num_counters(self) -> int:
        """For a shrink's blocks, or a reduce's jobs, pieces and tiles (of 32 features or more)."""
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

    def copy(self, segments: list[Segment], found: Pages | None = None) -> None:
        """`found`: the pages of these segments, where somebody knows them."""
        table = build_table(self.layout, segments, found)
        if self.table.is_cuda:
            # From pinned memory the host need not wait for what is running.
            table = table.pin_memory()
        self.table.copy_(table, non_blocking=True)


def build_table(
    layout: Layout, segments: list[Segment], found: Pages | None = None
) -> torch.Tensor:
    """All lists for these segments: int32 [rows, COLUMNS] in host memory."""
    _check(layout, segments)
    table = np.zeros((layout.num_rows, COLUMNS), dtype=np.int32)
    lists = _lists(layout, [s for s in segments if s.stop > s.start])
    for i, name in enumerate(LISTS):
        rows = lists[name]
        assert len(rows) <= layout.capacity[name], f"{name}: {len(rows)} rows"
        table[0, i] = len(rows)
        first = layout.first_row[name]
        table[first : first + len(rows)] = rows
        if name in ENDS:
            rows_of = np.bincount(rows[:, LINEAR], minlength=2)
            table[0, ENDS[name] : ENDS[name] + 2] = np.cumsum(rows_of)[:2]
    if layout.inside:
        found = found or pages.find(segments, layout.num_tokens, layout.inside)
        assert found.fit, "more pages in a block than a table holds"
        ints = pages.table(found, layout.num_tokens, layout.page_lists)
        table.reshape(-1)[layout.first_head(0) :][: len(ints)] = ints
    return torch.from_numpy(table)


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


class _Spans(NamedTuple):
    """Tokens of segments: int64 [segments] each."""

    starts: np.ndarray
    stops: np.ndarray


class _Pieces(NamedTuple):
    """Rows of a list, but for their tokens: those of the first segment, then of the next."""

    rows: np.ndarray
    counts: np.ndarray
    """int64 [segments]."""

    @property
    def owners(self) -> np.ndarray:
        """Of each row, its segment."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


def _lists(layout: Layout, segments: list[Segment]) -> dict[str, np.ndarray]:
    """Of all segments at once: with many jobs, some calls for each take longer than a launch."""
    tiles, spans = layout.tiles, _spans([(each.start, each.stop) for each in segments])
    apart = _pieces(segments, tiles.chunk_rank, "b")
    lists = {
        "shrink_x": _blocks(spans, _pieces(segments, tiles.shrink_rank, "a"), tiles.shrink_tokens),
        "shrink_dy": _blocks(spans, _pieces(segments, tiles.shrink_rank, "b"), tiles.shrink_tokens),
        "reduce_a": _blocks(spans, _pieces(segments, tiles.stack_rank, "a"), tiles.chunk_tokens),
        "reduce_b": _blocks(spans, apart, tiles.chunk_tokens),
        "pieces_y": _turned(apart, segments) if "forward" in layout.inside else apart.rows,
        "pieces_dx": (stacked := _pieces(segments, tiles.chunk_rank, "a")).rows,
    }
    gaps = _spans(_gaps(layout, segments))
    every = _Spans(*(np.concatenate(each) for each in zip(spans, gaps, strict=True)))
    n = layout.num_linears
    linears = apart.owners * n + apart.rows[:, LINEAR]
    lists["expand_y"] = _expands(layout, "y", every, n, apart.rows, linears)
    lists["expand_dx"] = _expands(layout, "dx", every, 1, stacked.rows, stacked.owners)
    # Rows of A differ between linears, rows of B may not: they are in separate pools.
    _number_sums(lists["reduce_a"], lists["reduce_a"][:, W_ROW].astype(np.int64))
    of_linear = lists["reduce_b"][:, LINEAR].astype(np.int64) << 32
    _number_sums(lists["reduce_b"], of_linear + lists["reduce_b"][:, W_ROW])
    uneven = len(set(layout.out_features)) > 1
    lists["expand_y"] = _longest_first(lists["expand_y"], rank_tokens=1, by_linear=True)
    lists["expand_dx"] = _longest_first(lists["expand_dx"], rank_tokens=1)
    lists["reduce_a"] = _longest_first(lists["reduce_a"], rank_tokens=GRADIENT_TOKENS)
    # Of equal widths (gate, up), a chunk's linears side by side were 1 to 8 % faster.
    lists["reduce_b"] = _longest_first(
        lists["reduce_b"], rank_tokens=GRADIENT_TOKENS, by_linear=uneven
    )
    return lists


def _longest_first(rows: np.ndarray, *, rank_tokens: int, by_linear: bool = False) -> np.ndarray:
    """Programs take items in turn: so their shares differ by no more than one item of a linear, or
    of all. A rank row costs as much as `rank_tokens` tokens."""
    cost = rows[:, COUNT] + rank_tokens * rows[:, RANK]
    linears = rows[:, LINEAR] if by_linear else np.zeros_like(cost)
    return rows[np.lexsort((-cost, linears))]


def _expands(
    layout: Layout, name: str, spans: _Spans, each: int, pieces: np.ndarray, owners: np.ndarray
) -> np.ndarray:
    """For `each` linear of every segment, what is to be added up: those of the pieces that it
    owns, which follow each other."""
    count = each * len(spans.starts)
    sizes = np.bincount(owners, minlength=count)
    rows = np.zeros((count, COLUMNS), dtype=np.int32)
    rows[:, LINEAR] = np.arange(count) % each
    np.maximum.at(rows[:, RANK], owners, pieces[:, RANK])
    rows[:, FIRST] = layout.first_row[f"pieces_{name}"] + np.cumsum(sizes) - sizes
    rows[:, SIZE] = sizes
    repeated = _Spans(*(np.repeat(edges, each) for edges in spans))
    one = np.ones(count, dtype=np.int64)
    return _even_blocks(repeated, _Pieces(rows, one), layout.tiles.expand_tokens)


def _turned(pieces: _Pieces, segments: list[Segment]) -> np.ndarray:
    """With the columns of B turned that each of them has; the last of a linear has those of a page
    more, so that whoever reads a page reads numbers."""
    rows = pieces.rows.copy()
    if not segments:
        return rows
    owners, linears = pieces.owners, rows[:, LINEAR]
    first = np.array(pages.turned_at(segments))[owners, linears]
    begins = np.array([s_columns(each.ranks) for each in segments])[owners, linears]
    rows[:, FIRST] = first + rows[:, COL] - begins
    rows[:, SIZE] = -(-rows[:, RANK] // pages.TURNED) * pages.TURNED
    _, last = np.unique(linears[::-1], return_index=True)
    rows[len(rows) - 1 - last, SIZE] += pages.PAGE
    return rows


def _number_sums(rows: np.ndarray, pieces: np.ndarray) -> None:
    """Which chunks add up to one gradient: those of one piece of one job, in their order."""
    _, firsts, inverse, sizes = np.unique(
        pieces, return_index=True, return_inverse=True, return_counts=True
    )
    # Groups are counted as they appear, not by their rows in the pool.
    appear = np.argsort(firsts, kind="stable")
    numbers = np.empty_like(appear)
    numbers[appear] = np.arange(len(appear))
    group, sizes = numbers[inverse], sizes[appear]
    together = np.argsort(group, kind="stable")
    starts = np.cumsum(sizes) - sizes
    index = np.empty_like(group)
    index[together] = np.arange(len(group)) - np.repeat(starts, sizes)
    spans = np.where(sizes > 1, sizes * rows[firsts[appear], RANK], 0)
    rows[:, FIRST] = (np.cumsum(spans) - spans)[group]
    rows[:, SIZE], rows[:, INDEX], rows[:, GROUP] = sizes[group], index, group


def _pieces(segments: list[Segment], cap: int, side: str) -> _Pieces:
    """Rank rows in pieces of at most `cap`."""
    found = [
        _pieces_of(each.a_row, each.ranks, each.b_rows, each.scale, each.threshold, cap, side)
        for each in segments
    ]
    counts = np.array([len(rows) for rows in found], dtype=np.int64)
    rows = np.concatenate([_NO_ROWS, *found])
    keys = np.array([_signed(each.key) for each in segments], dtype=np.int32)
    rows[:, KEY] = np.repeat(keys, counts)
    rows[:, ZERO] = np.repeat(np.array([each.zero_grad for each in segments], np.int32), counts)
    return _Pieces(rows, counts)


@functools.lru_cache(maxsize=4096)
def _pieces_of(
    a_row: int,
    ranks: tuple[int, ...],
    b_rows: tuple[int, ...],
    scale: float,
    threshold: int,
    cap: int,
    side: str,
) -> np.ndarray:
    """But for the key, which changes with every step.

    S columns of a linear begin at multiples of eight. Rows of A lie side by side: without dropout a
    piece of them may span linears.
    """
    a_rows = np.cumsum([a_row, *ranks])[:-1].tolist()
    cols = s_columns(ranks)
    first_rows = a_rows if side == "a" else b_rows
    parts = list(zip(range(len(ranks)), first_rows, cols, ranks, strict=True))
    if side == "a" and not threshold and all(rank % 8 == 0 for rank in ranks):
        parts = [(0, a_row, 0, sum(ranks))]
    rows: list[list[int]] = []
    for linear, row, col, rank in parts:
        for first in range(0, rank, cap):
            values = [0] * COLUMNS
            values[LINEAR], values[W_ROW], values[COL] = linear, row + first, col + first
            values[RANK] = min(cap, rank - first)
            values[THRESHOLD], values[SCALE] = _signed(threshold), float_bits(scale)
            values[KEEP] = float_bits(1.0 / (1.0 - threshold / 2**32))
            rows.append(values)
    return np.array(rows, dtype=np.int32).reshape(-1, COLUMNS)


def _even_blocks(spans: _Spans, pieces: _Pieces, tokens: int) -> np.ndarray:
    """The same in blocks of about so many tokens and of even length: no rest of a few tokens loads
    a tile of the pool for itself. For kernels whose rows of tokens do not meet."""
    lengths = spans.stops - spans.starts
    # A rest is shared by the others as soon as it would be less than three quarters of a block.
    number = np.maximum(1, (lengths + tokens // 4) // tokens)
    return _blocks(spans, pieces, -(-lengths // number))


def _blocks(spans: _Spans, pieces: _Pieces, tokens: int | np.ndarray) -> np.ndarray:
    """Every piece for every block of tokens, counted from the segment's own start. `tokens`: of
    every segment, or of each."""
    tokens = np.broadcast_to(np.maximum(1, tokens), spans.starts.shape)
    blocks = -(-(spans.stops - spans.starts) // tokens)
    sizes = blocks * pieces.counts
    owner = np.repeat(np.arange(len(sizes)), sizes)
    # Of each row: its place among those of its segment, and from that its block and piece.
    place = np.arange(len(owner)) - (np.cumsum(sizes) - sizes)[owner]
    block, piece = np.divmod(place, pieces.counts[owner])
    rows = pieces.rows[(np.cumsum(pieces.counts) - pieces.counts)[owner] + piece]
    starts = spans.starts[owner] + block * tokens[owner]
    rows[:, START] = starts
    rows[:, COUNT] = np.minimum(tokens[owner], spans.stops[owner] - starts)
    return rows


def _spans(edges: list[tuple[int, int]]) -> _Spans:
    return _Spans(*np.array(edges, dtype=np.int64).reshape(-1, 2).T)


def _gaps(layout: Layout, segments: list[Segment]) -> list[tuple[int, int]]:
    """Tokens of no job, which the expand still has to write."""
    edges = [0, *(edge for s in segments for edge in (s.start, s.stop)), layout.num_tokens]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def _signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value
