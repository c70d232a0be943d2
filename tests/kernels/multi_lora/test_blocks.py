"""The work lists: complete, bounded, and blind to neighbours."""

from dataclasses import replace

import pytest
import torch

from tlora.kernels.multi_lora import blocks
from tlora.kernels.multi_lora.blocks import Layout, Tiles, build_table
from tlora.kernels.multi_lora.tables import Segment

TILES = Tiles(
    shrink_tokens=16,
    shrink_rank=32,
    expand_tokens=32,
    chunk_tokens=32,
    chunk_rank=16,
    stack_rank=16,
)
LAYOUT = Layout(
    num_tokens=100,
    in_features=64,
    out_features=(64, 32),
    max_segments=4,
    max_rank=40,
    tiles=TILES,
)


def rows(table, name):
    count = int(table[0, blocks.LISTS.index(name)])
    first = LAYOUT.first_row[name]
    return table[first : first + count]


def segment(start, stop, a_row=0, ranks=(8, 8), threshold=0):
    return Segment(
        start, stop, a_row, ranks, (a_row, a_row), 2.0, threshold=threshold, key=2**31 + 5
    )


@pytest.mark.parametrize("threshold", [0, 2**28])
def test_every_token_is_expanded_once_for_each_linear(threshold):
    table = build_table(LAYOUT, [segment(3, 60, threshold=threshold), segment(60, 61, 20, (5, 0))])
    for name, linears in (("expand_y", 2), ("expand_dx", 1)):
        seen = torch.zeros(linears, 100, dtype=torch.int64)
        for row in rows(table, name).tolist():
            seen[row[blocks.LINEAR], row[blocks.START] : row[blocks.START] + row[blocks.COUNT]] += 1
        assert torch.equal(seen, torch.ones_like(seen))


def test_no_row_is_wider_than_its_tile():
    table = build_table(LAYOUT, [segment(0, 100, ranks=(40, 33))])
    for name, cap in (("shrink_x", 32), ("shrink_dy", 32), ("reduce_a", 16), ("reduce_b", 16)):
        ranks = rows(table, name)[:, blocks.RANK]
        assert ranks.min() > 0 and ranks.max() <= cap


def test_a_full_layout_fits():
    """As many segments as allowed, of the largest rank, each just over a block; no more."""
    lengths = [33, 33, 33, 1]
    starts = [sum(lengths[:i]) for i in range(4)]
    segments = [
        segment(start, start + n, 80 * i, (39, 40), threshold=1)
        for i, (start, n) in enumerate(zip(starts, lengths, strict=True))
    ]
    table = build_table(LAYOUT, segments)
    for name in ("shrink_x", "shrink_dy", "reduce_a", "reduce_b"):
        assert len(rows(table, name)) >= len(segments)
    with pytest.raises(ValueError, match="5 segments in a layout for 4"):
        build_table(LAYOUT, [*segments, segment(100, 101, 320, (1, 1))])


def test_a_jobs_rows_do_not_depend_on_its_neighbours():
    mine = segment(0, 40, ranks=(8, 3), threshold=5)
    alone = build_table(LAYOUT, [mine])
    beside = build_table(LAYOUT, [mine, segment(40, 100, 60, (40, 1))])
    for name in ("shrink_x", "reduce_a", "reduce_b"):
        columns = [c for c in range(blocks.COLUMNS) if c not in (blocks.FIRST, blocks.GROUP)]
        of_mine = [r for r in rows(beside, name)[:, columns].tolist() if r[blocks.W_ROW] < 60]
        assert of_mine == rows(alone, name)[:, columns].tolist()


def test_without_dropout_linears_are_stacked_where_ranks_allow():
    assert len(rows(build_table(LAYOUT, [segment(0, 16)]), "shrink_x")) == 1
    assert len(rows(build_table(LAYOUT, [segment(0, 16, ranks=(8, 7))]), "shrink_x")) == 2
    assert len(rows(build_table(LAYOUT, [segment(0, 16, threshold=9)]), "shrink_x")) == 2


def plain_rows(each, tokens, cap, side):
    """What a list has of one segment: every piece for every block, by loops."""
    pieces = blocks._pieces_of(
        each.a_row, each.ranks, each.b_rows, each.scale, each.threshold, cap, side
    ).tolist()
    found = []
    for start in range(each.start, each.stop, tokens):
        for piece in pieces:
            row = list(piece)
            row[blocks.START], row[blocks.COUNT] = start, min(tokens, each.stop - start)
            row[blocks.KEY] = each.key - 2**32 if each.key >= 2**31 else each.key
            found.append(row)
    return found


