"""What products with the update inside read besides their own operands (pages.py): S or dS in the
slots of each block's pages, and B turned, in one launch each way.

dS comes as parts over tiles of features, and is added up here on its way into the slots.
"""

import torch
import triton
import triton.language as tl

from tlora.kernels.multi_lora import blocks as lists
from tlora.kernels.multi_lora import pages, settings
from tlora.kernels.multi_lora.blocks import Blocks
from tlora.kernels.multi_lora.triton_forward import (
    COLUMNS,
    FIRST,
    LINEAR,
    RANK,
    SIZE,
    W_ROW,
    alignment,
    float_bits,
    num_programs,
    three,
)
from tlora.kernels.multi_lora.triton_items import pick

BLOCK = tl.constexpr(pages.BLOCK)
HEAD = tl.constexpr(pages.HEAD)
SLOTS = tl.constexpr(pages.SLOTS)
PAGE = tl.constexpr(pages.PAGE)
PAGE_COLUMNS = tl.constexpr(pages.PAGE_COLUMNS)
PAGE_START = tl.constexpr(pages.START)
PAGE_STOP = tl.constexpr(pages.STOP)
PAGE_COL = tl.constexpr(pages.COL)
PAGE_RANK = tl.constexpr(pages.RANK)
PAGE_SCALE = tl.constexpr(pages.SCALE)
PAGE_SECOND = tl.constexpr(pages.SECOND)
PAGE_THIRD = tl.constexpr(pages.THIRD)


