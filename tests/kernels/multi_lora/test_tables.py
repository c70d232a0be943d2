"""The table carries segments through a tensor of fixed size."""

import pytest
import torch

from tlora.kernels.multi_lora.tables import Segment, new_table, read_table, write_table

SEGMENTS = [
    Segment(0, 63, a_row=4, ranks=(5, 0, 64), b_rows=(7, 0, 2), scale=0.5),
    Segment(63, 63, a_row=90, ranks=(1, 1, 1), b_rows=(0, 9, 70), scale=2.0),
    Segment(63, 64, 3, (0, 1, 0), (0, 2, 0), 0.125, threshold=2**32 - 1, key=2**32 - 1),
]


def test_what_is_written_is_read() -> None:
    """Every field comes back: ranks of 0, empty segments, thresholds and keys of 32 full bits."""
    table, scales = new_table(5, 3), torch.zeros(5, dtype=torch.float64)
    write_table(SEGMENTS, table, scales)
    assert read_table(table, scales) == SEGMENTS


def test_a_shorter_list_hides_what_was_written_before() -> None:
    """The count decides, not what the rows behind it still hold."""
    table, scales = new_table(3, 3), torch.zeros(3, dtype=torch.float64)
    for count in (3, 1, 2, 0):
        write_table(SEGMENTS[:count], table, scales)
        assert read_table(table, scales) == SEGMENTS[:count]


def test_more_segments_than_rows_are_refused() -> None:
    """Silently losing a segment would lose a job's update."""
    table, scales = new_table(2, 3), torch.zeros(2)
    with pytest.raises(AssertionError, match="3 segments in a table of 2"):
        write_table(SEGMENTS, table, scales)


def test_width_counts_the_rank_rows_of_all_linears() -> None:
    """The rows that a job owns in A."""
    assert [segment.width for segment in SEGMENTS] == [69, 3, 1]
