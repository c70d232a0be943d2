"""Items of a work list: which of them a program takes, and where an item lies.

A program takes every n-th item; or does so, but from the other end in every other round (`SNAKE`):
lists begin with the longest, and who had a long one gets a short one. Who takes an item changes no
bit of it.
"""

import triton
import triton.language as tl


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
def num_rounds(total, SNAKE: tl.constexpr):
    """Items that this program takes of so many."""
    i_program, programs = tl.program_id(0), tl.num_programs(0)
    whole = total // programs
    if SNAKE:
        i_program = tl.where(whole % 2 == 1, programs - 1 - i_program, i_program)
    return whole + (i_program < total % programs).to(tl.int32)


@triton.jit
def item_of(i_round, SNAKE: tl.constexpr):
    i_program, programs = tl.program_id(0), tl.num_programs(0)
    if SNAKE:
        i_program = tl.where(i_round % 2 == 1, programs - 1 - i_program, i_program)
    return i_round * programs + i_program
