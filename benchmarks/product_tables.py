"""Which jobs have tokens in which block, for a product that takes the adapters' share
(`product_kernels.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from tlora.kernels.multi_lora.tables import Segment

BLOCK = 128
"""Tokens of a tile of the product."""
PAGE = 64
"""Rank rows that one step takes."""
SLOTS = 8
"""Jobs that a block may have."""
MOST_ROWS = 1 << 16
"""Of a pool: their numbers have 16 bits."""


@dataclass(frozen=True)
class Tables:
    pages: torch.Tensor
    """int64 [linears, 1 + 3 blocks]: the most jobs of any block; then of each block, how many it
    has, and the first rank row of each, four numbers of 16 bits in one."""

    spans: torch.Tensor
    """int32 [linears, blocks, SLOTS, 4]: the tokens of a job in a block, from and to, where its
    columns of S begin, its rank. Nobody: from zero to zero."""

    def to(self, device: torch.device | str) -> "Tables":
        return Tables(self.pages.to(device), self.spans.to(device))


def build(segments: Sequence[Segment], num_tokens: int, side: str) -> Tables:
    """Of the rank rows of A or B (`a`, `b`)."""
    blocks, linears = -(-num_tokens // BLOCK), len(segments[0].ranks)
    counts = np.zeros(blocks, dtype=np.uint64)
    packed = np.zeros((linears, blocks, 2), dtype=np.uint64)
    spans = np.zeros((linears, blocks, SLOTS, 4), dtype=np.int32)
    for each in segments:
        if each.start == each.stop:
            continue
        if max(each.ranks) > PAGE:
            raise ValueError(f"ranks above {PAGE} take more than a page")
        a_rows = accumulate(each.ranks[:-1], initial=each.a_row)
        first_rows = list(a_rows if side == "a" else each.b_rows)
        if max(first_rows) >= MOST_ROWS:
            raise ValueError(f"rank rows begin below {MOST_ROWS}, not at {max(first_rows)}")
        if side == "b" and any(row % 8 for row in first_rows):
            raise ValueError(f"columns of B begin at multiples of eight, not at {first_rows}")
        cols = accumulate((-(-rank // 8) * 8 for rank in each.ranks[:-1]), initial=0)
        places = list(zip(first_rows, cols, each.ranks, strict=True))
        for block in range(each.start // BLOCK, -(-each.stop // BLOCK)):
            slot = int(counts[block])
            if slot == SLOTS:
                raise ValueError(f"more than {SLOTS} jobs in a block of {BLOCK} tokens")
            counts[block] += np.uint64(1)
            for i, (first_row, col, rank) in enumerate(places):
                packed[i, block, slot // 4] |= np.uint64(first_row << slot % 4 * 16)
                spans[i, block, slot] = each.start, each.stop, col, rank
    most = np.full((linears, 1), counts.max(initial=0), dtype=np.uint64)
    repeated = np.broadcast_to(counts[None, :, None], (linears, blocks, 1))
    rows = np.concatenate([repeated, packed], 2).reshape(linears, -1)
    pages = np.concatenate([most, rows], 1).view(np.int64)
    return Tables(torch.from_numpy(pages), torch.from_numpy(spans))
