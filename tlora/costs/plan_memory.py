"""Bytes on the fullest GPU of a plan, by what takes them."""

from dataclasses import dataclass

from tlora.core.plan import Plan
from tlora.costs.layout import BaseLayout, around
from tlora.costs.memory import BYTES_PER_ADAPTER_PARAMETER, GRADIENT_BYTES
from tlora.costs.rounds import BaseCosts

LAYERS_IN_FLIGHT = 3
"""Of a sharded base: one at work, one that arrives, and its copy into separate weights."""

SUMMED_COPIES = 2
"""Of a job's gradients, on a rank while they are summed: its own and what arrives, or what is
gathered and its order as before. A rank's part of the sum comes on top."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryParts:
    """Bytes on the fullest GPU, at the peak. What was not measured is None."""

    weights: float
    """Of the base: all of it, or a shard."""

    gathered: float
    """Layers of a sharded base that are whole for a while, or stay so."""

    adapters: float
    """Of the jobs that the rank holds, with gradients and moments."""

    activations: float | None
    """Of a nano-batch."""

    sums: float
    """Gradients of the largest job that spans ranks, while they are summed."""

    rest: float | None
    """Workspaces, and what measured peaks were above the fit."""

    @property
    def total(self) -> float | None:
        if self.activations is None or self.rest is None:
            return None
        counted = self.weights + self.gathered + self.adapters + self.sums
        return counted + self.activations + self.rest


def memory_of(
    base: BaseCosts,
    layout: BaseLayout | None,
    plan: Plan,
    *,
    rows: float,
    longest: int,
    parameters: float,
    largest_spread: float,
) -> MemoryParts:
    """tp shares weights and activations, and half of each adapter; pp shares weights and adapters,
    and has as many nano-batches in flight as stages, so that activations stay."""
    memory = base.profile.memory
    if longest > rows:
        rows = base.rows(float(longest), plan.bucket)
    parts = plan.tp * plan.pp
    weights, gathered = float(memory.weights_bytes), 0.0
    if plan.fsdp > 1:
        assert layout is not None
        weights = layout.shard_bytes(plan.fsdp)
        largest = max(layout.gathered_bytes(layer, plan.fsdp) for layer in layout.layers)
        again = len(layout.layers) - plan.kept_layers
        passing = max(
            min(again, LAYERS_IN_FLIGHT) * largest,
            *(layout.gathered_bytes(unit, plan.fsdp) for unit in around(layout)),
        )
        gathered = (plan.kept_layers / plan.pp * largest + passing) / plan.tp
    known = memory.bytes(rows=0.0, adapter_parameters=0.0) is not None
    row_bytes, fixed, reserve = memory.row_bytes, memory.fixed_bytes, memory.reserve_bytes
    return MemoryParts(
        weights=weights / parts,
        gathered=gathered,
        adapters=BYTES_PER_ADAPTER_PARAMETER * parameters * (1 + 1 / plan.tp) / 2 / plan.pp,
        sums=(SUMMED_COPIES + 1 / plan.ranks) * GRADIENT_BYTES * largest_spread / plan.pp
        if plan.ranks > 1
        else 0.0,
        activations=(row_bytes or 0.0) * rows / plan.tp if known else None,
        rest=(fixed or 0.0) + (reserve or 0.0) if known else None,
    )
