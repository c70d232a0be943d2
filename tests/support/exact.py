"""The best that any grouping of a few jobs on the GPUs of one node could reach, by trying all."""

from tlora.core.cluster import Cluster
from tlora.core.plan import Plan
from tlora.costs.groups import Costs, narrowest
from tlora.schedule.pieces import Piece


def best_worth(costs: Costs, cluster: Cluster, pieces: list[Piece]) -> tuple[int, float]:
    """How many of the jobs can run within their bounds, and the most GPUs' worth of so many."""
    count, gpus = len(pieces), len(cluster)
    value: dict[tuple[int, int], float] = {}
    for mask in range(1, 1 << count):
        chosen = [piece for place, piece in enumerate(pieces) if mask >> place & 1]
        if len({piece.base for piece in chosen}) == 1:
            for k in range(1, gpus + 1):
                found = _group_worth(costs, cluster, chosen, k)
                if found is not None:
                    value[mask, k] = found
    # (jobs that run, worth) of each set of jobs and number of GPUs.
    best = {(0, k): (0, 0.0) for k in range(gpus + 1)}
    for mask in range(1, 1 << count):
        low = mask & -mask
        for k in range(gpus + 1):
            # The lowest job waits, or is in one of the groups.
            found = best[mask ^ low, k]
            sub = mask
            while sub:
                if sub & low:
                    for mine in range(1, k + 1):
                        if (sub, mine) in value:
                            jobs, worth = best[mask ^ sub, k - mine]
                            option = (jobs + sub.bit_count(), worth + value[sub, mine])
                            found = max(found, option)
                sub = (sub - 1) & mask
            best[mask, k] = found
    return best[(1 << count) - 1, gpus]


def _group_worth(costs: Costs, cluster: Cluster, pieces: list[Piece], gpus: int) -> float | None:
    """Over all buckets; None where no bucket holds memory and bounds."""
    found: list[float] = []
    for bucket in costs.base(pieces[0].base).buckets:
        priced = costs.predict(
            [piece.job.request for piece in pieces],
            [piece.weight for piece in pieces],
            Plan(replicas=gpus, bucket=bucket),
            narrowest(cluster, gpus),
        )
        within = all(
            1 / rate <= piece.limit_s * (1 + 1e-9)
            for rate, piece in zip(priced.steps_per_s, pieces, strict=True)
        )
        if priced.fits and within:
            found.append(priced.worth)
    return max(found, default=None)
