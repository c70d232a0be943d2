"""Which rank rows the blocks of tokens need: the table of products that take the update inside."""

from dataclasses import replace

import numpy as np
import pytest

from tlora.kernels.multi_lora import pages
from tlora.kernels.multi_lora.blocks import COLUMNS, Layout, build_table
from tlora.kernels.multi_lora.tables import Segment

TOKENS = 300


def segment(start: int, stop: int, row: int, ranks: tuple[int, ...] = (8, 16)) -> Segment:
    return Segment(start, stop, row, ranks, tuple(row + 100 * i for i in range(len(ranks))), 1.0)


def read(found: pages.Pages, num_linears: int) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    """By linear and block: first row, tokens from and to, column, rank rows, as a kernel reads the
    table."""
    ints = pages.table(found, TOKENS, num_linears)
    blocks = pages.num_blocks(TOKENS)
    heads = ints[: num_linears * blocks * pages.HEAD].reshape(num_linears, blocks, pages.HEAD)
    places = ints[heads.size :].reshape(num_linears, blocks, pages.SLOTS, 4)
    lists = {}
    for linear in range(num_linears):
        for block in range(blocks):
            head = heads[linear, block]
            fours = np.ascontiguousarray(head[2:]).view(np.uint64)
            lists[linear, block] = [
                (int(fours[i // 4] >> np.uint64(i % 4 * 16)) & 0xFFFF, *places[linear, block, i])
                for i in range(head[0])
            ]
    return lists


def test_a_block_has_a_page_for_each_of_its_jobs():
    """In the order of its tokens; forward has the rows of B, each linear its own."""
    jobs = [segment(0, 100, 40), segment(100, 100, 7), segment(100, 290, 8)]
    found = read(pages.find(jobs, TOKENS, "forward"), 2)
    assert found[0, 0] == [(40, 0, 100, 0, 8), (8, 100, 290, 0, 8)]
    assert found[1, 0] == [(140, 0, 100, 8, 16), (108, 100, 290, 8, 16)]
    assert found[0, 1] == found[0, 2] == [(8, 100, 290, 0, 8)]


def test_a_job_that_ends_with_a_block_is_not_in_the_next():
    found = read(pages.find([segment(0, 128, 40), segment(128, 256, 8)], TOKENS, "forward"), 2)
    assert [page[0] for page in found[0, 0]] == [40]
    assert [page[0] for page in found[0, 1]] == [8]
    assert found[0, 2] == []


def test_backward_has_the_rows_of_a_in_one_list():
    """One linear after the other."""
    found = read(pages.find([segment(0, 10, 40, (5, 16))], TOKENS, "backward"), 1)
    assert found[0, 0] == [(40, 0, 10, 0, 5), (45, 0, 10, 8, 16)]
    assert found[0, 1] == []


def test_linears_share_pages_where_rows_and_columns_follow_each_other():
    found = read(pages.find([segment(0, 10, 40, (32, 24, 16))], TOKENS, "backward"), 1)
    assert found[0, 0] == [(40, 0, 10, 0, 64), (104, 0, 10, 64, 8)]


def test_ranks_beyond_a_page_have_several_and_rank_zero_none():
    found = read(pages.find([segment(0, 10, 3, (0, 130))], TOKENS, "forward"), 2)
    assert found[0, 0] == []
    assert found[1, 0] == [
        (103, 0, 10, 0, 64), (167, 0, 10, 64, 64), (231, 0, 10, 128, 2)
    ]  # fmt: skip


def test_nobody_needs_nothing():
    found = pages.find([], TOKENS, "forward")
    assert found.fit
    assert not pages.table(found, TOKENS, 2).any()


def test_crowds_and_far_rows_do_not_fit():
    crowd = [segment(3 * i, 3 * i + 3, i) for i in range(33)]
    assert not pages.find(crowd, TOKENS, "forward").fit
    assert pages.find(crowd[1:], TOKENS, "forward").fit
    far = replace(crowd[0], b_rows=(0, 65_536))
    assert not pages.find([far], TOKENS, "forward").fit
    assert pages.find([far], TOKENS, "backward").fit, "rows of A are near"


def test_rows_of_sixteen_bits_keep_their_highest():
    """The fourth of four numbers is in the sign bit's place."""
    crowd = [replace(segment(10 * i, 10 * i + 10, i), b_rows=(65_000, 40_000)) for i in range(4)]
    found = read(pages.find(crowd, TOKENS, "forward"), 2)
    assert [page[0] for page in found[0, 0]] == [65_000] * 4
    assert [page[0] for page in found[1, 0]] == [40_000] * 4


@pytest.mark.parametrize("inside", [None, "forward"])
def test_lists_carry_the_pages_behind_them(inside: pages.Way | None):
    """At a place that 8 bytes divide; other lists are as without."""
    layout = Layout(
        num_tokens=TOKENS, in_features=64, out_features=(64, 64), max_segments=8, max_rank=16
    )
    jobs = [segment(0, 100, 40), segment(100, 290, 8)]
    plain, found = (build_table(each, jobs) for each in (layout, replace(layout, inside=inside)))
    assert (found[: len(plain)] == plain).all()
    extra = found[len(plain) :].reshape(-1).numpy()
    if not inside:
        assert len(extra) == 0
        return
    wanted = pages.table(pages.find(jobs, TOKENS, inside), TOKENS, 2)
    assert (extra[: len(wanted)] == wanted).all()
    laid = replace(layout, inside=inside)
    assert laid.first_head(0) == plain.numel()
    assert laid.first_head(0) * 4 % 8 == 0 and laid.first_head(1) * 4 % 8 == 0
    assert laid.first_page - laid.first_head(0) == 2 * pages.num_blocks(TOKENS) * pages.HEAD
    assert len(extra) < len(wanted) + COLUMNS


@pytest.mark.parametrize(("inside", "lists"), [(None, 0), ("forward", 2), ("backward", 1)])
def test_dx_of_all_linears_has_one_list(inside: pages.Way | None, lists: int):
    """And no room for more: S of each takes memory."""
    layout = Layout(
        num_tokens=TOKENS,
        in_features=64,
        out_features=(64, 64),
        max_segments=8,
        max_rank=16,
        inside=inside,
    )
    assert layout.page_lists == lists
    assert layout.first_page - layout.first_head(0) == lists * pages.num_blocks(TOKENS) * pages.HEAD
