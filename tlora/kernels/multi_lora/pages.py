"""Which rank rows the tokens of each block need, for products that take the adapters' update in
their own loop (triton_product.py).

A tile of such a product has BLOCK tokens. Behind its own steps it takes one of PAGE rank rows for
each adapter that has tokens there, or for each PAGE rows of one. Their S lies in slots of PAGE
columns, side by side: what else a page holds meets zeros there. Nothing of a job depends on which
slot it has.

Forward every linear has a list of its own, and its pages are columns of B turned: rank rows of the
jobs that have tokens, one job behind the other. dX of all linears of a group is one product with
one list, whose pages are rows of A in the pool. The table of a nano-batch is int32, for every list:

    [blocks, HEAD]      how many pages a block has, nothing, where their rows begin (16 bits each)
    [blocks, SLOTS, 8]  the pages themselves: the columns below

all heads first, then all pages; lists of Y before that of dX.
"""

from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from tlora.kernels.multi_lora.tables import Segment, float_bits, round_up, s_columns

Way = Literal["forward", "backward"]
"""Which products of a group take the update: those of Y = X W^T, or that of dX = dY W."""

Ways = tuple[Way, ...]

BLOCK = 128
"""Tokens of a tile."""

PAGE = 64
"""Rank rows, and features of X or dY, that one step takes."""

SLOTS = 32
"""Pages that a block may have: ten jobs of rank 64 on q, k and v, or 32 small ones."""

HEAD = 2 + SLOTS // 2
MOST_ROWS = 1 << 16
"""Of A in the pool, or columns of B turned: where a page begins is a number of 16 bits."""

PAGE_COLUMNS = 8
(
    START,  # tokens from
    STOP,  # and to
    COL,  # first column of S
    RANK,  # rank rows
    SCALE,  # float bits
    SECOND,  # column of S where the second linear begins
    THIRD,  # and the third
) = range(7)

NEVER = 1 << 30
"""A column that no S has: there are no such linears."""

TURNED = 16
"""A job's columns of B turned begin at multiples of it, a sector of memory."""


class Pages(NamedTuple):
    """Every page of every block: int64 [pages] each."""

    number: np.ndarray
    """Of its list."""

    block: np.ndarray
    slot: np.ndarray
    """Pages of a block are counted in the order of its tokens."""

    first_row: np.ndarray
    values: np.ndarray
    """[pages, PAGE_COLUMNS]."""

    @property
    def fit(self) -> bool:
        """Whether a table can hold them."""
        few = self.slot.max(initial=0) < SLOTS
        return bool(few and self.first_row.max(initial=0) < MOST_ROWS)


def num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


def num_lists(num_linears: int, ways: Ways) -> int:
    return first_list(num_linears, ways, "backward") + ("backward" in ways)


def first_list(num_linears: int, ways: Ways, way: Way) -> int:
    return num_linears if way == "backward" and "forward" in ways else 0


def num_ints(num_tokens: int, lists: int) -> int:
    return lists * num_blocks(num_tokens) * (HEAD + PAGE_COLUMNS * SLOTS)


def turned_columns(max_segments: int, max_rank: int) -> int:
    """Of B turned, with room for the last page."""
    return max_segments * round_up(max_rank, TURNED) + PAGE


def turned_at(segments: list[Segment]) -> list[tuple[int, ...]]:
    """Of each segment, for each linear: where its rank rows begin in B turned."""
    widths = zip(
        *([round_up(rank, TURNED) for rank in each.ranks] for each in segments), strict=True
    )
    starts = [list(accumulate(of_linear, initial=0))[:-1] for of_linear in widths]
    return list(zip(*starts, strict=True))


def find(segments: list[Segment], num_tokens: int, ways: Ways) -> Pages:
    present = [each for each in segments if each.start < each.stop]
    runs = _runs_forward(present) if "forward" in ways else []
    if "backward" in ways and present:
        runs += _runs_backward(present, first_list(len(present[0].ranks), ways, "backward"))
    pieces = np.array([piece for run in runs for piece in _pieces(run)], dtype=np.int64)
    pieces = pieces.reshape(-1, 2 + PAGE_COLUMNS)
    number, row, values = pieces[:, 0], pieces[:, 1], pieces[:, 2:]
    first, last = values[:, START] // BLOCK, (values[:, STOP] - 1) // BLOCK
    counts = last - first + 1
    owner = np.repeat(np.arange(len(pieces)), counts)
    block = first[owner] + np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
    # Of those of the same list and block, how many came before.
    key = number[owner] * num_blocks(num_tokens) + block
    together = np.argsort(key, kind="stable")
    _, firsts, sizes = np.unique(key[together], return_index=True, return_counts=True)
    slot = np.empty_like(key)
    slot[together] = np.arange(len(key)) - np.repeat(firsts, sizes)
    return Pages(number[owner], block, slot, row[owner], values[owner])


def table(pages: Pages, num_tokens: int, lists: int) -> np.ndarray:
    """int32 [num_ints]."""
    blocks = num_blocks(num_tokens)
    heads = np.zeros((lists, blocks, HEAD), dtype=np.int32)
    rows = heads.view(np.uint16)[:, :, 4:]
    places = np.zeros((lists, blocks, SLOTS, PAGE_COLUMNS), dtype=np.int32)
    np.add.at(heads[:, :, 0], (pages.number, pages.block), 1)
    rows[pages.number, pages.block, pages.slot] = pages.first_row
    places[pages.number, pages.block, pages.slot] = pages.values
    return np.concatenate([heads.ravel(), places.ravel()])


class _Run(NamedTuple):
    """Rank rows that lie side by side, as their columns of S do."""

    segment: Segment
    number: int
    """Of their list."""

    row: int
    col: int
    rank: int


def _runs_forward(segments: list[Segment]) -> list[_Run]:
    return [
        _Run(each, linear, row, col, rank)
        for each, rows in zip(segments, turned_at(segments), strict=True)
        for linear, (row, col, rank) in enumerate(
            zip(rows, s_columns(each.ranks), each.ranks, strict=True)
        )
    ]


def _runs_backward(segments: list[Segment], number: int) -> list[_Run]:
    """As in the other lists: rows of A lie side by side, S columns of a linear begin at multiples
    of eight."""
    runs = []
    for each in segments:
        if all(rank % 8 == 0 for rank in each.ranks):
            runs.append(_Run(each, number, each.a_row, 0, sum(each.ranks)))
            continue
        rows = accumulate(each.ranks, initial=each.a_row)
        for row, col, rank in zip(rows, s_columns(each.ranks), each.ranks, strict=False):
            runs.append(_Run(each, number, row, col, rank))
    return runs


def _pieces(run: _Run) -> list[tuple[int, ...]]:
    """List, first rank row, and a page's columns."""
    segment, scale = run.segment, float_bits(run.segment.scale)
    second, third = [*s_columns(segment.ranks)[1:], NEVER, NEVER][:2]
    return [
        (
            run.number, run.row + i, segment.start, segment.stop, run.col + i,
            min(PAGE, run.rank - i), scale, second, third, 0,
        )
        for i in range(0, run.rank, PAGE)
    ]  # fmt: skip
