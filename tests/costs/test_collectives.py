"""Seconds of collectives, by hand."""

import pytest

from tlora.core.cluster import Link, uniform_cluster
from tlora.costs.collectives import exchange_s, gather_s, reach_of

LINKS = (
    Link(bytes_per_s=100.0, latency_s=1.0),
    Link(bytes_per_s=10.0, latency_s=2.0),
    Link(bytes_per_s=1.0, latency_s=3.0),
)
CLUSTER = uniform_cluster(16, per_node=4, nodes_per_rack=2, links=LINKS)


def test_within_a_node_each_gpu_takes_in_what_it_lacks() -> None:
    """Three quarters of 400 bytes at 100 bytes per second; alone there is nothing to take in."""
    assert gather_s(400.0, reach_of((0, 1, 2, 3), CLUSTER)) == pytest.approx(1 + 3.0)
    assert gather_s(400.0, reach_of((2,), CLUSTER)) == 0.0


def test_between_nodes_all_links_of_a_node_work_at_once() -> None:
    """Two whole nodes take in 200 bytes each over four links of 10; two lone GPUs have one."""
    assert gather_s(400.0, reach_of(range(8), CLUSTER)) == pytest.approx(2 + 200 / 40)
    assert gather_s(400.0, reach_of((0, 4), CLUSTER)) == pytest.approx(2 + 200 / 10)


def test_the_node_with_the_fewest_links_is_waited_for() -> None:
    """One of its GPUs takes in three quarters of everything."""
    assert gather_s(400.0, reach_of((0, 1, 2, 4), CLUSTER)) == pytest.approx(2 + 300 / 10)


def test_between_racks_the_slowest_level_sets_the_time() -> None:
    """Eight GPUs of each rack take in half."""
    assert gather_s(400.0, reach_of(range(16), CLUSTER)) == pytest.approx(3 + 200 / 8)


def test_what_is_everybodys_own_is_not_passed_on() -> None:
    """Within a node as a gather; between nodes each GPU takes in 200 bytes over one link of 10."""
    assert exchange_s(400.0, reach_of((0, 1, 2, 3), CLUSTER)) == pytest.approx(1 + 3.0)
    assert exchange_s(400.0, reach_of(range(8), CLUSTER)) == pytest.approx(2 + 200 / 10)
    assert exchange_s(400.0, reach_of((2,), CLUSTER)) == 0.0
