"""Which GPUs: as near to each other as can be, and leaving the largest holes whole."""

from collections.abc import Set

from tlora.core.cluster import Cluster


def choose_gpus(cluster: Cluster, free: Set[int], count: int) -> tuple[int, ...] | None:
    """So many of the free ones: from the node that they fill best; where none is large enough, from
    the rack, then from anywhere, the fullest nodes first. None if there are too few."""
    if count > len(free):
        return None
    by_node = [gpus for node in cluster.nodes if (gpus := free & node.members)]
    best = min((gpus for gpus in by_node if len(gpus) >= count), key=len, default=None)
    if best is not None:
        return tuple(sorted(best)[:count])
    by_rack: dict[int, list[list[int]]] = {}
    for gpus in sorted(by_node, key=len, reverse=True):
        ordered = sorted(gpus)
        by_rack.setdefault(cluster.gpus[ordered[0]].rack, []).append(ordered)
    sizes = {rack: sum(map(len, nodes)) for rack, nodes in by_rack.items()}
    enough = [rack for rack in by_rack if sizes[rack] >= count]
    if enough:
        racks = [min(enough, key=lambda rack: sizes[rack])]
    else:
        racks = sorted(by_rack, key=lambda rack: -sizes[rack])
    chosen = [gpu for rack in racks for gpus in by_rack[rack] for gpu in gpus]
    return tuple(chosen[:count])
