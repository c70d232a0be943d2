"""How a group is laid over its GPUs. A value that checks itself, is printed with the run, and is
the same object that the cost model prices."""

from dataclasses import dataclass
from typing import Literal

from tlora.core.errors import SpecError

Placement = Literal["replicated", "rank_local"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """replicas x fsdp x tp x pp GPUs, each used once."""

    bucket: int
    """Tokens of a nano-batch on one replica: the budget that composing fills."""

    replicas: int = 1
    """Whole copies of the base. Each takes other sequences; gradients are summed before a step."""

    fsdp: int = 1
    """GPUs that shard one copy of the base."""

    tp: int = 1
    """GPUs that share every linear of a shard."""

    pp: int = 1
    """Stages that a copy's layers are cut into."""

    adapters: Placement = "replicated"
    """replicated: every rank holds every adapter. rank_local: each adapter lives on one rank of
    an FSDP copy, and its gradients never cross ranks."""

    def __post_init__(self) -> None:
        for name in ("bucket", "replicas", "fsdp", "tp", "pp"):
            if getattr(self, name) < 1:
                raise SpecError(
                    f"must be at least 1, got {getattr(self, name)}", field=f"plan.{name}"
                )
        if self.adapters == "rank_local" and self.fsdp == 1:
            raise SpecError(
                "rank_local places adapters among the ranks of an FSDP copy; set plan.fsdp above 1",
                field="plan.adapters",
            )
        if self.adapters not in ("replicated", "rank_local"):
            raise SpecError(
                f"must be replicated or rank_local, got {self.adapters}", field="plan.adapters"
            )

    @property
    def gpus(self) -> int:
        return self.replicas * self.fsdp * self.tp * self.pp

    @property
    def is_replicated_only(self) -> bool:
        """One GPU, or whole copies: what is priced and run today."""
        return self.gpus == self.replicas

    def __str__(self) -> str:
        parts = [
            f"{count} x {name}"
            for name, count in (("fsdp", self.fsdp), ("tp", self.tp), ("pp", self.pp))
            if count > 1
        ]
        copies = "1 replica" if self.replicas == 1 else f"{self.replicas} replicas"
        local = ["rank-local adapters"] if self.adapters == "rank_local" else []
        return ", ".join([copies, *parts, f"nano-batches of {self.bucket} tokens", *local])
