"""Which rank rows the tokens of each block need, for products that take the adapters' update in
their own loop (triton_product.py).

A tile of such a product has BLOCK tokens. Behind its own steps it takes one of PAGE rank rows for
each adapter that has tokens there, or for each PAGE rows of one. Their S lies in slots of PAGE
columns, side by side: what else a page holds meets zeros there. Nothing of a job depends on which
slot it has.

Forward every linear has a list of its own; dX of all linears of a group is one product, with one.
The table of a nano-batch is int32, for every list:

    [blocks, HEAD]      how many pages a block has, nothing, where their rows begin (16 bits each)
    [blocks, SLOTS, 4]  of each page: its tokens, from and to, its columns of S, its rank rows

all heads first, then all pages.
"""

from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from tlora.kernels.multi_lora.tables import Segment

Way = Literal["forward", "backward"]
"""Which products of a group take the update: those of Y = X W^T, or that of dX = dY W."""

BLOCK = 128
"""Tokens of a tile."""

PAGE = 64
"""Rank rows, and features of X or dY, that one step takes."""

SLOTS = 32
"""Pages that a block may have: ten jobs of rank 64 on q, k and v, or 32 small ones."""

HEAD = 2 + SLOTS // 2
MOST_ROWS = 1 << 16
"""Of a pool: where a page begins is a number of 16 bits."""


class Pages(NamedTuple):
    """Every page of every block: int64 [pages] each."""

    number: np.ndarray
    """Of its list."""

    block: np.ndarray
    slot: np.ndarray
    """Pages of a block are counted in the order of its tokens."""

    first_row: np.ndarray
    values: np.ndarray
    """[pages, 4]: from, to, column, rank rows."""

    @property
    def fit(self) -> bool:
        """Whether a table can hold them."""
        few = self.slot.max(initial=0) < SLOTS
        return bool(few and self.first_row.max(initial=0) < MOST_ROWS)


def num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


def num_lists(num_linears: int, way: Way) -> int:
    return num_linears if way == "forward" else 1


def num_ints(num_tokens: int, lists: int) -> int:
    return lists * num_blocks(num_tokens) * (HEAD + 4 * SLOTS)


def find(segments: list[Segment], num_tokens: int, way: Way) -> Pages:
    """Forward needs rows of B, backward those of A."""
    pieces = np.array(
        [piece for each in segments if each.start < each.stop for piece in _pieces(each, way)],
        dtype=np.int64,
    ).reshape(-1, 6)
    number, row, start, stop = pieces[:, 0], pieces[:, 1], pieces[:, 2], pieces[:, 3]
    first, last = start // BLOCK, (stop - 1) // BLOCK
    counts = last - first + 1
    owner = np.repeat(np.arange(len(pieces)), counts)
    block = first[owner] + np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
    # Of those of the same list and block, how many came before.
    key = number[owner] * num_blocks(num_tokens) + block
    together = np.argsort(key, kind="stable")
    _, firsts, sizes = np.unique(key[together], return_index=True, return_counts=True)
    slot = np.empty_like(key)
    slot[together] = np.arange(len(key)) - np.repeat(firsts, sizes)
    return Pages(number[owner], block, slot, row[owner], pieces[owner, 2:])


def table(pages: Pages, num_tokens: int, lists: int) -> np.ndarray:
    """int32 [num_ints]."""
    blocks = num_blocks(num_tokens)
    heads = np.zeros((lists, blocks, HEAD), dtype=np.int32)
    rows = heads.view(np.uint16)[:, :, 4:]
    places = np.zeros((lists, blocks, SLOTS, 4), dtype=np.int32)
    np.add.at(heads[:, :, 0], (pages.number, pages.block), 1)
    rows[pages.number, pages.block, pages.slot] = pages.first_row
    places[pages.number, pages.block, pages.slot] = pages.values
    return np.concatenate([heads.ravel(), places.ravel()])


def _pieces(segment: Segment, way: Way) -> list[tuple[int, ...]]:
    """List, first rank row, tokens from and to, column of S, rank rows."""
    return [
        (number, row + i, segment.start, segment.stop, col + i, min(PAGE, rank - i))
        for number, row, col, rank in _runs(segment, way)
        for i in range(0, rank, PAGE)
    ]


def _runs(segment: Segment, way: Way) -> list[tuple[int, ...]]:
    """Rank rows that lie side by side, as their columns of S do: list, first row, first column,
    how many."""
    # As in the other lists: S columns of a linear begin at multiples of eight, rows of A lie side
    # by side.
    ranks = segment.ranks
    cols = list(accumulate((-(-rank // 8) * 8 for rank in ranks), initial=0))[:-1]
    if way == "forward":
        return list(zip(range(len(ranks)), segment.b_rows, cols, ranks, strict=True))
    if all(rank % 8 == 0 for rank in ranks):
        return [(0, segment.a_row, 0, sum(ranks))]
    rows = list(accumulate(ranks, initial=segment.a_row))[:-1]
    return [(0, *run) for run in zip(rows, cols, ranks, strict=True)]
