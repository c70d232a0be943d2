"""Seconds of collectives over GPUs that lie in nodes and racks.

Every GPU has a link inside of its node and one out of it. A ring, or a tree, that is cut well uses
all of them at once: a node takes in what it lacks over the links of all of its members, and passes
it on inside meanwhile. The slowest of the levels sets the time. Where each GPU is sent something of
its own there is nothing to pass on: all of it comes over its own link.
"""

from collections.abc import Sequence

from tlora.core.cluster import Cluster, Tier


def gather_s(moved_bytes: float, gpus: Sequence[int], cluster: Cluster) -> float:
    """Until each of these has all `moved_bytes`, of which it held its share; 0 for one GPU."""
    return _slowest_s(moved_bytes, gpus, cluster, shared=True)


def exchange_s(moved_bytes: float, gpus: Sequence[int], cluster: Cluster) -> float:
    """Until each of these has `moved_bytes` of its own, as much from each; 0 for one GPU."""
    return _slowest_s(moved_bytes, gpus, cluster, shared=False)


def _slowest_s(moved_bytes: float, gpus: Sequence[int], cluster: Cluster, *, shared: bool) -> float:
    """`shared`: the members of a node lack the same, and take it in once."""
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
            takers = fewest if shared else 1
            seconds = max(seconds, lacking / (takers * link.bytes_per_s))
            latency = link.latency_s
    return latency + seconds


def _node(cluster: Cluster, gpu: int) -> int:
    return cluster.gpus[gpu].node


def _rack(cluster: Cluster, gpu: int) -> int:
    return cluster.gpus[gpu].rack
