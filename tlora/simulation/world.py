"""What befalls a cluster: GPUs and nodes that fail and are repaired, GPUs that run slowly for a
while. Drawn in advance from a seed; the policy learns of each event when it happens."""

import random
from dataclasses import dataclass

from tlora.core.cluster import Cluster
from tlora.core.errors import SpecError
from tlora.core.event import Event, GpuFailure, GpuRepair, Straggler

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Times between events are exponential; None: it never happens."""

    gpu_mtbf_s: float | None = None
    """Mean time of one GPU between failures."""

    node_mtbf_s: float | None = None
    """Of a node with all its GPUs."""

    repair_s: float = HOUR_S
    """How long a failed GPU or node is away."""

    straggle_every_s: float | None = None
    """Mean time of one GPU between slow spells."""

    straggle_s: float = HOUR_S
    """Length of a slow spell."""

    straggle_speed: float = 0.5
    """The part of its usual speed meanwhile."""

    def __post_init__(self) -> None:
        for name in ("gpu_mtbf_s", "node_mtbf_s", "repair_s", "straggle_every_s", "straggle_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise SpecError(f"must be above 0, got {value}", field=name)
        if not 0 < self.straggle_speed < 1:
            raise SpecError(
                f"must be between 0 and 1, got {self.straggle_speed}", field="straggle_speed"
            )


def draw_events(world: World, cluster: Cluster, *, until_s: float, seed: int) -> list[Event]:
    """In order of time; beyond `until_s` nothing begins. A GPU that is down does not fail again,
    nor does it straggle."""
    spells: list[tuple[float, int, tuple[int, ...]]] = []
    nodes = [(f"node {node.number}", node.gpus) for node in cluster.nodes]
    gpus = [(f"gpu {gpu.number}", (gpu.number,)) for gpu in cluster.gpus]
    for kind, units, mean_s, rest_s in (
        (0, nodes, world.node_mtbf_s, world.repair_s),
        (1, gpus, world.gpu_mtbf_s, world.repair_s),
        (2, gpus, world.straggle_every_s, world.straggle_s),
    ):
        if mean_s is None:
            continue
        for name, members in units:
            # A stream for each, so that one more GPU leaves the others' fate as it is.
            draw = random.Random(f"{seed}:{kind}:{name}")
            at = draw.expovariate(1 / mean_s)
            while at < until_s:
                spells.append((at, kind, members))
                at += rest_s + draw.expovariate(1 / mean_s)
    events: list[Event] = []
    down_until = [0.0] * len(cluster)
    for at, kind, members in sorted(spells):
        hit = tuple(gpu for gpu in members if down_until[gpu] <= at)
        if not hit:
            continue
        if kind == 2:
            events.append(Straggler(at, hit[0], world.straggle_speed))
            events.append(Straggler(at + world.straggle_s, hit[0], 1.0))
            continue
        for gpu in hit:
            down_until[gpu] = at + world.repair_s
        events.append(GpuFailure(at, hit, "node lost" if kind == 0 else "GPU lost"))
        events.append(GpuRepair(at + world.repair_s, hit))
    return sorted(events, key=lambda event: event.time)
