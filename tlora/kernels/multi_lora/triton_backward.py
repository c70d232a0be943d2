"""Multi-LoRA backward on the GPU.

    dS = scale * dY B^T      dB += S^T dY      dA += dS^T drop(X)      dX = drop(dS A)

`reduce` sums over tokens for A and B: a program holds some rank rows and features of the gradient
and walks a chunk of one job's tokens. It can give dY B^T of its features on the way (`fused`), so
that dY is read once; a small kernel then adds those parts up. Partial sums are added to the pool's
gradient in the order of the job's tokens, by whichever program of the job finishes last. A sum that
is whole may be sent to the memory, which adds it: one addition per value and launch.
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
    KEEP,
    KEY,
    LINEAR,
    RANK,
    SCALE,
    SIZE,
    START,
    THRESHOLD,
    W_ROW,
    alignment,
    expand,
    float_bits,
    num_programs,
    rank_classes,
    shape_of,
    shrink,
    three,
    uint_bits,
)
from tlora.kernels.multi_lora.triton_items import (
    item_of,
    num_items,
    num_rounds,
    pick,
    place_of,
)
from tlora.kernels.multi_lora.triton_pages import sum_into_slots
from tlora.kernels.multi_lora.triton_streams import feature_hash, kept, linear_key, row_hash

INDEX = tl.constexpr(lists.INDEX)
GROUP = tl.constexpr(lists.GROUP)
ZERO = tl.constexpr(lists.ZERO)

SUBNORMAL = tl.constexpr(2.0**-126)

SUM_PARTS = 8
"""Parts that are on their way at once."""


@triton.jit
def _reduce_loop(
    p_p, p_q, p_rows, p_part, p_w, b_held, o_g, m_g, o_r, m_r, o_n, m_n, start, count, n,
    threshold, key,
    W: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    DROP: tl.constexpr, FUSED: tl.constexpr, EVEN: tl.constexpr, TURNED: tl.constexpr,
    RELOAD: tl.constexpr,
):  # fmt: skip
    """P^T drop(Q) [BR, BN] of the tokens from `start`."""
    b_g = tl.zeros([BN if TURNED else BR, BR if TURNED else BN], dtype=tl.float32)
    if DROP:
        b_features = feature_hash(o_n)
    # Offsets within a tile fit int32; the pointers carry the rest.
    o_t = tl.arange(0, BT)
    o_p = o_t[:, None] * W + o_r[None, :]
    o_q = o_t[:, None] * n + o_n[None, :]
    for i_t in tl.range(0, count, BT, disable_licm=RELOAD):
        m_t = o_t < count - i_t
        i_t64 = start + i_t
        m_p = m_t[:, None] & m_r[None, :]
        b_p = tl.load(p_p + i_t64 * W + o_p, mask=m_p, other=0.0)  # [BT, BR]
        m_q = m_t[:, None]
        if not EVEN:
            m_q = m_q & m_n[None, :]
        b_q = tl.load(p_q + i_t64 * n + o_q, mask=m_q, other=0.0)  # [BT, BN]
        if DROP:
            b_rows = row_hash(tl.load(p_rows + i_t64 + o_t, mask=m_t, other=0), key)
            b_q = tl.where(kept(b_rows, b_features, threshold), b_q, 0.0).to(b_q.dtype)
        if FUSED and RELOAD:
            # First, so that the other product runs while this one is stored.
            b_w = tl.load(p_w + o_g, mask=m_g, other=0.0).to(b_q.dtype)
            b_d = tl.dot(b_q, tl.trans(b_w), input_precision="ieee")  # [BT, BR]
        if TURNED:
            b_g = tl.dot(tl.trans(b_q), b_p, b_g, input_precision="ieee")
        else:
            b_g = tl.dot(tl.trans(b_p), b_q, b_g, input_precision="ieee")
        if FUSED:
            if not RELOAD:
                b_d = tl.dot(b_q, tl.trans(b_held), input_precision="ieee")
            tl.store(p_part + i_t64 * W + o_p, b_d.to(p_part.dtype.element_ty), mask=m_p)
    if TURNED:
        b_g = tl.trans(b_g)
    return b_g


@triton.jit
def _add_gradient(
    p_g, p_sums, p_done, p_row, b_g, o_g, m_g, o_r, o_n, rank, size,
    MAX_N: tl.constexpr, SENT: tl.constexpr,
):  # fmt: skip
    """The pool's gradient += b_g, or the sum of the job's partial sums if there are several. One
    that is known to be zero is not read."""
    is_zero = tl.load(p_row + ZERO) != 0
    if size == 1 and SENT:
        # One addition per value and launch: its order is that of the launches.
        # The memory takes subnormal numbers for zero: so must who adds to nothing.
        if is_zero:
            tl.store(p_g + o_g, tl.where(tl.abs(b_g) < SUBNORMAL, 0.0, b_g), mask=m_g)
        else:
            tl.atomic_add(p_g + o_g, b_g, mask=m_g, sem="relaxed")
    elif size == 1:
        b_old = tl.load(p_g + o_g, mask=m_g & ~is_zero, other=0.0)
        tl.store(p_g + o_g, b_old + b_g, mask=m_g)
    else:
        first, index = tl.load(p_row + FIRST).to(tl.int64), tl.load(p_row + INDEX)
        o_sum = o_r[:, None] * MAX_N + o_n[None, :]
        stride = rank.to(tl.int64) * MAX_N
        p_sums += first * MAX_N
        tl.store(p_sums + index * stride + o_sum, b_g, mask=m_g)
        tl.debug_barrier()
        # The last to finish adds all in their order: the bits do not depend on who is last.
        if tl.atomic_add(p_done, 1, sem="acq_rel") == size - 1:
            b_g = tl.load(p_g + o_g, mask=m_g & ~is_zero, other=0.0)
            for i in range(size):
                p_i = p_sums + i * stride
                b_g += tl.load(p_i + o_sum, mask=m_g, other=0.0, cache_modifier=".cg")
            tl.store(p_g + o_g, b_g, mask=m_g)
            tl.store(p_done, 0)


@triton.jit
def _reduce_piece(
    p_g, p_sums, p_done, p_p, p_q, p_w, p_part, p_rows, p_row, rank, n, i_n, linear,
    MAX_N: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    DROPOUT: tl.constexpr, FUSED: tl.constexpr, EVEN: tl.constexpr, TURNED: tl.constexpr,
    SENT: tl.constexpr, RELOAD: tl.constexpr,
):  # fmt: skip
    start, count = tl.load(p_row + START).to(tl.int64), tl.load(p_row + COUNT)
    w_row = tl.load(p_row + W_ROW).to(tl.int64)
    col = tl.multiple_of(tl.load(p_row + COL), 8)
    threshold = uint_bits(tl.load(p_row + THRESHOLD))
    keep = float_bits(tl.load(p_row + KEEP))
    o_r = tl.arange(0, BR)
    m_r = o_r < tl.multiple_of((rank + 7) // 8 * 8, 8)
    o_n = i_n * BN + tl.arange(0, BN)
    m_n = o_n < n
    m_g = (o_r < rank)[:, None]
    if not EVEN:
        m_g = m_g & m_n[None, :]
    o_g = o_r[:, None] * n + o_n[None, :]
    p_g += w_row * n
    p_w += w_row * n
    p_p += col
    p_part += col
    key = threshold
    b_w = o_r
    if FUSED and not RELOAD:
        b_w = tl.load(p_w + o_g, mask=m_g, other=0.0).to(p_q.dtype.element_ty)  # [BR, BN]
    if DROPOUT:
        if threshold == 0:
            b_g = _reduce_loop(p_p, p_q, p_rows, p_part, p_w, b_w, o_g, m_g, o_r, m_r, o_n, m_n,
                               start, count, n, threshold, key, W, BT, BN, BR,
                               False, FUSED, EVEN, TURNED, RELOAD)  # fmt: skip
        else:
            key = linear_key(uint_bits(tl.load(p_row + KEY)), linear)
            b_g = _reduce_loop(p_p, p_q, p_rows, p_part, p_w, b_w, o_g, m_g, o_r, m_r, o_n, m_n,
                               start, count, n, threshold, key, W, BT, BN, BR,
                               True, FUSED, EVEN, TURNED, RELOAD)  # fmt: skip
            b_g *= keep
    else:
        b_g = _reduce_loop(p_p, p_q, p_rows, p_part, p_w, b_w, o_g, m_g, o_r, m_r, o_n, m_n,
                           start, count, n, threshold, key, W, BT, BN, BR,
                           False, FUSED, EVEN, TURNED, RELOAD)  # fmt: skip
    _add_gradient(p_g, p_sums, p_done, p_row, b_g, o_g, m_g, o_r, o_n, rank,
                  tl.load(p_row + SIZE), MAX_N, SENT)  # fmt: skip


@triton.jit
def _reduce_item(
    p_g0, p_g1, p_g2, p_sums, p_done, p_p, p_q0, p_q1, p_q2, p_w0, p_w1, p_w2, p_part, p_rows,
    p_table, first_row, i_item, linear_0, linear_1, linear_2, part_stride,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, MAX_N: tl.constexpr,
    W: tl.constexpr, NUM: tl.constexpr, TILES: tl.constexpr, ENDS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, CLASSES: tl.constexpr, DROPOUT: tl.constexpr,
    FUSED: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, TURNED: tl.constexpr,
    SENT: tl.constexpr, RELOAD: tl.constexpr,
):  # fmt: skip
    i_row, i_n = place_of(p_table, i_item, ENDS, BN, N0, N1, N2)
    p_row = p_table + (first_row + i_row) * COLUMNS
    i_l = tl.load(p_row + LINEAR)
    n = tl.multiple_of(pick(i_l, N0, N1, N2, NUM), ALIGN)
    rank = tl.load(p_row + RANK)
    p_g = pick(i_l, p_g0, p_g1, p_g2, NUM)
    p_q = pick(i_l, p_q0, p_q1, p_q2, NUM)
    p_w = pick(i_l, p_w0, p_w1, p_w2, NUM)
    linear = pick(i_l, linear_0, linear_1, linear_2, NUM)
    # Not a compiled size, but W, a multiple of eight, divides it: 16 bytes in one store.
    p_part += i_n * tl.multiple_of(part_stride.to(tl.int64), 8)
    p_done += tl.load(p_row + GROUP) * TILES + i_n
    for i in tl.static_range(CLASSES):
        if (rank > (8 << i if i > 0 else 0)) & (rank <= 16 << i):
            _reduce_piece(p_g, p_sums, p_done, p_p, p_q, p_w, p_part, p_rows, p_row, rank, n,
                          i_n, linear, MAX_N, W, BT, BN, 16 << i,
                          DROPOUT, FUSED, EVEN, (16 << i) < TURNED, SENT, RELOAD)  # fmt: skip


@triton.jit(do_not_specialize=["first_row", "linear_0", "linear_1", "linear_2", "part_stride"])
def reduce_kernel(
    p_g0, p_g1, p_g2, p_sums, p_done, p_p, p_q0, p_q1, p_q2, p_w0, p_w1, p_w2, p_part, p_rows,
    p_table, first_row, linear_0, linear_1, linear_2, part_stride,
    LIST: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, MAX_N: tl.constexpr,
    W: tl.constexpr, NUM: tl.constexpr, TILES: tl.constexpr, ENDS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, CLASSES: tl.constexpr, DROPOUT: tl.constexpr,
    FUSED: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, TURNED: tl.constexpr,
    SENT: tl.constexpr, RELOAD: tl.constexpr, LOOP: tl.constexpr, SNAKE: tl.constexpr,
):  # fmt: skip
    """grad[rank rows, features] += P^T drop(Q) over a chunk of a job: S and dY, or dS and X."""
    total = num_items(p_table, LIST, ENDS, BN, N0, N1, N2)
    i_item = tl.program_id(0)
    if LOOP:
        for i_round in tl.range(0, num_rounds(total, SNAKE), disable_licm=True):
            _reduce_item(p_g0, p_g1, p_g2, p_sums, p_done, p_p, p_q0, p_q1, p_q2,
                         p_w0, p_w1, p_w2, p_part, p_rows, p_table, first_row,
                         item_of(i_round, SNAKE), linear_0, linear_1, linear_2, part_stride,
                         N0, N1, N2, MAX_N, W, NUM, TILES, ENDS, BT, BN,
                         CLASSES, DROPOUT, FUSED, EVEN, ALIGN, TURNED, SENT, RELOAD)  # fmt: skip
    elif i_item < total:
        _reduce_item(p_g0, p_g1, p_g2, p_sums, p_done, p_p, p_q0, p_q1, p_q2,
                     p_w0, p_w1, p_w2, p_part, p_rows, p_table, first_row, i_item,
                     linear_0, linear_1, linear_2, part_stride,
                     N0, N1, N2, MAX_N, W, NUM, TILES, ENDS, BT, BN,
                     CLASSES, DROPOUT, FUSED, EVEN, ALIGN, TURNED, SENT, RELOAD)  # fmt: skip


@triton.jit
def _sum_item(
    p_s, p_part, p_row, i_b, part_stride,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, W: tl.constexpr,
    NUM: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr,
    CLASSES: tl.constexpr,
):  # fmt: skip
    count = tl.load(p_row + COUNT)
    if i_b * BT < count:
        rank, scale = tl.load(p_row + RANK), float_bits(tl.load(p_row + SCALE))
        start, col = tl.load(p_row + START).to(tl.int64), tl.multiple_of(tl.load(p_row + COL), 8)
        tiles = tl.cdiv(pick(tl.load(p_row + LINEAR), N0, N1, N2, NUM), BN)
        stride = tl.multiple_of(part_stride.to(tl.int64), 8)
        o_t = i_b * BT + tl.arange(0, BT)
        for i in tl.static_range(CLASSES):
            if (rank > (8 << i if i > 0 else 0)) & (rank <= 16 << i):
                o_r = tl.arange(0, 16 << i)
                m_r = o_r < tl.multiple_of((rank + 7) // 8 * 8, 8)
                m_s = (o_t < count)[:, None] & m_r[None, :]
                o_s = (start + o_t)[:, None] * W + col + o_r[None, :]
                b_s = tl.zeros([BT, 16 << i], dtype=tl.float32)
                for i_n in range(0, tiles, PARTS):
                    for j in tl.static_range(PARTS):
                        p_i = p_part + (i_n + j) * stride
                        m_i = m_s & (i_n + j < tiles)
                        b_s += tl.load(p_i + o_s, mask=m_i, other=0.0).to(tl.float32)
                tl.store(p_s + o_s, (b_s * scale).to(p_s.dtype.element_ty), mask=m_s)


@triton.jit(do_not_specialize=["first_row", "part_stride"])
def sum_kernel(
    p_s, p_part, p_table, first_row, part_stride,
    LIST: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, W: tl.constexpr,
    NUM: tl.constexpr, BLOCKS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    PARTS: tl.constexpr, CLASSES: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """dS[tokens, columns] = scale * the sum of its parts over tiles of features, in order."""
    total = tl.load(p_table + LIST) * BLOCKS
    i_item = tl.program_id(0)
    if LOOP:
        for i in tl.range(i_item, total, tl.num_programs(0), disable_licm=True):
            p_row = p_table + (first_row + i // BLOCKS) * COLUMNS
            _sum_item(p_s, p_part, p_row, i % BLOCKS, part_stride,
                      N0, N1, N2, W, NUM, BT, BN, PARTS, CLASSES)  # fmt: skip
    elif i_item < total:
        p_row = p_table + (first_row + i_item // BLOCKS) * COLUMNS
        _sum_item(p_s, p_part, p_row, i_item % BLOCKS, part_stride,
                  N0, N1, N2, W, NUM, BT, BN, PARTS, CLASSES)  # fmt: skip


def reduce(
    grads: list[torch.Tensor],
    p: torch.Tensor,
    q: list[torch.Tensor],
    blocks: Blocks,
    rows: torch.Tensor,
    linears: list[int],
    *,
    name: str,
    tuning: Tuning | None = None,
    w: list[torch.Tensor] | None = None,
    part: torch.Tensor | None = None,
) -> None:
    """grads_l += p^T drop(q_l). With w also part[tile] = q_l w_l^T over the features of a tile."""
    layout = blocks.layout
    dropout = layout.dropout and name == "reduce_a"
    tuning = tuning or tuning_of("reduce_a", shape_of(layout, p, p, dropout), p.device)
    n = layout.num_linears
    features = [q_l.shape[1] for q_l in q]
    tiles = -(-max(features) // tuning.features)
    fused = part is not None
    sums = torch.empty(layout.partial_rows, max(features), dtype=torch.float32, device=p.device)
    reduce_kernel[(num_programs(layout.capacity[name] * tiles, tuning, p.device),)](
        *three(grads), sums, blocks.finished, p, *three(q), *three(w if fused else q),
        part if fused else p, rows, blocks.table,
        layout.first_row[name], *three(linears), part[0].numel() if fused else 0,
        lists.LISTS.index(name), *three(features), max(features), p.shape[1], n, tiles,
        lists.ENDS.get(name, 0), tuning.tokens, tuning.features,
        rank_classes(layout.most_rank(name)),
        dropout, fused, all(size % tuning.features == 0 for size in features),
        alignment(features), tuning.turned, tuning.sent, tuning.reload,
        tuning.programs > 0, tuning.snake,
        num_warps=tuning.warps, num_stages=tuning.stages, **tuning.limits,
    )  # fmt: skip


def reduce_fused(
    ds: torch.Tensor,
    grads: list[torch.Tensor],
    s: torch.Tensor,
    dy: list[torch.Tensor],
    b: list[torch.Tensor],
    blocks: Blocks,
    rows: torch.Tensor,
    linears: list[int],
    *,
    tuning: Tuning | None = None,
    sum_tuning: Tuning | None = None,
    part_dtype: torch.dtype | None = None,
    slots: torch.Tensor | None = None,
) -> None:
    """grads_l += s^T dy_l and ds = scale * dy_l b_l^T, reading dy once. With `slots` ds is there
    too (pages.py)."""
    layout = blocks.layout
    features = [dy_l.shape[1] for dy_l in dy]
    shape = shape_of(layout, s, b[0], dropout=False)
    tuning = tuning or tuning_of("reduce_b", shape, s.device)
    tiles = -(-max(features) // tuning.features)
    part = torch.empty(tiles, *s.shape, dtype=part_dtype or s.dtype, device=s.device)
    reduce(grads, s, dy, blocks, rows, linears, name="reduce_b", tuning=tuning, w=b, part=part)
    sum_tuning = sum_tuning or tuning_of("sum", shape, s.device)
    if slots is None:
        sum_parts(ds, part, features, tuning.features, blocks, sum_tuning)
    else:
        sum_into_slots(
            ds, slots, part, features, tuning.features, blocks,
            tokens=sum_tuning.tokens, parts=SUM_PARTS,
        )  # fmt: skip


def sum_parts(
    ds: torch.Tensor,
    part: torch.Tensor,
    features: list[int],
    tile: int,
    blocks: Blocks,
    tuning: Tuning,
) -> None:
    """ds = scale * the sum of part[i] over the tiles of each linear's features."""
    layout = blocks.layout
    per_row = -(-layout.tiles.shrink_tokens // tuning.tokens)
    programs = num_programs(layout.capacity["shrink_dy"] * per_row, tuning, ds.device)
    sum_kernel[(programs,)](
        ds, part, blocks.table, layout.first_row["shrink_dy"], part[0].numel(),
        lists.LISTS.index("shrink_dy"), *three(features), ds.shape[1], layout.num_linears, per_row,
        tuning.tokens, tile, SUM_PARTS,
        rank_classes(layout.most_rank("shrink_dy")), tuning.programs > 0,
        num_warps=tuning.warps, **tuning.limits,
    )  # fmt: skip


def add_backward(
    dx: torch.Tensor | None,
    x: torch.Tensor,
    dy: list[torch.Tensor],
    s: torch.Tensor,
    a: torch.Tensor,
    b: list[torch.Tensor],
    grad_a: torch.Tensor,
    grad_b: list[torch.Tensor],
    blocks: Blocks,
    rows: torch.Tensor,
    linears: list[int],
    *,
    write: bool = False,
    fused: bool = True,
    slots: torch.Tensor | None = None,
) -> None:
    """grad_a += ..., grad_b += ..., and dx += ..., or with `write` dx = ... for every token.

    s is what forward gave; dx is None where nobody asks for it, or asks for it elsewhere, of dS in
    `slots`.
    """
    n = blocks.layout.num_linears
    ds = torch.empty_like(s)
    if fused:
        reduce_fused(ds, grad_b, s, dy, b, blocks, rows, linears, slots=slots)
    else:
        assert slots is None, "dS of slots comes in parts"
        shrink(ds, dy, b, blocks, rows, linears, name="shrink_dy")
        reduce(grad_b, s, dy, blocks, rows, linears, name="reduce_b")
    reduce([grad_a] * n, ds, [x] * n, blocks, rows, linears, name="reduce_a")
    if dx is not None:
        expand([dx], ds, [a], blocks, rows, linears, name="expand_dx", write=write)
