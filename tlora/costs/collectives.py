"""Seconds of an all-gather over GPUs that lie in nodes and racks.

Every GPU has a link inside of its node and one out of it. A ring, or a tree, that is cut well uses
all of them at once: a node takes in what it lacks over the links of all of its members, and passes
it on inside meanwhile. The slowest of the levels sets the time.
"""

from collections.abc import Sequence

from tlora.core.cluster import Cluster, Tier


def gather_s(moved_bytes: float, gpus: Sequence[int], cluster: Cluster) -> float:
    """Until each of these has all `moved_bytes`, of which it held its share; 0 for one GPU."""
    count = len(gpus)
    if count < 2:
        return 0.0
    link = cluster.link(Tier.NODE)
    assert link is not None
    seconds = moved_bytes * (count - 1) / count / link.bytes_per_s
    latency = link.latency_s
    for tier, domain_of in ((Tier.RACK, _node), (Tier.CLUSTER, _rack)):
        members: dict[int, int] = {}
        for gpu in gpus:
            domain = domain_of(cluster, gpu)
            members[domain] = members.get(domain, 0) + 1
        if len(members) > 1:
            link = cluster.link(tier)
            assert link is not None
            fewest = min(members.values())
            lacking = moved_bytes * (1 - fewest / count)
            seconds = max(seconds, lacking / (fewest * link.bytes_per_s))
            latency = link.latency_s
    return latency + seconds


def _node(cluster: Cluster, gpu: int) -> int:
    return cluster.gpus[gpu].node


def _rack(cluster: Cluster, gpu: int) -> int:
    return cluster.gpus[gpu].rack
