"""Items of a work list: which of them a program takes, and where an item lies.

A program takes every n-th item (turns); or does so, but from the other end in every other round
(`SNAKE`): lists begin with the longest, and who had a long one gets a short one; or takes the next
that nobody has (`QUEUE`). Who takes an item changes no bit of it.
"""

import triton
import triton.language as tl

from tlora.kernels.multi_lora import blocks as lists
from tlora.kernels.multi_lora import settings

TAKEN = tl.constexpr(lists.TAKEN)
LEFT = tl.constexpr(lists.LEFT)
SNAKE = tl.constexpr(settings.SHARINGS.index("snake"))
QUEUE = tl.constexpr(settings.SHARINGS.index("queue"))


@triton.jit
def pick(i, v_0, v_1, v_2, NUM: tl.constexpr):
    """The i-th of up to three values or pointers."""
    v = v_0
    if NUM > 1:
        v = tl.where(i == 1, v_1, v)
    if NUM > 2:
        v = tl.where(i == 2, v_2, v)
    return v


@triton.jit
def num_items(
    p_table, LIST: tl.constexpr, ENDS: tl.constexpr, BN: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
):  # fmt: skip
    """Of a list, every row of which has as many items as its linear has tiles of features."""
    TILES_0: tl.constexpr = (N0 + BN - 1) // BN
    TILES_1: tl.constexpr = (N1 + BN - 1) // BN
    TILES_2: tl.constexpr = (N2 + BN - 1) // BN
    rows = tl.load(p_table + LIST)
    if TILES_0 == TILES_1 and TILES_0 == TILES_2:
        total = rows * TILES_0
    else:
        end_0, end_1 = tl.load(p_table + ENDS), tl.load(p_table + ENDS + 1)
        total = end_0 * TILES_0 + (end_1 - end_0) * TILES_1 + (rows - end_1) * TILES_2
    return total


@triton.jit
def place_of(
    p_table, i_item, ENDS: tl.constexpr, BN: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
):  # fmt: skip
    """The row of an item, and its tile."""
    TILES_0: tl.constexpr = (N0 + BN - 1) // BN
    TILES_1: tl.constexpr = (N1 + BN - 1) // BN
    TILES_2: tl.constexpr = (N2 + BN - 1) // BN
    if TILES_0 == TILES_1 and TILES_0 == TILES_2:
        i_row, i_n = i_item // TILES_0, i_item % TILES_0
    else:
        end_0, end_1 = tl.load(p_table + ENDS), tl.load(p_table + ENDS + 1)
        items_0 = end_0 * TILES_0
        items_1 = items_0 + (end_1 - end_0) * TILES_1
        i_l = (i_item >= items_0).to(tl.int32) + (i_item >= items_1).to(tl.int32)
        tiles = pick(i_l, TILES_0, TILES_1, TILES_2, 3)
        i_own = i_item - pick(i_l, 0, items_0, items_1, 3)
        i_row, i_n = pick(i_l, 0, end_0, end_1, 3) + i_own // tiles, i_own % tiles
    return i_row, i_n


@triton.jit
def num_rounds(total, SHARING: tl.constexpr):
    """Items that this program takes of so many, in turn or from both ends."""
    i_program, programs = tl.program_id(0), tl.num_programs(0)
    whole = total // programs
    if SHARING == SNAKE:
        i_program = tl.where(whole % 2 == 1, programs - 1 - i_program, i_program)
    return whole + (i_program < total % programs).to(tl.int32)


@triton.jit
def item_of(i_round, SHARING: tl.constexpr):
    i_program, programs = tl.program_id(0), tl.num_programs(0)
    if SHARING == SNAKE:
        i_program = tl.where(i_round % 2 == 1, programs - 1 - i_program, i_program)
    return i_round * programs + i_program


@triton.jit
def next_in_queue(p_queue, i_item, i_round, total):
    """What follows `i_item`; the first of each program is that of its own number. None is taken
    that is not done: no other program could have it."""
    if (i_round > 0) & (i_item < total):
        i_item = tl.atomic_add(p_queue + TAKEN, 1, sem="relaxed") + tl.num_programs(0)
    return i_item


@triton.jit
def most_rounds(total):
    """Items that one program may take from a queue: enough that all are taken, few enough to count
    on to the end. (Of a loop without an end the compiler moves addresses out, and spills.)"""
    return 4 * tl.cdiv(total, tl.num_programs(0)) + 4


@triton.jit
def leave_queue(p_queue):
    """The last to leave makes it ready for the next launch."""
    if tl.atomic_add(p_queue + LEFT, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(p_queue + TAKEN, 0)
        tl.store(p_queue + LEFT, 0)