def test_lists_of_all_segments_at_once_are_those_of_each():
    """In their order, to the number, an empty segment and one without rows among them; sums and
    sorting aside. One key that is another shows."""
    segments = [
        segment(3, 60, threshold=7),
        segment(60, 60, 16, (8, 8)),
        segment(60, 61, 32, (5, 0)),
        segment(61, 80, 40, (0, 0)),
        segment(80, 100, 40, (40, 33)),
    ]
    layout = replace(LAYOUT, max_segments=8)
    found = blocks._lists(layout, [each for each in segments if each.stop > each.start])
    ways = {
        "shrink_x": (16, 32, "a"),
        "shrink_dy": (16, 32, "b"),
        "reduce_a": (32, 16, "a"),
        "reduce_b": (32, 16, "b"),
    }
    own = [blocks.FIRST, blocks.SIZE, blocks.INDEX, blocks.GROUP]
    for name, way in ways.items():
        expected = [row for each in segments for row in plain_rows(each, *way)]
        if name.startswith("reduce"):
            expected.sort(key=lambda row: -(row[blocks.COUNT] + 5 * row[blocks.RANK]))
            found[name][:, own] = 0
        if name == "reduce_b":
            expected.sort(key=lambda row: row[blocks.LINEAR])
        assert found[name].tolist() == expected
        other = replace(segments[0], key=1)
        broken = [row for each in [other, *segments[1:]] for row in plain_rows(each, *way)]
        assert sorted(found[name].tolist()) != sorted(broken)
    for side, name in (("a", "pieces_dx"), ("b", "pieces_y")):
        rows = [row for each in segments for row in plain_rows(each, 100, 16, side)]
        for row in rows:
            row[blocks.START] = row[blocks.COUNT] = 0
        assert found[name].tolist() == rows


def test_rows_of_a_linear_follow_each_other_and_are_counted():
    """So that kernels need no item for tiles that a narrow linear does not have."""
    table = build_table(LAYOUT, [segment(3, 60), segment(60, 61, 20, (5, 0))])
    for name, column in blocks.ENDS.items():
        linears = rows(table, name)[:, blocks.LINEAR].tolist()
        assert linears == sorted(linears)
        first, both = table[0, column : column + 2].tolist()
        assert (first, both) == (linears.count(0), len(linears))
        assert 0 < first < both


def test_linears_of_equal_width_share_the_order_of_the_gradient_of_b():
    """A chunk's rows follow each other: so it was faster, and no kernel has to count them."""
    layout = replace(LAYOUT, out_features=(64, 64))
    table = build_table(layout, [segment(0, 20), segment(20, 50, 20)])
    found = rows(table, "reduce_b")[:, [blocks.COUNT, blocks.LINEAR]].tolist()
    assert found == [[30, 0], [30, 1], [20, 0], [20, 1]]


def test_programs_that_take_turns_get_equal_shares():
    """Up to the longest item, whatever the order of short and long jobs."""
    lengths, ranks = [1, 30, 2, 31, 3, 32], [(40, 40), (1, 1)] * 3
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    segments = [
        segment(start, start + length, 80 * i, rank)
        for i, (start, length, rank) in enumerate(zip(starts, lengths, ranks, strict=True))
    ]
    layout = replace(LAYOUT, max_segments=6, out_features=(64, 64))
    table = build_table(layout, segments)
    first, count = layout.first_row["reduce_b"], int(table[0, blocks.LISTS.index("reduce_b")])
    own = table[first : first + count]
    costs = own[:, blocks.COUNT] + 5 * own[:, blocks.RANK]
    shares = [int(costs[i::3].sum()) for i in range(3)]
    assert max(shares) - min(shares) <= int(costs.max())
    assert costs.tolist() == sorted(costs.tolist(), reverse=True)


@pytest.mark.parametrize(
    ("length", "counts"),
    [(33, [33]), (55, [55]), (56, [28, 28]), (88, [30, 30, 28]), (5, [5])],
)
def test_expanded_blocks_of_a_segment_are_even(length, counts):
    """About 32 tokens each; no rest of one."""
    table = build_table(LAYOUT, [segment(0, length)])
    of_segment = [r for r in rows(table, "expand_dx").tolist() if r[blocks.SIZE]]
    assert [row[blocks.COUNT] for row in of_segment] == counts


def test_gradients_known_to_be_zero_are_marked():
    zero, other = replace(segment(0, 40), zero_grad=True), segment(40, 60, 20)
    table = build_table(LAYOUT, [zero, other])
    for name in ("reduce_a", "reduce_b"):
        marks = {(r[blocks.W_ROW] < 20, r[blocks.ZERO]) for r in rows(table, name).tolist()}
        assert marks == {(True, 1), (False, 0)}


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([segment(0, 101)], "outside"),
        ([segment(0, 9), segment(8, 20)], "overlaps"),
        ([segment(0, 9, ranks=(41, 8))], "41"),
        ([segment(i, i + 1) for i in range(5)], "5 segments"),
    ],
)
def test_what_does_not_fit_is_refused(segments, message):
    with pytest.raises(ValueError, match=message):
        build_table(LAYOUT, segments)
