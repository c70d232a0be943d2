"""Multi-LoRA forward on the GPU: `shrink` makes S = scale * drop(X) A^T, `expand` makes Y = S B.

Two launches for any number of adapters; blocks.py says which program does what. `expand` either
adds to Y or writes it, adapters first: the frozen product then accumulates on top (beta = 1), which
saves one read of Y here. README.md has the byte counts. Both kernels serve backward too (dS from
dY, dX from dS).

Letters: T tokens, N features, W columns of S; tiles: BT tokens, BN outer and BK inner features, BR
rank rows.
"""

import torch
import triton
import triton.language as tl

from tlora.kernels.multi_lora import blocks as lists
from tlora.kernels.multi_lora.blocks import Blocks
from tlora.kernels.multi_lora.devices import tuning_of
from tlora.kernels.multi_lora.settings import Shape, Tuning
from tlora.kernels.multi_lora.triton_items import num_items, pick, place_of
from tlora.kernels.multi_lora.triton_streams import feature_hash, kept, linear_key, row_hash

COLUMNS = tl.constexpr(lists.COLUMNS)
START = tl.constexpr(lists.START)
COUNT = tl.constexpr(lists.COUNT)
LINEAR = tl.constexpr(lists.LINEAR)
W_ROW = tl.constexpr(lists.W_ROW)
COL = tl.constexpr(lists.COL)
RANK = tl.constexpr(lists.RANK)
THRESHOLD = tl.constexpr(lists.THRESHOLD)
KEY = tl.constexpr(lists.KEY)
SCALE = tl.constexpr(lists.SCALE)
KEEP = tl.constexpr(lists.KEEP)
FIRST = tl.constexpr(lists.FIRST)
SIZE = tl.constexpr(lists.SIZE)


@triton.jit
def float_bits(value):
    return value.to(tl.float32, bitcast=True)


