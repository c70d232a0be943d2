"""Seconds of collectives over GPUs that lie in nodes and racks.

Every GPU has a link inside of its node and one out of it. A ring, or a tree, that is cut well uses
all of them at once: a node takes in what it lacks over the links of all of its members, and passes
it on inside meanwhile. The slowest of the levels sets the time. Where each GPU is sent something of
its own there is nothing to pass on: all of it comes over its own link.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tlora.core.cluster import Cluster, Link, Tier


@dataclass(frozen=True, slots=True)
class Level:
    """Between GPUs that are not in one node, or not in one rack."""

    fewest: int
    """GPUs, of the nodes or racks that have some."""

    link: Link


@dataclass(frozen=True, slots=True)
class Reach:
    """How GPUs lie in a cluster: all that a collective over them depends on, and far less than
    thousands of them."""

    count: int
    inside: Link
    """Of a node."""

    levels: tuple[Level, ...]
    """Those that they are spread over, the narrower first."""


def reach_of(gpus: Sequence[int], cluster: Cluster) -> Reach:
    places = [cluster.gpus[number] for number in gpus]
    levels: list[Level] = []
    for tier, members in (
        (Tier.RACK, Counter([gpu.node for gpu in places])),
        (Tier.CLUSTER, Counter([gpu.rack for gpu in places])),
    ):
        if len(members) > 1:
            levels.append(Level(min(members.values()), _link(cluster, tier)))
    return Reach(len(places), _link(cluster, Tier.NODE), tuple(levels))


def gather_s(moved_bytes: float, reach: Reach) -> float:
    """Until each of these has all `moved_bytes`, of which it held its share; 0 for one GPU."""
    return _slowest_s(moved_bytes, reach, shared=True)


def exchange_s(moved_bytes: float, reach: Reach) -> float:
    """Until each of these has `moved_bytes` of its own, as much from each; 0 for one GPU."""
    return _slowest_s(moved_bytes, reach, shared=False)


def _slowest_s(moved_bytes: float, reach: Reach, *, shared: bool) -> float:
    """`shared`: the members of a node lack the same, and take it in once."""
    count = reach.count
    if count < 2:
        return 0.0
    seconds = moved_bytes * (count - 1) / count / reach.inside.bytes_per_s
    latency = reach.inside.latency_s
    for level in reach.levels:
        lacking = moved_bytes * (1 - level.fewest / count)
        takers = level.fewest if shared else 1
        seconds = max(seconds, lacking / (takers * level.link.bytes_per_s))
        latency = level.link.latency_s
    return latency + seconds


def _link(cluster: Cluster, tier: Tier) -> Link:
    link = cluster.link(tier)
    assert link is not None
    return link