@triton.jit
def _columns(p_page, o_r):
    """The first of a page's columns of S, and which of PAGE it has: up to a multiple of eight, for
    zeros follow a rank."""
    rank = tl.load(p_page + PAGE_RANK)
    return (
        tl.multiple_of(tl.load(p_page + PAGE_COL), 8),
        o_r < tl.multiple_of((rank + 7) // 8 * 8, 8),
    )


@triton.jit
def _place(
    p_slots, p_s, p_heads, p_pages, i_m, i_t, T,
    W: tl.constexpr, WIDTH: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """S of some tokens of a block, of all its pages."""
    o_t, o_r = i_m * BLOCK + i_t * BT + tl.arange(0, BT), tl.arange(0, PAGE)
    o_row = o_t.to(tl.int64)[:, None]
    for i_page in range(tl.load(p_heads + i_m * HEAD)):
        p_page = p_pages + (i_m * SLOTS + i_page) * PAGE_COLUMNS
        start, stop = tl.load(p_page + PAGE_START), tl.load(p_page + PAGE_STOP)
        col, m_r = _columns(p_page, o_r)
        m_s = ((o_t >= start) & (o_t < stop))[:, None] & m_r[None, :]
        b_s = tl.load(p_s + o_row * W + col + o_r[None, :], mask=m_s, other=0.0)  # [BT, PAGE]
        o_slot = o_row * WIDTH + i_page * PAGE + o_r[None, :]
        tl.store(p_slots + o_slot, b_s, mask=(o_t < T)[:, None])


@triton.jit
def _turn(
    p_turned0, p_turned1, p_turned2, p_b0, p_b1, p_b2, p_row, i_n,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, NUM: tl.constexpr,
    TURNED: tl.constexpr, BN: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """One piece of B, of some features; zeros beside it."""
    i_l = tl.load(p_row + LINEAR)
    n = tl.multiple_of(pick(i_l, N0, N1, N2, NUM), ALIGN)
    if i_n * BN < n:
        p_b = pick(i_l, p_b0, p_b1, p_b2, NUM) + tl.load(p_row + W_ROW).to(tl.int64) * n
        p_turned = pick(i_l, p_turned0, p_turned1, p_turned2, NUM)
        p_turned += tl.multiple_of(tl.load(p_row + FIRST), 16)
        size = tl.multiple_of(tl.load(p_row + SIZE), 16)
        o_r, o_n = tl.arange(0, PAGE), i_n * BN + tl.arange(0, BN)
        m_b = (o_r < tl.load(p_row + RANK))[:, None] & (o_n < n)[None, :]
        b_b = tl.load(p_b + o_r[:, None] * n + o_n[None, :], mask=m_b, other=0.0)  # [PAGE, BN]
        o_turned = o_n.to(tl.int64)[:, None] * TURNED + o_r[None, :]
        m_turned = (o_n < n)[:, None] & (o_r < size)[None, :]
        tl.store(p_turned + o_turned, tl.trans(b_b), mask=m_turned)
        if size > PAGE:
            b_none = tl.zeros([BN, PAGE], dtype=p_turned.dtype.element_ty)
            m_turned = (o_n < n)[:, None] & (o_r < size - PAGE)[None, :]
            tl.store(p_turned + PAGE + o_turned, b_none, mask=m_turned)


@triton.jit(do_not_specialize=["first_head", "first_page", "first_piece", "num_m", "T"])
def lay_kernel(
    p_slots, p_turned0, p_turned1, p_turned2, p_s, p_b0, p_b1, p_b2,
    p_table, first_head, first_page, first_piece, num_m, T,
    LIST: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, TILES: tl.constexpr,
    NUM: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """S of forward's pages side by side, those of a list together, zeros beside it: the first
    programs; B turned, [features, columns]: the others."""
    i, places = tl.program_id(0), num_m * (BLOCK // BT)
    if i < places:
        i_m, i_t = i // (BLOCK // BT), i % (BLOCK // BT)
        for i_l in tl.static_range(NUM):
            _place(p_slots + i_l * SLOTS * PAGE, p_s, p_table + first_head + i_l * num_m * HEAD,
                   p_table + first_page + i_l * num_m * SLOTS * PAGE_COLUMNS, i_m, i_t, T,
                   W, WIDTH, BT)  # fmt: skip
    else:
        total = tl.load(p_table + LIST) * TILES
        for i_item in tl.range(i - places, total, tl.num_programs(0) - places, disable_licm=True):
            p_row = p_table + (first_piece + i_item // TILES) * COLUMNS
            _turn(p_turned0, p_turned1, p_turned2, p_b0, p_b1, p_b2, p_row, i_item % TILES,
                  N0, N1, N2, NUM, TURNED, BN, ALIGN)  # fmt: skip


@triton.jit(do_not_specialize=["first_head", "first_page", "T", "part_stride"])
def sum_into_slots_kernel(
    p_s, p_slots, p_part, p_table, first_head, first_page, T, part_stride,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, NUM: tl.constexpr,
    W: tl.constexpr, WIDTH: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """dS = scale * the sum of its parts over tiles of features, in order; and the same in the slots
    of backward's pages, zeros beside it."""
    i_m, i_t = tl.program_id(0) // (BLOCK // BT), tl.program_id(0) % (BLOCK // BT)
    first = i_m * BLOCK + i_t * BT
    o_t, o_r = first + tl.arange(0, BT), tl.arange(0, PAGE)
    o_row = o_t.to(tl.int64)[:, None]
    stride = tl.multiple_of(part_stride.to(tl.int64), 8)
    tiles_0, tiles_1, tiles_2 = tl.cdiv(N0, BN), tl.cdiv(N1, BN), tl.cdiv(N2, BN)
    for i_page in range(tl.load(p_table + first_head + i_m * HEAD)):
        p_page = p_table + first_page + (i_m * SLOTS + i_page) * PAGE_COLUMNS
        start, stop = tl.load(p_page + PAGE_START), tl.load(p_page + PAGE_STOP)
        col, m_r = _columns(p_page, o_r)
        scale = float_bits(tl.load(p_page + PAGE_SCALE))
        # A page may span linears, whose widths differ.
        second = tl.multiple_of(tl.load(p_page + PAGE_SECOND), 8)
        third = tl.multiple_of(tl.load(p_page + PAGE_THIRD), 8)
        b_l = (col + o_r >= second).to(tl.int32) + (col + o_r >= third).to(tl.int32)
        b_tiles = tl.where(m_r, pick(b_l, tiles_0, tiles_1, tiles_2, NUM), 0)  # [PAGE]
        m_s = ((o_t >= start) & (o_t < stop))[:, None] & m_r[None, :]
        o_s = o_row * W + col + o_r[None, :]
        is_here = (start < first + BT) & (stop > first)
        b_s = tl.zeros([BT, PAGE], dtype=tl.float32)
        for i_n in range(0, tl.where(is_here, tl.max(b_tiles), 0), PARTS):
            for j in tl.static_range(PARTS):
                m_i = m_s & (i_n + j < b_tiles)[None, :]
                p_i = p_part + (i_n + j) * stride
                b_s += tl.load(p_i + o_s, mask=m_i, other=0.0).to(tl.float32)
        b_ds = (b_s * scale).to(p_s.dtype.element_ty)
        tl.store(p_s + o_s, b_ds, mask=m_s)
        o_slot = o_row * WIDTH + i_page * PAGE + o_r[None, :]
        tl.store(p_slots + o_slot, b_ds, mask=(o_t < T)[:, None])


def lay(
    s: torch.Tensor, b: list[torch.Tensor], blocks: Blocks
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """For the products of Y: S in slots, [tokens, linears x SLOTS x PAGE], and B of each linear
    turned, [out, columns]. Of both they read no more than is written."""
    layout, tuning, n = blocks.layout, settings.LAY, len(b)
    assert layout.tiles.chunk_rank == pages.PAGE, "a piece is a page"
    slots = new_slots(s, n)
    turned = [each.new_empty(each.shape[1], layout.turned_columns) for each in b]
    features = [each.shape[1] for each in b]
    tiles, num_m = -(-max(features) // tuning.features), pages.num_blocks(len(s))
    number = layout.lists_of("forward")[0]
    places = num_m * (pages.BLOCK // tuning.tokens)
    turning = num_programs(layout.capacity["pieces_y"] * tiles, tuning, s.device)
    lay_kernel[(places + turning,)](
        slots, *three(turned), s, *three(b), blocks.table, layout.first_head(number),
        layout.first_page(number), layout.first_row["pieces_y"], num_m, len(s),
        lists.LISTS.index("pieces_y"), *three(features), tiles, n, s.shape[1], slots.shape[1],
        layout.turned_columns, tuning.tokens, tuning.features, alignment(features),
        num_warps=tuning.warps,
    )  # fmt: skip
    return slots, turned


def sum_into_slots(
    ds: torch.Tensor,
    slots: torch.Tensor,
    part: torch.Tensor,
    features: list[int],
    tile: int,
    blocks: Blocks,
    *,
    tokens: int,
    parts: int,
) -> None:
    """ds = scale * the sum of part[i] over the tiles of each linear's features, and the same in
    `slots`, for the product of dX. A program has so many tokens, and so many parts on their way."""
    layout = blocks.layout
    (number,) = layout.lists_of("backward")
    sum_into_slots_kernel[(pages.num_blocks(len(ds)) * (pages.BLOCK // tokens),)](
        ds, slots, part, blocks.table, layout.first_head(number), layout.first_page(number),
        len(ds), part[0].numel(),
        *three(features), layout.num_linears, ds.shape[1], slots.shape[1], tokens, tile, parts,
        num_warps=4,
    )  # fmt: skip


def new_slots(s: torch.Tensor, linears: int = 1) -> torch.Tensor:
    """For S of so many linears, or for dS of all: [tokens, linears x SLOTS x PAGE]."""
    return s.new_empty(len(s), linears * pages.SLOTS * pages.PAGE)
