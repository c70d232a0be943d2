"""Which rank rows the blocks of tokens need: the table of products that take the update inside."""

from dataclasses import replace

import numpy as np
import pytest

from tlora.kernels.multi_lora import pages
from tlora.kernels.multi_lora.blocks import (
    COLUMNS,
    FIRST,
    LINEAR,
    LISTS,
    SIZE,
    Layout,
    build_table,
)
from tlora.kernels.multi_lora.tables import Segment

TOKENS = 300


def segment(start: int, stop: int, row: int, ranks: tuple[int, ...] = (8, 16)) -> Segment:
    return Segment(start, stop, row, ranks, tuple(row + 100 * i for i in range(len(ranks))), 1.0)


def read(found: pages.Pages, num_lists: int) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    """By list and block: first row, tokens from and to, column, rank rows, as a kernel reads the
    table."""
    ints = pages.table(found, TOKENS, num_lists)
    blocks = pages.num_blocks(TOKENS)
    heads = ints[: num_lists * blocks * pages.HEAD].reshape(num_lists, blocks, pages.HEAD)
    places = ints[heads.size :].reshape(num_lists, blocks, pages.SLOTS, pages.PAGE_COLUMNS)
    lists = {}
    for number in range(num_lists):
        for block in range(blocks):
            head = heads[number, block]
            fours = np.ascontiguousarray(head[2:]).view(np.uint64)
            lists[number, block] = [
                (
                    int(fours[i // 4] >> np.uint64(i % 4 * 16)) & 0xFFFF,
                    *places[number, block, i, : pages.RANK + 1],
                )
                for i in range(head[0])
            ]
    return lists


def test_a_block_has_a_page_for_each_of_its_jobs():
    """In the order of its tokens; forward has the columns of B turned, each linear its own, where
    jobs with tokens follow each other in sixteens."""
    jobs = [segment(0, 100, 40), segment(100, 100, 7), segment(100, 290, 8, (24, 17))]
    found = read(pages.find(jobs, TOKENS, ("forward",)), 2)
    assert found[0, 0] == [(0, 0, 100, 0, 8), (16, 100, 290, 0, 24)]
    assert found[1, 0] == [(0, 0, 100, 8, 16), (16, 100, 290, 24, 17)]
    assert found[0, 1] == found[0, 2] == [(16, 100, 290, 0, 24)]


def test_a_job_that_ends_with_a_block_is_not_in_the_next():
    jobs = [segment(0, 128, 40), segment(128, 256, 8)]
    found = read(pages.find(jobs, TOKENS, ("backward",)), 1)
    assert [page[0] for page in found[0, 0]] == [40]
    assert [page[0] for page in found[0, 1]] == [8]
    assert found[0, 2] == []


def test_backward_has_the_rows_of_a_in_one_list():
    """One linear after the other."""
    found = read(pages.find([segment(0, 10, 40, (5, 16))], TOKENS, ("backward",)), 1)
    assert found[0, 0] == [(40, 0, 10, 0, 5), (45, 0, 10, 8, 16)]
    assert found[0, 1] == []


def test_linears_share_pages_where_rows_and_columns_follow_each_other():
    found = read(pages.find([segment(0, 10, 40, (32, 24, 16))], TOKENS, ("backward",)), 1)
    assert found[0, 0] == [(40, 0, 10, 0, 64), (104, 0, 10, 64, 8)]


def test_ranks_beyond_a_page_have_several_and_rank_zero_none():
    found = read(pages.find([segment(0, 10, 3, (0, 130))], TOKENS, ("forward",)), 2)
    assert found[0, 0] == []
    assert found[1, 0] == [(0, 0, 10, 0, 64), (64, 0, 10, 64, 64), (128, 0, 10, 128, 2)]


def test_lists_of_both_ways_lie_one_behind_the_other():
    """With the same pages as those of one way."""
    jobs = [segment(0, 100, 40), segment(100, 290, 8, (0, 70))]
    ways = [("forward",), ("backward",), ("forward", "backward")]
    forward, backward, both = (
        read(pages.find(jobs, TOKENS, way), pages.num_lists(2, way)) for way in ways
    )
    last = {(2, block): found for (_, block), found in backward.items()}
    assert both == {**forward, **last}
    assert last[2, 0] and forward[1, 0]


def test_a_page_says_where_linears_begin_and_what_dS_is_scaled_by():
    [job] = [replace(segment(0, 10, 40, (8, 24, 16)), scale=-1.5)]
    [page] = pages.find([job], TOKENS, ("backward",)).values
    assert page[[pages.SECOND, pages.THIRD]].tolist() == [8, 32]
    assert page[[pages.SCALE]].astype(np.int32).view(np.float32) == -1.5
    [page] = pages.find([segment(0, 10, 40, (8,))], TOKENS, ("backward",)).values
    assert page[pages.SECOND] == page[pages.THIRD] > 1 << 20


def test_nobody_needs_nothing():
    found = pages.find([], TOKENS, ("forward",))
    assert found.fit
    assert not pages.table(found, TOKENS, 2).any()


def test_crowds_and_far_rows_do_not_fit():
    crowd = [segment(3 * i, 3 * i + 3, i) for i in range(33)]
    assert not pages.find(crowd, TOKENS, ("forward",)).fit
    assert pages.find(crowd[1:], TOKENS, ("forward",)).fit
    far = replace(crowd[0], a_row=65_536)
    assert not pages.find([far], TOKENS, ("backward",)).fit
    assert pages.find([far], TOKENS, ("forward",)).fit, "B turned has the rows that there are"


def test_rows_of_sixteen_bits_keep_their_highest():
    """The fourth of four numbers is in the sign bit's place."""
    crowd = [segment(10 * i, 10 * i + 10, 65_000 + i) for i in range(4)]
    found = read(pages.find(crowd, TOKENS, ("backward",)), 1)
    assert [page[0] for page in found[0, 0]] == [65_000, 65_001, 65_002, 65_003]


@pytest.mark.parametrize("inside", [(), ("backward",), ("forward", "backward")])
def test_lists_carry_the_pages_behind_them(inside: pages.Ways):
    """At a place that 8 bytes divide; other lists are as without, but that pieces of Y say where
    they are in B turned."""
    layout = Layout(
        num_tokens=TOKENS, in_features=64, out_features=(64, 64), max_segments=8, max_rank=16
    )
    jobs = [segment(0, 100, 40), segment(100, 290, 8)]
    plain, found = (build_table(each, jobs) for each in (layout, replace(layout, inside=inside)))
    first = layout.first_row["pieces_y"]
    pieces = found[first : first + layout.capacity["pieces_y"]]
    assert pieces[:, SIZE].any() == ("forward" in inside)
    pieces[:, [FIRST, SIZE]] = 0
    assert (found[: len(plain)] == plain).all()
    extra = found[len(plain) :].reshape(-1).numpy()
    if not inside:
        assert len(extra) == 0
        return
    laid = replace(layout, inside=inside)
    lists = laid.page_lists
    wanted = pages.table(pages.find(jobs, TOKENS, inside), TOKENS, lists)
    assert (extra[: len(wanted)] == wanted).all()
    assert laid.first_head(0) == plain.numel()
    assert laid.first_head(0) * 4 % 8 == 0 and laid.first_head(1) * 4 % 8 == 0
    assert laid.first_page(0) == laid.first_head(lists)
    assert laid.first_page(lists) == laid.first_head(0) + len(wanted)
    assert len(extra) < len(wanted) + COLUMNS


@pytest.mark.parametrize(
    ("inside", "lists"),
    [((), 0), (("forward",), 2), (("backward",), 1), (("forward", "backward"), 3)],
)
def test_dx_of_all_linears_has_one_list(inside: pages.Ways, lists: int):
    """Behind those of Y."""
    layout = Layout(
        num_tokens=TOKENS,
        in_features=64,
        out_features=(64, 64),
        max_segments=8,
        max_rank=16,
        inside=inside,
    )
    assert layout.page_lists == lists
    if "forward" in inside:
        assert layout.lists_of("forward") == range(2)
    if "backward" in inside:
        assert layout.lists_of("backward") == range(lists - 1, lists)


def test_pieces_of_b_turned_lie_side_by_side_with_a_page_of_nothing_behind_the_last():
    """So every column that some page reads is written."""
    layout = Layout(
        num_tokens=TOKENS, in_features=64, out_features=(64, 64), max_segments=4, max_rank=130,
        inside=("forward",),
    )  # fmt: skip
    jobs = [segment(0, 100, 40, (8, 0)), segment(100, 290, 8, (130, 24)), segment(290, 291, 9)]
    table = build_table(layout, jobs).numpy()
    first, count = layout.first_row["pieces_y"], table[0, LISTS.index("pieces_y")]
    pieces = table[first : first + count]
    for linear, columns in enumerate(([0, 16, 80, 144, 160], [0, 32])):
        mine = pieces[pieces[:, LINEAR] == linear]
        assert mine[:, FIRST].tolist() == columns
        ends = mine[:, FIRST] + mine[:, SIZE]
        assert ends[:-1].tolist() == columns[1:]
        assert ends[-1] == columns[-1] + 16 + pages.PAGE <= layout.turned_columns
    found = pages.find(jobs, TOKENS, layout.inside)
    assert set(found.first_row[found.number == 0]) == {0, 16, 80, 144, 160}


@pytest.mark.parametrize("rank", [1, 16, 80, 130])
def test_b_turned_has_room_for_as_many_jobs_as_a_layout_does(rank: int):
    """And for the page behind the last of them."""
    layout = Layout(
        num_tokens=TOKENS, in_features=64, out_features=(64,), max_segments=3, max_rank=rank,
        inside=("forward",),
    )  # fmt: skip
    jobs = [segment(100 * i, 100 * i + 100, rank * i, (rank,)) for i in range(3)]
    table = build_table(layout, jobs).numpy()
    first, count = layout.first_row["pieces_y"], table[0, LISTS.index("pieces_y")]
    pieces = table[first : first + count]
    last_page = pages.find(jobs, TOKENS, layout.inside).first_row.max() + pages.PAGE
    assert last_page <= (pieces[:, FIRST] + pieces[:, SIZE]).max() <= layout.turned_columns
