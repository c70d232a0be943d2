"""Frozen products that take the adapters' update in their own loop, for Hopper.

    Y_l = X W_l^T + S_l B_l     dX = dY_1 W_1 + dY_2 W_2 + dY_3 W_3 + dS A

Linears that share an input are one launch. Their dX is one product, one after the other in the same
loop; their Y have tiles of their own, those of the next linear beside the last of one. Behind the
steps of its inner dimension a tile takes one for each page of rank rows that its tokens need
(pages.py): only the tensors that a step reads differ, and a tensor descriptor is chosen like any
number. No other kernel writes Y or dX, and nothing reads them back.

Weights and rank rows of a product lie the same way, and the frozen weight lies as it was loaded:
dX has W_l of [depth, features] and A as it is in the pool, [rank rows, features]; Y has W of
[features, depth], and B turned (triton_pages.py).

Letters: M blocks of tokens, N tiles of features, K steps of the inner dimension; tiles: BM tokens,
BN features, STEP of the inner dimension.
"""

from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tlora.kernels.multi_lora import pages, settings
from tlora.kernels.multi_lora.blocks import Blocks
from tlora.kernels.multi_lora.settings import Tuning
from tlora.kernels.multi_lora.triton_forward import shrunk, three
from tlora.kernels.multi_lora.triton_pages import lay

HEAD = tl.constexpr(pages.HEAD)
SLOTS = tl.constexpr(pages.SLOTS)
NEVER = pages.NEVER

WAVE_BLOCKS = 16
"""Blocks of tokens whose tiles are computed side by side: with as many features they fill the
device, and share what they read."""


@triton.jit
def _tile(i_tile, num_m, num_n, end_0, end_1, wave, APART: tl.constexpr):
    """Its linear, where each has its own, its block of tokens, and which of the features."""
    first = i_tile // (wave * num_n) * wave
    i_inside = i_tile % (wave * num_n)
    blocks = tl.minimum(wave, num_m - first)
    i_m, i_n = first + i_inside % blocks, i_inside // blocks
    i_l = i_n * 0
    if APART:
        i_l = (i_n >= end_0).to(tl.int32) + (i_n >= end_1).to(tl.int32)
        i_n -= tl.where(i_l == 0, 0, tl.where(i_l == 1, end_0, end_1))
    return i_l, i_m, i_n


@triton.jit(
    do_not_specialize=[
        "first_head",
        "num_m",
        "num_n",
        "end_0",
        "end_1",
        "num_k",
        "wave",
    ]
)
def product_kernel(
    x0_desc, x1_desc, x2_desc, s_desc, w0_desc, w1_desc, w2_desc,
    rows0_desc, rows1_desc, rows2_desc, y0_desc, y1_desc, y2_desc,
    p_table, first_head, num_m, num_n, end_0, end_1, num_k, wave,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, MOST: tl.constexpr,
    NUM: tl.constexpr, APART: tl.constexpr, UPDATE: tl.constexpr, BY_FEATURE: tl.constexpr,
):  # fmt: skip
    """y0 [tokens, features] = the sum of NUM products x w + the steps of each tile's own pages, or,
    APART, a y of each. end_0, end_1: steps of the first product, and of the first two; APART, their
    tiles of features. MOST: tiles of a program, or more. BY_FEATURE: w and rows lie as [features,
    depth]."""
    p_heads = p_table + first_head
    num_tiles, programs = num_m * num_n, tl.num_programs(0)
    o_tile = tl.program_id(0) + tl.arange(0, MOST) * programs
    m_tile = o_tile < num_tiles
    b_steps = tl.where(m_tile, num_k, 0)
    if UPDATE:
        o_l, o_m, _ = _tile(tl.minimum(o_tile, num_tiles - 1), num_m, num_n, end_0, end_1, wave,
                            APART)  # fmt: skip
        b_steps += tl.load(p_heads + (o_l * num_m + o_m) * HEAD, mask=m_tile, other=0)  # [MOST]
    # One loop over all steps of all tiles: loads of the next tile are on their way while this one
    # is stored. Triton makes one of two loops itself only where all tiles have as many steps.
    i_tile = tl.program_id(0) - programs
    i_k, last, i_l, i_m, i_n = -1, -1, 0, 0, 0
    # Where the rows of its pages begin, four numbers in one.
    rows_0, rows_1 = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    rows_2, rows_3 = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    rows_4, rows_5 = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    rows_6, rows_7 = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    b_y = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(tl.sum(b_steps)):
        i_k = tl.where(i_k == last, 0, i_k + 1)
        if i_k == 0:
            i_tile += programs
            i_l, i_m, i_n = _tile(i_tile, num_m, num_n, end_0, end_1, wave, APART)
            last = num_k - 1
            if UPDATE:
                p_head = p_heads + (i_l * num_m + i_m) * HEAD
                last += tl.load(p_head)
                p_rows = (p_head + 2).to(tl.pointer_type(tl.int64))
                rows_0, rows_1 = tl.load(p_rows), tl.load(p_rows + 1)
                rows_2, rows_3 = tl.load(p_rows + 2), tl.load(p_rows + 3)
                rows_4, rows_5 = tl.load(p_rows + 4), tl.load(p_rows + 5)
                rows_6, rows_7 = tl.load(p_rows + 6), tl.load(p_rows + 7)
        x, w, rows_desc, y_desc, begun = x0_desc, w0_desc, rows0_desc, y0_desc, 0
        if NUM > 1:
            if APART:
                if i_l >= 1:
                    w, rows_desc, y_desc = w1_desc, rows1_desc, y1_desc
            elif i_k >= end_0:
                x, w, begun = x1_desc, w1_desc, end_0
        if NUM > 2:
            if APART:
                if i_l >= 2:
                    w, rows_desc, y_desc = w2_desc, rows2_desc, y2_desc
            elif i_k >= end_1:
                x, w, begun = x2_desc, w2_desc, end_1
        at_x = (i_k - begun) * STEP
        at_w = at_x
        if UPDATE:
            i_page = i_k - num_k
            if i_page >= 0:
                x, w = s_desc, rows_desc
            first_8 = tl.where(i_page < 4, rows_0, rows_1)
            first_16 = tl.where(i_page < 8, first_8, tl.where(i_page < 12, rows_2, rows_3))
            last_8 = tl.where(i_page < 28, rows_6, rows_7)
            last_16 = tl.where(i_page < 24, tl.where(i_page < 20, rows_4, rows_5), last_8)
            rows = tl.where(i_page < 16, first_16, last_16)
            rows >>= (i_page & 3) * 16
            at_x = tl.where(i_page < 0, at_x, (i_l * SLOTS + i_page) * STEP)
            at_w = tl.where(i_page < 0, at_w, (rows & 0xFFFF).to(tl.int32))
        b_x = x.load([i_m * BM, at_x])  # [BM, STEP]
        # [STEP, BN]
        b_w = w.load([i_n * BN, at_w]).T if BY_FEATURE else w.load([at_w, i_n * BN])
        b_y = tl.dot(b_x, b_w, b_y)
        if i_k == last:
            y_desc.store([i_m * BM, i_n * BN], b_y.to(y_desc.dtype))
            b_y = tl.zeros((BM, BN), dtype=tl.float32)


