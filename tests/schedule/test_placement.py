"""Which GPUs are chosen."""

from tlora.core.cluster import Tier, uniform_cluster
from tlora.schedule.placement import choose_gpus

CLUSTER = uniform_cluster(16, per_node=4, nodes_per_rack=2)


def test_the_node_that_is_filled_best_gives_them() -> None:
    """Two from the node with two free, not from the empty one."""
    free = {0, 1, 2, 3, 6, 7}
    assert choose_gpus(CLUSTER, free, 2) == (6, 7)
    assert choose_gpus(CLUSTER, free, 3) == (0, 1, 2)


def test_where_no_node_is_large_enough_the_narrowest_tier_is_taken() -> None:
    """A rack before the cluster; None where there are too few."""
    free = {0, 1, 2, 5, 6, 8, 9, 10, 12, 13, 14}
    gpus = choose_gpus(CLUSTER, free, 5)
    assert gpus is not None
    assert CLUSTER.tier(gpus) is Tier.RACK
    assert choose_gpus(CLUSTER, free, 11) is not None
    assert choose_gpus(CLUSTER, free, 12) is None