@triton.jit
def uint_bits(value):
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def _shrink_loop(
    p_x, p_w, b_rows, o_t, m_t, o_r, rank, threshold, k_0, k_1, n,
    BT: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, DROP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    b_s = tl.zeros([BT, BR], dtype=tl.float32)
    o_k = tl.arange(0, BK)
    # Offsets within a tile fit int32; the pointers carry the rest.
    o_x = o_t[:, None] * n + o_k[None, :]
    o_w = o_r[:, None] * n + o_k[None, :]
    for k in range(k_0, k_1, BK):
        m_x, m_w = m_t[:, None], (o_r < rank)[:, None]
        if not EVEN:
            m_x = m_x & (o_k < n - k)[None, :]
            m_w = m_w & (o_k < n - k)[None, :]
        b_x = tl.load(p_x + k + o_x, mask=m_x, other=0.0)  # [BT, BK]
        b_w = tl.load(p_w + k + o_w, mask=m_w, other=0.0)  # [BR, BK]
        if DROP:
            b_x = tl.where(kept(b_rows, feature_hash(k + o_k), threshold), b_x, 0.0).to(b_x.dtype)
        b_s = tl.dot(b_x, tl.trans(b_w.to(b_x.dtype)), b_s, input_precision="ieee")
    return b_s


@triton.jit
def _shrink_piece(
    p_s, p_partial, p_done, p_x, p_w, p_rows, p_row, start, rank, n, i_split, linear,
    T, W: tl.constexpr, SPLITS: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, DROPOUT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    w_row = tl.load(p_row + W_ROW).to(tl.int64)
    col = tl.multiple_of(tl.load(p_row + COL), 8)
    threshold = uint_bits(tl.load(p_row + THRESHOLD))
    scale = float_bits(tl.load(p_row + SCALE))
    if DROPOUT:
        scale *= float_bits(tl.load(p_row + KEEP))
    o_r = tl.arange(0, BR)
    o_t = tl.arange(0, BT)
    m_t = o_t < tl.load(p_row + COUNT)
    p_x += start * n
    p_w += w_row * n
    steps = tl.cdiv(tl.cdiv(n, BK), SPLITS)
    k_0 = i_split * steps * BK
    k_1 = tl.minimum(k_0 + steps * BK, n)
    if DROPOUT:
        if threshold == 0:
            b_s = _shrink_loop(p_x, p_w, o_t, o_t, m_t, o_r, rank, threshold, k_0, k_1, n,
                               BT, BK, BR, False, EVEN)  # fmt: skip
        else:
            key = linear_key(uint_bits(tl.load(p_row + KEY)), linear)
            b_rows = row_hash(tl.load(p_rows + start + o_t, mask=m_t, other=0), key)
            b_s = _shrink_loop(p_x, p_w, b_rows, o_t, m_t, o_r, rank, threshold, k_0, k_1, n,
                               BT, BK, BR, True, EVEN)  # fmt: skip
    else:
        b_s = _shrink_loop(p_x, p_w, o_t, o_t, m_t, o_r, rank, threshold, k_0, k_1, n,
                           BT, BK, BR, False, EVEN)  # fmt: skip
    # Columns up to the next multiple of eight hold zeros: readers may load 16 bytes at once.
    m_s = m_t[:, None] & (o_r < tl.multiple_of((rank + 7) // 8 * 8, 8))[None, :]
    o_s = o_t[:, None] * W + o_r[None, :]
    p_s += start * W + col
    p_partial += start * W + col
    if SPLITS == 1:
        tl.store(p_s + o_s, (b_s * scale).to(p_s.dtype.element_ty), mask=m_s)
    else:
        tl.store(p_partial + i_split * (T * W) + o_s, b_s, mask=m_s)
        tl.debug_barrier()
        # The last to finish adds all parts in their order: the bits do not depend on who is last.
        if tl.atomic_add(p_done, 1, sem="acq_rel") == SPLITS - 1:
            b_s = tl.zeros([BT, BR], dtype=tl.float32)
            for i in range(SPLITS):
                p_i = p_partial + i * (T * W)
                b_s += tl.load(p_i + o_s, mask=m_s, other=0.0, cache_modifier=".cg")
            tl.store(p_s + o_s, (b_s * scale).to(p_s.dtype.element_ty), mask=m_s)
            tl.store(p_done, 0)


@triton.jit
def _shrink_item(
    p_s, p_partial, p_done, p_x0, p_x1, p_x2, p_w0, p_w1, p_w2, p_rows, p_table,
    first_row, i_row, i_split, linear_0, linear_1, linear_2, T,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, W: tl.constexpr,
    NUM: tl.constexpr, SPLITS: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    CLASSES: tl.constexpr, DROPOUT: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    p_row = p_table + (first_row + i_row) * COLUMNS
    i_l = tl.load(p_row + LINEAR)
    rank = tl.load(p_row + RANK)
    start = tl.load(p_row + START).to(tl.int64)
    p_x = pick(i_l, p_x0, p_x1, p_x2, NUM)
    p_w = pick(i_l, p_w0, p_w1, p_w2, NUM)
    n = tl.multiple_of(pick(i_l, N0, N1, N2, NUM), ALIGN)
    linear = pick(i_l, linear_0, linear_1, linear_2, NUM)
    for i in tl.static_range(CLASSES):
        if (rank > (8 << i if i > 0 else 0)) & (rank <= 16 << i):
            _shrink_piece(p_s, p_partial, p_done + i_row, p_x, p_w, p_rows, p_row, start,
                          rank, n, i_split, linear, T, W, SPLITS, BT, BK, 16 << i,
                          DROPOUT, EVEN)  # fmt: skip


@triton.jit(do_not_specialize=["first_row", "linear_0", "linear_1", "linear_2", "T"])
def shrink_kernel(
    p_s, p_partial, p_done, p_x0, p_x1, p_x2, p_w0, p_w1, p_w2, p_rows, p_table,
    first_row, linear_0, linear_1, linear_2, T,
    LIST: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, W: tl.constexpr,
    NUM: tl.constexpr, SPLITS: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    CLASSES: tl.constexpr, DROPOUT: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
    LOOP: tl.constexpr,
):  # fmt: skip
    """S[tokens, columns] = scale * drop(x_l) W_l^T: a block of tokens, a piece of rank rows."""
    rows = tl.load(p_table + LIST)
    i_item = tl.program_id(0)
    if LOOP:
        for i in tl.range(i_item, rows * SPLITS, tl.num_programs(0), disable_licm=True):
            _shrink_item(p_s, p_partial, p_done, p_x0, p_x1, p_x2, p_w0, p_w1, p_w2, p_rows,
                         p_table, first_row, i % rows, i // rows, linear_0, linear_1, linear_2, T,
                         N0, N1, N2, W, NUM, SPLITS, BT, BK,
                         CLASSES, DROPOUT, EVEN, ALIGN)  # fmt: skip
    elif i_item < rows * SPLITS:
        _shrink_item(p_s, p_partial, p_done, p_x0, p_x1, p_x2, p_w0, p_w1, p_w2, p_rows,
                     p_table, first_row, i_item % rows, i_item // rows, linear_0, linear_1,
                     linear_2, T,
                     N0, N1, N2, W, NUM, SPLITS, BT, BK, CLASSES, DROPOUT, EVEN, ALIGN)  # fmt: skip


@triton.jit
def _store_y(
    p_y, b_y, p_bias, o_n, m_n, m_t, ADD: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    m_y = m_t[:, None] & m_n[None, :]
    if BIAS:
        b_y += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    if ADD:
        b_y += tl.load(p_y, mask=m_y, other=0.0).to(tl.float32)
    tl.store(p_y, b_y.to(p_y.dtype.element_ty), mask=m_y)


@triton.jit
def _hold_piece(
    p_piece, p_w, is_there, o_r, o_n, m_n, n, linear_0, linear_1, linear_2,
    NUM: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """A piece's rank, columns of S, tile of the pool [BR, BN], and key."""
    rank = tl.where(is_there, tl.load(p_piece + RANK), 0)
    col = tl.multiple_of(tl.load(p_piece + COL), 8)
    o_w = (tl.load(p_piece + W_ROW).to(tl.int64) + o_r)[:, None] * n + o_n[None, :]
    b_w = tl.load(p_w + o_w, mask=(o_r < rank)[:, None] & m_n[None, :], other=0.0)
    key = linear_0.to(tl.uint32)
    if DROPOUT:
        linear = pick(tl.load(p_piece + LINEAR), linear_0, linear_1, linear_2, NUM)
        key = linear_key(uint_bits(tl.load(p_piece + KEY)), linear)
    return rank, col, b_w, key


@triton.jit
def _expand_piece(
    b_y, b_w, p_s, p_piece, p_rows, rank, col, key, i_t64, o_t, m_t, o_r, b_features,
    W: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """b_y [BT, BN] + drop(S W) of one piece."""
    m_s = m_t[:, None] & (o_r < tl.multiple_of((rank + 7) // 8 * 8, 8))[None, :]
    o_s = o_t[:, None] * W + o_r[None, :]
    b_s = tl.load(p_s + i_t64 * W + col + o_s, mask=m_s, other=0.0)  # [BT, BR]
    if DROPOUT:
        b_d = tl.dot(b_s, b_w, input_precision="ieee")
        threshold = uint_bits(tl.load(p_piece + THRESHOLD))
        keep = 1.0
        if threshold != 0:
            b_rows = row_hash(tl.load(p_rows + i_t64 + o_t, mask=m_t, other=0), key)
            keep = float_bits(tl.load(p_piece + KEEP))
            b_d = tl.where(kept(b_rows, b_features, threshold), b_d, 0.0)
        # One instruction. Before the branch is left Triton 3.6 does not compile it.
        b_y = tl.fma(b_d, keep, b_y)
    else:
        b_y = tl.dot(b_s, b_w, b_y, input_precision="ieee")
    return b_y


@triton.jit
def _expand_few(
    p_y, p_bias, p_s, p_w, p_rows, p_piece, size, start, count, n, o_n, m_n,
    linear_0, linear_1, linear_2,
    W: tl.constexpr, NUM: tl.constexpr, PIECES: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    DROPOUT: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Up to three pieces: the pool's tiles stay while the program walks its tokens."""
    o_r = tl.arange(0, BR)
    b_features = o_n
    if DROPOUT:
        b_features = feature_hash(o_n)
    p_piece1, p_piece2 = p_piece + COLUMNS, p_piece + 2 * COLUMNS
    rank0, col0, b_w0, key0 = _hold_piece(p_piece, p_w, size > 0, o_r, o_n, m_n, n,
                                          linear_0, linear_1, linear_2, NUM, DROPOUT)  # fmt: skip
    b_w0 = b_w0.to(p_s.dtype.element_ty)
    if PIECES > 1:
        rank1, col1, b_w1, key1 = _hold_piece(p_piece1, p_w, size > 1, o_r, o_n, m_n, n,
                                              linear_0, linear_1, linear_2, NUM,
                                              DROPOUT)  # fmt: skip
        b_w1 = b_w1.to(p_s.dtype.element_ty)
    if PIECES > 2:
        rank2, col2, b_w2, key2 = _hold_piece(p_piece2, p_w, size > 2, o_r, o_n, m_n, n,
                                              linear_0, linear_1, linear_2, NUM,
                                              DROPOUT)  # fmt: skip
        b_w2 = b_w2.to(p_s.dtype.element_ty)
    o_t = tl.arange(0, BT)
    o_y = o_t[:, None] * n + o_n[None, :]
    for i_t in range(0, count, BT):
        m_t = o_t < count - i_t
        i_t64 = start + i_t
        b_y = tl.zeros([BT, BN], dtype=tl.float32)
        b_y = _expand_piece(b_y, b_w0, p_s, p_piece, p_rows, rank0, col0, key0, i_t64, o_t,
                            m_t, o_r, b_features, W, DROPOUT)  # fmt: skip
        if PIECES > 1:
            b_y = _expand_piece(b_y, b_w1, p_s, p_piece1, p_rows, rank1, col1, key1, i_t64, o_t,
                                m_t, o_r, b_features, W, DROPOUT)  # fmt: skip
        if PIECES > 2:
            b_y = _expand_piece(b_y, b_w2, p_s, p_piece2, p_rows, rank2, col2, key2, i_t64, o_t,
                                m_t, o_r, b_features, W, DROPOUT)  # fmt: skip
        _store_y(p_y + i_t64 * n + o_y, b_y, p_bias, o_n, m_n, m_t, ADD, BIAS)


@triton.jit
def _expand_many(
    p_y, p_bias, p_s, p_w, p_rows, p_piece, size, start, count, n, o_n, m_n,
    linear_0, linear_1, linear_2,
    W: tl.constexpr, NUM: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    DROPOUT: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Any number of pieces: the pool's tile is loaded anew for every block of tokens."""
    o_r = tl.arange(0, BR)
    b_features = o_n
    if DROPOUT:
        b_features = feature_hash(o_n)
    o_t = tl.arange(0, BT)
    o_y = o_t[:, None] * n + o_n[None, :]
    for i_t in range(0, count, BT):
        m_t = o_t < count - i_t
        i_t64 = start + i_t
        b_y = tl.zeros([BT, BN], dtype=tl.float32)
        for i_p in range(size):
            p_i = p_piece + i_p * COLUMNS
            rank, col, b_w, key = _hold_piece(p_i, p_w, size > 0, o_r, o_n, m_n, n,
                                              linear_0, linear_1, linear_2, NUM,
                                              DROPOUT)  # fmt: skip
            b_w = b_w.to(p_s.dtype.element_ty)
            b_y = _expand_piece(b_y, b_w, p_s, p_i, p_rows, rank, col, key, i_t64, o_t,
                                m_t, o_r, b_features, W, DROPOUT)  # fmt: skip
        _store_y(p_y + i_t64 * n + o_y, b_y, p_bias, o_n, m_n, m_t, ADD, BIAS)


@triton.jit
def _expand_item(
    p_y0, p_y1, p_y2, p_bias0, p_bias1, p_bias2, p_s, p_w0, p_w1, p_w2, p_rows, p_table,
    first_row, i_item, linear_0, linear_1, linear_2,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, W: tl.constexpr,
    NUM: tl.constexpr, ENDS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    CLASSES: tl.constexpr, DROPOUT: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    ALIGN: tl.constexpr, OUTPUTS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    i_row, i_n = place_of(p_table, i_item, ENDS, BN, N0, N1, N2)
    p_row = p_table + (first_row + i_row) * COLUMNS
    i_l = tl.load(p_row + LINEAR)
    n = tl.multiple_of(pick(i_l, N0, N1, N2, OUTPUTS), ALIGN)
    p_y = pick(i_l, p_y0, p_y1, p_y2, OUTPUTS)
    p_w = pick(i_l, p_w0, p_w1, p_w2, OUTPUTS)
    p_bias = pick(i_l, p_bias0, p_bias1, p_bias2, OUTPUTS)
    start, count = tl.load(p_row + START).to(tl.int64), tl.load(p_row + COUNT)
    rank, size = tl.load(p_row + RANK), tl.load(p_row + SIZE)
    p_piece = p_table + tl.load(p_row + FIRST) * COLUMNS
    o_n = i_n * BN + tl.arange(0, BN)
    m_n = o_n < n
    if size == 0:  # noqa: SIM102 - the other is known when compiled
        if not ADD or BIAS:
            for i_t in range(0, count, BT):
                o_t = i_t + tl.arange(0, BT)
                b_y = tl.zeros([BT, BN], dtype=tl.float32)
                p_tile = p_y + (start + o_t)[:, None] * n + o_n[None, :]
                _store_y(p_tile, b_y, p_bias, o_n, m_n, o_t < count, ADD, BIAS)
    for i in tl.static_range(CLASSES):
        if (rank > (8 << i if i > 0 else 0)) & (rank <= 16 << i):
            if size == 1:
                _expand_few(p_y, p_bias, p_s, p_w, p_rows, p_piece, size, start, count, n,
                            o_n, m_n, linear_0, linear_1, linear_2,
                            W, NUM, 1, BT, BN, 16 << i, DROPOUT, ADD, BIAS)  # fmt: skip
            elif MANY:
                _expand_many(p_y, p_bias, p_s, p_w, p_rows, p_piece, size, start, count, n,
                             o_n, m_n, linear_0, linear_1, linear_2,
                             W, NUM, BT, BN, 16 << i, DROPOUT, ADD, BIAS)  # fmt: skip
            elif NUM > 1 and OUTPUTS == 1:
                _expand_few(p_y, p_bias, p_s, p_w, p_rows, p_piece, size, start, count, n,
                            o_n, m_n, linear_0, linear_1, linear_2,
                            W, NUM, NUM, BT, BN, 16 << i, DROPOUT, ADD, BIAS)  # fmt: skip


@triton.jit(do_not_specialize=["first_row", "linear_0", "linear_1", "linear_2"])
def expand_kernel(
    p_y0, p_y1, p_y2, p_bias0, p_bias1, p_bias2, p_s, p_w0, p_w1, p_w2, p_rows, p_table,
    first_row, linear_0, linear_1, linear_2,
    LIST: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, W: tl.constexpr,
    NUM: tl.constexpr, ENDS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    CLASSES: tl.constexpr, DROPOUT: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    ALIGN: tl.constexpr, OUTPUTS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Y[tokens, features] (+)= sum over pieces of drop(S W) for a chunk of tokens of a linear."""
    total = num_items(p_table, LIST, ENDS, BN, N0, N1, N2)
    for i in tl.range(tl.program_id(0), total, tl.num_programs(0), disable_licm=True):
        _expand_item(p_y0, p_y1, p_y2, p_bias0, p_bias1, p_bias2, p_s, p_w0, p_w1, p_w2,
                     p_rows, p_table, first_row, i, linear_0, linear_1, linear_2,
                     N0, N1, N2, W, NUM, ENDS, BT, BN,
                     CLASSES, DROPOUT, ADD, BIAS, ALIGN, OUTPUTS, MANY)  # fmt: skip


def num_programs(most: int, tuning: Tuning, device: torch.device) -> int:
    """As many as the device holds at once, or one per item that a list has room for."""
    if not tuning.programs:
        return most
    if device.type != "cuda":
        return min(most, 16)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(most, tuning.programs * processors)


def shape_of(
    layout: lists.Layout, values: torch.Tensor, pool: torch.Tensor, dropout: bool
) -> Shape:
    return Shape(
        num_tokens=layout.num_tokens,
        max_rank=layout.max_rank,
        width=layout.s_width,
        itemsize=values.dtype.itemsize,
        pool_itemsize=pool.dtype.itemsize,
        dropout=dropout,
    )


def three(values: list) -> list:
    """Kernels take up to three linears; the rest repeat the first."""
    assert len(values) <= 3, f"a group has at most three linears, got {len(values)}"
    return [*values, *(values[:1] * (3 - len(values)))]


def rank_classes(largest: int) -> int:
    """Tile sizes 16, 32, ... that cover ranks up to `largest`."""
    return max(0, (max(largest, 16) - 1).bit_length() - 4) + 1


def alignment(features: list[int]) -> int:
    """The largest power of two up to 64 that divides them all."""
    return next(a for a in (64, 32, 16, 8, 4, 2, 1) if all(n % a == 0 for n in features))


def split_count(layout: lists.Layout, features: int, tuning: Tuning, programs: int) -> int:
    """Parts of the inner dimension, so that any bucket fills about so many programs.

    A function of static shapes and the kind of device only: bits must not depend on the jobs.
    """
    blocks = -(-layout.num_tokens // layout.tiles.shrink_tokens)
    most = max(1, features // (4 * tuning.features))
    return max(1, min(16, most, programs // blocks))


def shrink(
    s: torch.Tensor,
    x: list[torch.Tensor],
    w: list[torch.Tensor],
    blocks: Blocks,
    rows: torch.Tensor,
    linears: list[int],
    *,
    name: str,
    tuning: Tuning | None = None,
    splits: int | None = None,
) -> None:
    """s = scale * drop(x_l) w_l^T, block by block as the list `name` says."""
    layout = blocks.layout
    features = [x_l.shape[1] for x_l in x]
    tuning = tuning or tuning_of("shrink", shape_of(layout, s, w[0], layout.dropout), s.device)
    if splits is None:
        splits = split_count(layout, min(features), tuning, programs=tuning.parts)
    partial = s
    if splits > 1:
        partial = torch.empty(splits, *s.shape, dtype=torch.float32, device=s.device)
    stacked = name == "shrink_x"
    programs = num_programs(layout.capacity[name] * splits, tuning, s.device)
    shrink_kernel[(programs,)](
        s, partial, blocks.finished, *three(x), *three(w), rows, blocks.table,
        layout.first_row[name], *three(linears), len(s),
        lists.LISTS.index(name), *three(features), s.shape[1],
        layout.num_linears, splits, layout.tiles.shrink_tokens, tuning.features,
        rank_classes(layout.most_rank(name)),
        layout.dropout and stacked, all(n % tuning.features == 0 for n in features),
        alignment(features), tuning.programs > 0,
        num_warps=tuning.warps, num_stages=tuning.stages, **tuning.limits,
    )  # fmt: skip


def expand(
    y: list[torch.Tensor],
    s: torch.Tensor,
    w: list[torch.Tensor],
    blocks: Blocks,
    rows: torch.Tensor,
    linears: list[int],
    *,
    name: str,
    write: bool,
    biases: list[torch.Tensor | None] | None = None,
    tuning: Tuning | None = None,
) -> None:
    """y_l = or += the sum of drop(s w_l) over the pieces of the list `name`."""
    layout = blocks.layout
    dropout = layout.dropout and name == "expand_dx"
    tuning = tuning or tuning_of(name, shape_of(layout, s, w[0], dropout), s.device)
    features = [y_l.shape[1] for y_l in y]
    tiles = -(-max(features) // tuning.features)
    has_bias = biases is not None and any(bias is not None for bias in biases)
    if has_bias:
        biases = [
            y_l.new_zeros(y_l.shape[1]) if b is None else b
            for y_l, b in zip(y, biases, strict=True)
        ]
    expand_kernel[(num_programs(layout.capacity[name] * tiles, tuning, s.device),)](
        *three(y), *three(biases if has_bias else y), s, *three(w), rows, blocks.table,
        layout.first_row[name], *three(linears),
        lists.LISTS.index(name), *three(features), s.shape[1], layout.num_linears,
        lists.ENDS.get(name, 0), tuning.tokens, tuning.features,
        rank_classes(layout.most_rank(name)),
        dropout, not write, has_bias,
        alignment(features), len(y), layout.max_rank > layout.tiles.chunk_rank,
        num_warps=tuning.warps, num_stages=tuning.stages, **tuning.limits,
    )  # fmt: skip


def shrunk(
    x: torch.Tensor, a: torch.Tensor, blocks: Blocks, rows: torch.Tensor, linears: list[int]
) -> torch.Tensor:
    """S of all linears."""
    layout = blocks.layout
    s = torch.empty(len(x), layout.s_width, dtype=x.dtype, device=x.device)
    n = layout.num_linears
    shrink(s, [x] * n, [a] * n, blocks, rows, linears, name="shrink_x")
    return s


def add_forward(
    y: list[torch.Tensor],
    x: torch.Tensor,
    a: torch.Tensor,
    b: list[torch.Tensor],
    blocks: Blocks,
    rows: torch.Tensor,
    linears: list[int],
    *,
    write: bool = False,
    biases: list[torch.Tensor | None] | None = None,
    s: torch.Tensor | None = None,
) -> torch.Tensor:
    """y_l += delta_l, or with `write` y_l = delta_l + bias_l for every token. Gives S, which is
    computed if it is not there."""
    s = shrunk(x, a, blocks, rows, linears) if s is None else s
    expand(y, s, b, blocks, rows, linears, name="expand_y", write=write, biases=biases)
    return s