class Update(NamedTuple):
    """What products take besides their own inner dimension."""

    slots: torch.Tensor
    """S, as triton_pages.py lays it."""

    rows: list[torch.Tensor]
    """A in the pool, [rank rows, features], or B of each linear turned, [features, columns]."""

    blocks: Blocks
    way: pages.Way

    @property
    def first_head(self) -> int:
        layout = self.blocks.layout
        return layout.first_head(layout.lists_of(self.way)[0])


def product(
    ys: list[torch.Tensor],
    xs: list[torch.Tensor],
    ws: list[torch.Tensor],
    *,
    by_feature: bool = False,
    update: Update | None = None,
    tuning: Tuning | None = None,
) -> Any:
    """The one y = the sum of x w for up to three w of [depth, features], or, `by_feature`, of
    [features, depth]; of several y each has a w, and all the one x. And what the adapters add.
    Gives what was launched."""
    tuning = tuning or settings.PRODUCT
    block, page, features = tuning.tokens, pages.PAGE, tuning.features
    apart = len(ys) > 1
    assert block == pages.BLOCK, "tables have blocks of that size"
    assert (len(ys), len(xs)) == ((len(ws), 1) if apart else (1, len(ws)))
    assert update is None or by_feature == (update.way == "forward"), "rows lie as weights do"
    tile = [features, page] if by_feature else [page, features]
    x_descs = [TensorDescriptor.from_tensor(x, [block, page]) for x in xs]
    w_descs = [TensorDescriptor.from_tensor(w, tile) for w in ws]
    y_descs = [TensorDescriptor.from_tensor(y, [block, features]) for y in ys]
    s_desc, rows_descs, table, first_head = x_descs[0], w_descs[:1], ys[0], 0
    if update:
        s_desc = TensorDescriptor.from_tensor(update.slots, [block, page])
        rows_descs = [TensorDescriptor.from_tensor(rows, tile) for rows in update.rows]
        table, first_head = update.blocks.table, update.first_head
    depths = list(accumulate(-(-x.shape[1] // page) for x in xs))
    tiles = list(accumulate(-(-y.shape[1] // features) for y in ys))
    ends = [*(tiles if apart else depths), NEVER, NEVER]
    num_m, num_n = pages.num_blocks(len(ys[0])), tiles[-1]
    programs = min(num_m * num_n, tuning.programs * _processors(table.device))
    return product_kernel[(programs,)](
        *three(x_descs), s_desc, *three(w_descs), *three(rows_descs), *three(y_descs),
        table, first_head, num_m, num_n, *ends[:2], depths[-1],
        min(WAVE_BLOCKS, num_m),
        block, features, page, triton.next_power_of_2(-(-num_m * num_n // programs)),
        len(ws), apart, update is not None, by_feature,
        num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def linears_with_update(
    y: list[torch.Tensor],
    x: torch.Tensor,
    weights: list[torch.Tensor],
    a: torch.Tensor,
    b: list[torch.Tensor],
    blocks: Blocks,
    rows: torch.Tensor,
    linears: list[int],
    *,
    s: torch.Tensor | None = None,
) -> torch.Tensor:
    """y_l = x W_l^T + S_l B_l of W_l as [out, in]. Gives S, which is computed if it is not
    there."""
    s = shrunk(x, a, blocks, rows, linears) if s is None else s
    slots, turned = lay(s, b, blocks)
    product(y, [x], weights, by_feature=True, update=Update(slots, turned, blocks, "forward"))
    return s


def input_gradient_with_update(
    dx: torch.Tensor,
    dy: list[torch.Tensor],
    weights: list[torch.Tensor],
    slots: torch.Tensor,
    a: torch.Tensor,
    blocks: Blocks,
) -> None:
    """dx = the sum of dy_l W_l + dS_l A_l, of dS in slots."""
    product([dx], dy, weights, update=Update(slots, [a], blocks, "backward"))
