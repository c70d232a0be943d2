"""SwiGLU on the GPU with the adapters of gate and up added on the way.

    forward    h = silu(G + S B_gate) * (U + S B_up)
    backward   dG and dU, of the sums in brackets, from dh; the sums are made again

G and U are the frozen products, S is what `shrink` gave. This kernel has to read G and U anyway, so
that the update costs its arithmetic and reads of S and B that mostly come from the L2, where
`expand` would write all of gate and up and the frozen products would read it again. Everything
between the loads and the one rounding at the store is float32.

Letters as in triton_forward.py.
"""

import torch
import triton
import triton.language as tl

from tlora.kernels.multi_lora import blocks as lists
from tlora.kernels.multi_lora.blocks import Blocks
from tlora.kernels.multi_lora.devices import tuning_of
from tlora.kernels.multi_lora.settings import Tuning
from tlora.kernels.multi_lora.triton_forward import (
    COL,
    COLUMNS,
    COUNT,
    FIRST,
    RANK,
    SIZE,
    START,
    W_ROW,
    num_programs,
    rank_classes,
    shape_of,
)

INDEX = tl.constexpr(lists.INDEX)


@triton.jit
def _piece(p_w, p_piece, is_there, o_r, o_n, m_n, n: tl.constexpr):
    """A piece's columns of S, how many of them, and its tile of B [BR, BN]."""
    rank = tl.where(is_there, tl.load(p_piece + RANK), 0)
    col = tl.multiple_of(tl.load(p_piece + COL), 8)
    p_w += tl.load(p_piece + W_ROW).to(tl.int64) * n
    o_w = o_r[:, None] * n + o_n[None, :]
    b_w = tl.load(p_w + o_w, mask=(o_r < rank)[:, None] & m_n[None, :], other=0.0)
    return col, tl.multiple_of((rank + 7) // 8 * 8, 8), b_w


@triton.jit
def _add_piece(b_y, b_w, p_s, col, width, o_t, m_t, o_r, W: tl.constexpr):
    """b_y [BT, BN] + S B of one piece."""
    m_s = m_t[:, None] & (o_r < width)[None, :]
    b_s = tl.load(p_s + col + (o_t[:, None] * W + o_r[None, :]), mask=m_s, other=0.0)  # [BT, BR]
    return tl.dot(b_s, b_w, b_y, input_precision="ieee")


@triton.jit
def _finish(
    p_h, p_dg, p_du, p_dh, b_g, b_u, b_gate, b_up, o_y, m_y, BACKWARD: tl.constexpr,
):  # fmt: skip
    """The store: b_gate and b_up are S B [BT, BN], b_g and b_u the frozen products."""
    b_gate += b_g.to(tl.float32)
    b_up += b_u.to(tl.float32)
    b_sigmoid = 1.0 / (1.0 + tl.exp(-b_gate))
    if BACKWARD:
        b_dh = tl.load(p_dh + o_y, mask=m_y, other=0.0).to(tl.float32)
        b_du = b_dh * b_gate * b_sigmoid
        b_dg = b_dh * b_up * b_sigmoid * (1.0 + b_gate * (1.0 - b_sigmoid))
        tl.store(p_dg + o_y, b_dg.to(p_dg.dtype.element_ty), mask=m_y)
        tl.store(p_du + o_y, b_du.to(p_du.dtype.element_ty), mask=m_y)
    else:
        b_h = b_gate * b_sigmoid * b_up
        tl.store(p_h + o_y, b_h.to(p_h.dtype.element_ty), mask=m_y)


@triton.jit
def _swiglu_few(
    p_h, p_dg, p_du, p_dh, p_g, p_u, p_s, p_w0, p_w1, p_piece, size_0, size_1, start, count,
    o_n, m_n, n: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    BACKWARD: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """At most one piece of each: B's tiles stay while the program walks its tokens. BR is 0 for
    tokens of no job."""
    o_t = tl.arange(0, BT)
    o_y = o_t[:, None] * n + o_n[None, :]
    if BR > 0:
        o_r = tl.arange(0, BR)
        col_0, width_0, b_w0 = _piece(p_w0, p_piece, size_0 > 0, o_r, o_n, m_n, n)
        p_piece += size_0 * COLUMNS
        col_1, width_1, b_w1 = _piece(p_w1, p_piece, size_1 > 0, o_r, o_n, m_n, n)
        b_w0, b_w1 = b_w0.to(p_s.dtype.element_ty), b_w1.to(p_s.dtype.element_ty)
    for i_t in range(0, count, BT):
        m_t = o_t < count - i_t
        i_t64 = start + i_t
        m_y = m_t[:, None]
        if not EVEN:
            m_y = m_y & m_n[None, :]
        # First of all: they take longest to arrive.
        b_g = tl.load(p_g + i_t64 * n + o_y, mask=m_y, other=0.0)  # [BT, BN]
        b_u = tl.load(p_u + i_t64 * n + o_y, mask=m_y, other=0.0)
        b_gate = tl.zeros([BT, BN], dtype=tl.float32)
        b_up = tl.zeros([BT, BN], dtype=tl.float32)
        if BR > 0:
            p_i = p_s + i_t64 * W
            b_gate = _add_piece(b_gate, b_w0, p_i, col_0, width_0, o_t, m_t, o_r, W)
            b_up = _add_piece(b_up, b_w1, p_i, col_1, width_1, o_t, m_t, o_r, W)
        i_y = i_t64 * n
        _finish(p_h + i_y, p_dg + i_y, p_du + i_y, p_dh + i_y, b_g, b_u, b_gate, b_up, o_y, m_y,
                BACKWARD)  # fmt: skip


@triton.jit
def _swiglu_many(
    p_h, p_dg, p_du, p_dh, p_g, p_u, p_s, p_w0, p_w1, p_piece, size_0, size_1, start, count,
    o_n, m_n, n: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    BACKWARD: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Any number of pieces: B's tiles are loaded anew for every block of tokens."""
    o_t, o_r = tl.arange(0, BT), tl.arange(0, BR)
    o_y = o_t[:, None] * n + o_n[None, :]
    for i_t in range(0, count, BT):
        m_t = o_t < count - i_t
        i_t64 = start + i_t
        m_y = m_t[:, None]
        if not EVEN:
            m_y = m_y & m_n[None, :]
        b_gate = tl.zeros([BT, BN], dtype=tl.float32)
        b_up = tl.zeros([BT, BN], dtype=tl.float32)
        for i_p in range(size_0):
            col, width, b_w = _piece(p_w0, p_piece + i_p * COLUMNS, True, o_r, o_n, m_n, n)
            b_w = b_w.to(p_s.dtype.element_ty)
            b_gate = _add_piece(b_gate, b_w, p_s + i_t64 * W, col, width, o_t, m_t, o_r, W)
        for i_p in range(size_0, size_0 + size_1):
            col, width, b_w = _piece(p_w1, p_piece + i_p * COLUMNS, True, o_r, o_n, m_n, n)
            b_w = b_w.to(p_s.dtype.element_ty)
            b_up = _add_piece(b_up, b_w, p_s + i_t64 * W, col, width, o_t, m_t, o_r, W)
        b_g = tl.load(p_g + i_t64 * n + o_y, mask=m_y, other=0.0)  # [BT, BN]
        b_u = tl.load(p_u + i_t64 * n + o_y, mask=m_y, other=0.0)
        i_y = i_t64 * n
        _finish(p_h + i_y, p_dg + i_y, p_du + i_y, p_dh + i_y, b_g, b_u, b_gate, b_up, o_y, m_y,
                BACKWARD)  # fmt: skip


@triton.jit(do_not_specialize=["first_row"])
def swiglu_kernel(
    p_h, p_dg, p_du, p_dh, p_g, p_u, p_s, p_w0, p_w1, p_table,
    first_row,
    LIST: tl.constexpr, N: tl.constexpr, W: tl.constexpr, TILES: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, CLASSES: tl.constexpr,
    BACKWARD: tl.constexpr, EVEN: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """h, or dG and dU, of a chunk of tokens and a tile of features."""
    total = tl.load(p_table + LIST) * TILES
    for i_item in tl.range(tl.program_id(0), total, tl.num_programs(0), disable_licm=True):
        i_row, i_n = i_item // TILES, i_item % TILES
        p_row = p_table + (first_row + i_row) * COLUMNS
        start, count = tl.load(p_row + START).to(tl.int64), tl.load(p_row + COUNT)
        rank = tl.load(p_row + RANK)
        size_0, size_1 = tl.load(p_row + SIZE), tl.load(p_row + INDEX)
        p_piece = p_table + tl.load(p_row + FIRST) * COLUMNS
        o_n = i_n * BN + tl.arange(0, BN)
        m_n = o_n < N
        if rank == 0:
            _swiglu_few(p_h, p_dg, p_du, p_dh, p_g, p_u, p_s, p_w0, p_w1, p_piece, size_0, size_1,
                        start, count, o_n, m_n, N, W, BT, BN, 0, BACKWARD, EVEN)  # fmt: skip
        for i in tl.static_range(CLASSES):
            if (rank > (8 << i if i > 0 else 0)) & (rank <= 16 << i):
                if (size_0 <= 1) & (size_1 <= 1):
                    _swiglu_few(p_h, p_dg, p_du, p_dh, p_g, p_u, p_s, p_w0, p_w1, p_piece,
                                size_0, size_1, start, count, o_n, m_n, N, W,
                                BT, BN, 16 << i, BACKWARD, EVEN)  # fmt: skip
                elif MANY:
                    _swiglu_many(p_h, p_dg, p_du, p_dh, p_g, p_u, p_s, p_w0, p_w1, p_piece,
                                 size_0, size_1, start, count, o_n, m_n, N, W,
                                 BT, BN, 16 << i, BACKWARD, EVEN)  # fmt: skip


def swiglu_forward(
    h: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    s: torch.Tensor,
    b: list[torch.Tensor],
    blocks: Blocks,
    *,
    tuning: Tuning | None = None,
) -> None:
    """h = silu(gate + S B_gate) * (up + S B_up) for every token."""
    tuning = tuning or tuning_of("swiglu", shape_of(blocks.layout, s, b[0], False), s.device)
    _launch([h, h, h, h, gate, up], s, b, blocks, tuning, backward=False)


def swiglu_backward(
    dgate: torch.Tensor,
    dup: torch.Tensor,
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    s: torch.Tensor,
    b: list[torch.Tensor],
    blocks: Blocks,
    *,
    tuning: Tuning | None = None,
) -> None:
    """The gradients of gate + S B_gate and up + S B_up, for every token."""
    tuning = tuning or tuning_of(
        "swiglu backward", shape_of(blocks.layout, s, b[0], False), s.device
    )
    _launch([dgate, dgate, dup, dh, gate, up], s, b, blocks, tuning, backward=True)


def _launch(
    wide: list[torch.Tensor],
    s: torch.Tensor,
    b: list[torch.Tensor],
    blocks: Blocks,
    tuning: Tuning,
    *,
    backward: bool,
) -> None:
    layout = blocks.layout
    n = wide[0].shape[1]
    assert layout.out_features == (n, n), "gate and up have as many features each"
    tiles = -(-n // tuning.features)
    swiglu_kernel[(num_programs(layout.capacity["swiglu"] * tiles, tuning, s.device),)](
        *wide, s, *b, blocks.table, layout.first_row["swiglu"],
        lists.LISTS.index("swiglu"), n, s.shape[1], tiles, tuning.tokens, tuning.features,
        rank_classes(layout.most_rank("swiglu")),
        backward, n % tuning.features == 0, layout.max_rank > layout.tiles.chunk_rank,
        num_warps=tuning.warps, num_stages=tuning.stages, **tuning.limits,
    )  # fmt: skip
