"""What waits for links in a round under a plan.

A sharded base is gathered layer by layer, a layer ahead of the one at work, so that per layer the
longer of computing and gathering counts (their sum where a link does not overlap with work); the
first layer of each direction is waited for, and so are embeddings and head. A job that spans ranks
has its gradients summed in order, a part on each rank, and the sums gathered.
"""

from collections.abc import Sequence

from tlora.core.plan import Plan
from tlora.costs.collectives import Reach, exchange_s, gather_s, reach_of
from tlora.costs.groups import Costs
from tlora.costs.layout import BaseLayout, around
from tlora.costs.memory import GRADIENT_BYTES
from tlora.costs.rounds import RoundWork

CONTROLS = 1
"""Control elements of a nano-batch."""


class Links:
    def __init__(
        self, costs: Costs, layout: BaseLayout | None, plan: Plan, gpus: tuple[int, ...]
    ) -> None:
        self.cluster, self.layout, self.plan, self.gpus = costs.cluster, layout, plan, gpus
        self.link = self.cluster.link(self.cluster.tier(gpus))

    def waiting_s(self, seconds: float, rows: float) -> float:
        """Of a nano-batch that computes for so long on the fullest rank."""
        if self.link is None:
            return 0.0
        waits = self._gathers_s(seconds) + self._tensor_s(rows) + self._pipeline_s(rows)
        return waits + (CONTROLS * self.link.latency_s if self.plan.ranks > 1 else 0.0)

    def sum_bytes(self, parameters: float) -> float:
        """Its part of everybody's gradients, and the sums of all parts."""
        return 2 * GRADIENT_BYTES * parameters / self.plan.pp if self.plan.ranks > 1 else 0.0

    def sum_s(self, spread: RoundWork) -> float:
        """Each job has two calls of its own."""
        if self.plan.ranks == 1 or not spread.steps or self.link is None:
            return 0.0
        members = reach_of(self.gpus[:: self.plan.tp], self.cluster)
        moved = self.sum_bytes(spread.parameters) / 2
        once = exchange_s(moved, members) + gather_s(moved, members)
        return once + 2 * (spread.steps - 1) * self.link.latency_s

    def _gathers_s(self, seconds: float) -> float:
        plan, layout = self.plan, self.layout
        if plan.fsdp == 1:
            return 0.0
        assert layout is not None
        # Of a stage: as many as it has, evenly from all.
        again = layout.layers[plan.kept_layers :: plan.pp]
        part = 1 - layout.head_parameters / layout.matmul_parameters
        at_work = seconds * part / 2 / (len(layout.layers) / plan.pp)
        if self.link is not None and not self.link.overlaps:
            at_work = 0.0
        groups = self._groups(plan.tp, plan.fsdp)
        waits = sum(
            self._gather_s(layout.gathered_bytes(unit, plan.fsdp), groups)
            for unit in around(layout)
        )
        found: dict[int, float] = {}
        for place, layer in enumerate(again):
            moved = layout.gathered_bytes(layer, plan.fsdp)
            if moved not in found:
                found[moved] = self._gather_s(moved, groups)
            waits += 2 * (found[moved] if place == 0 else max(0.0, found[moved] - at_work))
        return waits

    def _gather_s(self, moved: float, groups: Sequence[Reach]) -> float:
        return max(gather_s(moved / self.plan.tp, group) for group in groups)

    def _tensor_s(self, rows: float) -> float:
        """Two sums of the rows in each layer and direction, each a scatter and a gather."""
        plan, layout = self.plan, self.layout
        if plan.tp == 1:
            return 0.0
        assert layout is not None
        moved = rows * layout.hidden * layout.itemsize
        groups = self._groups(1, plan.tp)
        one = max(gather_s(moved, group) for group in groups)
        return 4 * 2 * one * len(layout.layers) / plan.pp

    def _pipeline_s(self, rows: float) -> float:
        """Rows to the next stage, and their gradients back."""
        plan, layout = self.plan, self.layout
        if plan.pp == 1:
            return 0.0
        assert layout is not None
        stage = plan.tp * plan.fsdp
        tier = self.cluster.tier(self.gpus[: stage * plan.pp])
        link = self.cluster.link(tier)
        assert link is not None
        moved = rows * layout.hidden * layout.itemsize / plan.tp
        return 2 * (link.latency_s + moved / link.bytes_per_s)

    def _groups(self, stride: int, count: int) -> list[Reach]:
        """Of GPUs that work together, those that differ in how they lie over nodes: the first of
        every block."""
        block = stride * count
        blocks = (self.gpus[start : start + block] for start in range(0, len(self.gpus), block))
        return list(dict.fromkeys(reach_of(each[::stride], self.cluster) for each in blocks))
