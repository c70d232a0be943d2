"""Sums over ranks: the bits of adding everything up by rank, on every rank."""

import pytest
from support import rank_counts
from support.ranks import Ranks


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_sum_in_parts_has_the_bits_of_the_sum_of_all(world: int, ranks: Ranks) -> None:
    """Shapes that do not divide by the ranks, values of all sizes; numbers in double precision. A
    sum in another order has others."""
    for found in ranks.call(rank_counts.sums_by_rank, world):
        assert found["same"] and found["figures"]
        # Two have but one order.
        assert found["other order"] == (world == 2)


def test_nobody_needs_the_gradients_of_all(ranks: Ranks) -> None:
    """Twice the gradient reaches a rank, however many there are: padding and numbers aside."""
    for found in ranks.call(rank_counts.sums_by_rank, 4):
        assert found["calls"] == 2
        assert 2 * found["own bytes"] <= found["bytes"] < 2.1 * found["own bytes"]
