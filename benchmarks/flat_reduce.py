"""The gradient of B and parts of dS as one loop: a trial beside `reduce` of the product, for
`gpu_lora_kernels.py`.

`reduce` walks the tokens of an item, adds its gradient, and begins the next one with empty
pipelines. Here a program walks the blocks of tokens of all its items of one rank tile, so that
tiles of the next item are on their way while the sum of this one is sent off. B's tile comes with
every block (from the L2 cache after the first). Tiles must divide the features.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch.utils.weak import WeakTensorKeyDictionary

from tlora.kernels.multi_lora import blocks as lists
from tlora.kernels.multi_lora.blocks import Blocks
from tlora.kernels.multi_lora.settings import Tuning
from tlora.kernels.multi_lora.triton_backward import GROUP, INDEX, SUBNORMAL, ZERO
from tlora.kernels.multi_lora.triton_forward import (
    COL,
    COLUMNS,
    COUNT,
    FIRST,
    LINEAR,
    RANK,
    SIZE,
    START,
    TICKETS,
    W_ROW,
    alignment,
    num_programs,
    rank_classes,
    three,
)
from tlora.kernels.multi_lora.triton_items import pick

ROUNDS = 128
"""Items that a program may have of one rank tile."""
HEAD = tl.constexpr(8)
"""Numbers in front of the rows for each rank tile: items of the first linear, of two, of all; first
row of each linear."""


_tables = WeakTensorKeyDictionary()
"""By table of blocks and tile, which have to stay as they are."""


def flat_table(blocks: Blocks, tile: int) -> torch.Tensor:
    """The rows of `reduce_b` by rank tile and linear, the longest first, and where each begins."""
    known = _tables.setdefault(blocks.table, {})
    if tile not in known:
        known[tile] = _new_table(blocks, tile)
    return known[tile]


def _new_table(blocks: Blocks, tile: int) -> torch.Tensor:
    layout = blocks.layout
    host = blocks.table.cpu().numpy()
    count, first = host[0, lists.LISTS.index("reduce_b")], layout.first_row["reduce_b"]
    rows = host[first : first + count]
    classes = rank_classes(layout.most_rank("reduce_b"))
    tiles = np.array([out // tile for out in layout.out_features])
    of_class = np.maximum(0, np.ceil(np.log2(np.maximum(rows[:, lists.RANK], 1))).astype(int) - 4)
    head = np.zeros((classes, 8), dtype=np.int32)
    # Linears of one width are one: a chunk's rows side by side.
    uneven = len(set(layout.out_features)) > 1
    group = rows[:, lists.LINEAR] if uneven else np.zeros_like(rows[:, 0])
    order = np.lexsort((-rows[:, lists.COUNT], group, of_class))
    rows, of_class, group = rows[order], of_class[order], group[order]
    for i in range(classes):
        sizes = [int(((of_class == i) & (group == j)).sum()) for j in range(3)]
        items = np.cumsum([size * t for size, t in zip(sizes, [*tiles, 0, 0][:3], strict=True)])
        before = int((of_class < i).sum())
        head[i, :3], head[i, 3:6] = items, before + np.cumsum([0, *sizes[:2]])
    flat = np.concatenate([head.reshape(-1), rows.reshape(-1)])
    padded = np.zeros(classes * 8 + layout.capacity["reduce_b"] * lists.COLUMNS, dtype=np.int32)
    padded[: len(flat)] = flat
    return torch.from_numpy(padded).to(blocks.table.device)


@triton.jit
def _place(p_head, i_item, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr):
    """Row and tile of items of one rank tile, a number or many."""
    if T0 == T1 and T0 == T2:
        i_row, i_n = tl.load(p_head + 3) + i_item // T0, i_item % T0
    else:
        items_0, items_1 = tl.load(p_head), tl.load(p_head + 1)
        i_l = (i_item >= items_0).to(tl.int32) + (i_item >= items_1).to(tl.int32)
        i_own = i_item - pick(i_l, 0, items_0, items_1, 3)
        tiles = pick(i_l, T0, T1, T2, 3)
        row = pick(i_l, tl.load(p_head + 3), tl.load(p_head + 4), tl.load(p_head + 5), 3)
        i_row, i_n = row + i_own // tiles, i_own % tiles
    return i_row, i_n


@triton.jit
def _put(p_out, b_g, m_g, is_stored):
    """Stored, or sent to the memory, which adds it."""
    if is_stored:
        tl.store(p_out, tl.where(tl.abs(b_g) < SUBNORMAL, 0.0, b_g), mask=m_g)
    else:
        tl.atomic_add(p_out, b_g, mask=m_g, sem="relaxed")


@triton.jit
def _halves(b, RUN: tl.constexpr):
    """Of the columns, taken in turn by so many."""
    ROWS: tl.constexpr = b.shape[0]
    HALF: tl.constexpr = b.shape[1] // 2
    b = tl.permute(tl.reshape(b, (ROWS, HALF // RUN, 2, RUN)), (0, 1, 3, 2))
    b_0, b_1 = tl.split(b)
    return tl.reshape(b_0, (ROWS, HALF)), tl.reshape(b_1, (ROWS, HALF))


@triton.jit
def _put_slowly(p_out, b_g, o_r, width, m_g, is_stored, BN: tl.constexpr):
    """The same in eight parts of the columns: each changes places between threads in an eighth of
    the room. A part has 16 columns of every 128, as the products leave them in one thread."""
    o_c = tl.arange(0, BN // 8)
    p_c = p_out + o_r[:, None] * width + (o_c // 16 * 128 + o_c % 16)[None, :]
    b_0, b_1 = _halves(b_g, 64)
    for i in tl.static_range(2):
        b_2, b_3 = _halves(b_0 if i == 0 else b_1, 32)
        for j in tl.static_range(2):
            b_4, b_5 = _halves(b_2 if j == 0 else b_3, 16)
            _put(p_c + i * 64 + j * 32, b_4, m_g, is_stored)
            _put(p_c + i * 64 + j * 32 + 16, b_5, m_g, is_stored)


@triton.jit
def _add_up(
    p_g, p_sums, p_done, p_row, o_r, o_n, n, MAX_N: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """The last to finish adds all sums of the job in their order."""
    size = tl.load(p_row + SIZE)
    p_done += tl.load(p_row + GROUP) * TILES
    tl.debug_barrier()
    if tl.atomic_add(p_done, 1, sem="acq_rel") == size - 1:
        rank = tl.load(p_row + RANK)
        m_r = (o_r < rank)[:, None]
        p_tile = p_g + o_r[:, None] * n + o_n[None, :]
        p_i = p_sums + tl.load(p_row + FIRST).to(tl.int64) * MAX_N
        p_i += o_r[:, None] * MAX_N + o_n[None, :]
        b_g = tl.load(p_tile, mask=m_r & (tl.load(p_row + ZERO) == 0), other=0.0)
        for i in range(size):
            p_part = p_i + i * rank.to(tl.int64) * MAX_N
            b_g += tl.load(p_part, mask=m_r, other=0.0, cache_modifier=".cg")
        tl.store(p_tile, b_g, mask=m_r)
        tl.store(p_done, 0)


@triton.jit
def _flat_class(
    p_g0, p_g1, p_g2, p_sums, p_done, p_p, p_q0, p_q1, p_q2, p_w0, p_w1, p_w2, p_part,
    p_head, p_rows, before, part_stride,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, MAX_N: tl.constexpr, W: tl.constexpr,
    NUM: tl.constexpr, TILES: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    ALIGN: tl.constexpr, TURNED: tl.constexpr, SLOWLY: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    T0: tl.constexpr = N0 // BN
    T1: tl.constexpr = N1 // BN
    T2: tl.constexpr = N2 // BN
    programs = tl.num_programs(0)
    total = tl.load(p_head + 2)
    # Who is next after the items of the rank tiles before.
    i_first = (tl.program_id(0) + programs - before % programs) % programs
    o_item = i_first + tl.arange(0, ROUNDS) * programs
    o_row, _ = _place(p_head, o_item, T0, T1, T2)
    o_count = tl.load(p_rows + o_row * COLUMNS + COUNT, mask=o_item < total, other=0)
    num_steps = tl.sum((o_count + BT - 1) // BT)
    most = tl.max(tl.load(p_rows + o_row * COLUMNS + SIZE, mask=o_item < total, other=0))

    o_r = tl.arange(0, BR)
    o_t = tl.arange(0, BT)
    o_n = tl.arange(0, BN)
    o_p = o_t[:, None] * W + o_r[None, :]
    b_g = tl.zeros([BN if TURNED else BR, BR if TURNED else BN], dtype=tl.float32)
    i_item = i_first - programs
    i_row, i_n, i_t, count, i_l, rank, i_col = 0, 0, 0, 0, 0, 0, 0
    start, w_row = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for _ in tl.range(0, num_steps, disable_licm=True):
        # Counted on at the beginning: what the next block needs must not wait for this one's end.
        i_t += BT
        is_new = i_t >= count
        if is_new:  # Inside a branch, so that no stage of the pipeline is spent on them.
            i_item += programs
            i_row, i_n = _place(p_head, i_item, T0, T1, T2)
            p_new = p_rows + i_row * COLUMNS
            i_t, count = 0, tl.load(p_new + COUNT)
            i_l, rank = tl.load(p_new + LINEAR), tl.load(p_new + RANK)
            start, w_row = tl.load(p_new + START).to(tl.int64), tl.load(p_new + W_ROW).to(tl.int64)
            i_col = tl.load(p_new + COL) // 8
        p_row = p_rows + i_row * COLUMNS
        i_t64 = start + i_t
        col = i_col * 8
        n = tl.multiple_of(pick(i_l, N0, N1, N2, NUM), ALIGN)
        p_q = pick(i_l, p_q0, p_q1, p_q2, NUM) + i_t64 * n + i_n * BN
        p_w = pick(i_l, p_w0, p_w1, p_w2, NUM) + w_row * n + i_n * BN
        m_t = o_t < count - i_t
        m_p = m_t[:, None] & (o_r < tl.multiple_of((rank + 7) // 8 * 8, 8))[None, :]
        o_w = o_r[:, None] * n + o_n[None, :]
        b_p = tl.load(p_p + i_t64 * W + col + o_p, mask=m_p, other=0.0)  # [BT, BR]
        b_q = tl.load(p_q + o_t[:, None] * n + o_n[None, :], mask=m_t[:, None], other=0.0)
        b_w = tl.load(p_w + o_w, mask=(o_r < rank)[:, None], other=0.0)  # [BR, BN]
        if TURNED:
            b_g = tl.dot(tl.trans(b_q), b_p, b_g, input_precision="ieee")
        else:
            b_g = tl.dot(tl.trans(b_p), b_q, b_g, input_precision="ieee")
        b_d = tl.dot(b_q, tl.trans(b_w), input_precision="ieee")  # [BT, BR]
        p_d = p_part + i_n * tl.multiple_of(part_stride.to(tl.int64), 8) + i_t64 * W + col
        tl.store(p_d + o_p, b_d.to(p_part.dtype.element_ty), mask=m_p)
        is_last = i_t + BT >= count
        if is_last:
            size = tl.load(p_row + SIZE)
            is_stored = (size > 1) | (tl.load(p_row + ZERO) != 0)
            p_g = pick(i_l, p_g0, p_g1, p_g2, NUM) + w_row * n + i_n * BN
            p_own = p_sums + tl.load(p_row + FIRST).to(tl.int64) * MAX_N + i_n * BN
            stride = rank.to(tl.int64) * MAX_N
            p_out = tl.where(size == 1, p_g, p_own + tl.load(p_row + INDEX) * stride)
            m_r = o_r < rank
            width = tl.multiple_of(tl.where(size == 1, n, MAX_N), ALIGN)
            if SLOWLY:
                _put_slowly(p_out, b_g, o_r, width, m_r[:, None], is_stored, BN)
            elif TURNED:
                _put(p_out + o_n[:, None] + o_r[None, :] * width, b_g, m_r[None, :], is_stored)
            else:
                _put(p_out + o_r[:, None] * width + o_n[None, :], b_g, m_r[:, None], is_stored)
        b_g = tl.where(is_last, 0.0, b_g)
    if most > 1:
        # Jobs whose sums are in several parts. Not in the loop above: a loop inside it would keep
        # its loads from being asked for ahead.
        for i in range(i_first, total, programs):
            i_row, i_n = _place(p_head, i, T0, T1, T2)
            p_row = p_rows + i_row * COLUMNS
            if tl.load(p_row + SIZE) > 1:
                i_l, w_row = tl.load(p_row + LINEAR), tl.load(p_row + W_ROW).to(tl.int64)
                n = tl.multiple_of(pick(i_l, N0, N1, N2, NUM), ALIGN)
                p_g = pick(i_l, p_g0, p_g1, p_g2, NUM) + w_row * n + i_n * BN
                _add_up(p_g, p_sums + i_n * BN, p_done + TICKETS + i_n, p_row, o_r, o_n, n,
                        MAX_N, TILES)  # fmt: skip
    return before + total


@triton.jit(do_not_specialize=["part_stride"])
def flat_kernel(
    p_g0, p_g1, p_g2, p_sums, p_done, p_p, p_q0, p_q1, p_q2, p_w0, p_w1, p_w2, p_part, p_table,
    part_stride,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, MAX_N: tl.constexpr, W: tl.constexpr,
    NUM: tl.constexpr, TILES: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    CLASSES: tl.constexpr, ALIGN: tl.constexpr, TURNED: tl.constexpr, SLOWLY: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    p_rows = p_table + CLASSES * HEAD
    before = 0
    for i in tl.static_range(CLASSES):
        before = _flat_class(
            p_g0, p_g1, p_g2, p_sums, p_done, p_p, p_q0, p_q1, p_q2, p_w0, p_w1, p_w2, p_part,
            p_table + (CLASSES - 1 - i) * HEAD, p_rows, before, part_stride,
            N0, N1, N2, MAX_N, W, NUM, TILES, BT, BN, 16 << (CLASSES - 1 - i),
            ALIGN, (16 << (CLASSES - 1 - i)) < TURNED,
            SLOWLY and (16 << (CLASSES - 1 - i)) >= TURNED, ROUNDS,
        )  # fmt: skip


def reduce_flat(
    grads: list[torch.Tensor],
    p: torch.Tensor,
    q: list[torch.Tensor],
    blocks: Blocks,
    table: torch.Tensor,
    tuning: Tuning,
    w: list[torch.Tensor],
    part: torch.Tensor,
) -> None:
    """What `reduce` of the product does as `reduce_b`; `table` from flat_table."""
    layout = blocks.layout
    features = [q_l.shape[1] for q_l in q]
    assert all(size % tuning.features == 0 for size in features), "tiles must divide the features"
    tiles = max(features) // tuning.features
    programs = num_programs(layout.capacity["reduce_b"] * tiles, tuning, p.device)
    sums = torch.empty(layout.partial_rows, max(features), dtype=torch.float32, device=p.device)
    flat_kernel[(programs,)](
        *three(grads), sums, blocks.finished, p, *three(q), *three(w), part, table,
        part[0].numel(), *three(features), max(features), p.shape[1], layout.num_linears, tiles,
        tuning.tokens, tuning.features, rank_classes(layout.most_rank("reduce_b")),
        alignment(features), tuning.turned, tuning.stages > 2, ROUNDS,
        num_warps=tuning.warps, num_stages=tuning.stages, **tuning.limits,
    )  # fmt: skip
