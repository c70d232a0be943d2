"""How a group is laid over its GPUs. A value that checks itself, is printed with the run, and is
the same object that the cost model prices."""

from dataclasses import dataclass
from typing import Literal

from tlora.core.errors import SpecError

Placement = Literal["data_parallel", "rank_local", "mixed"]
PLACEMENTS: tuple[Placement, ...] = ("data_parallel", "rank_local", "mixed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """replicas x fsdp x tp x pp GPUs, each used once."""

    bucket: int
    """Tokens of a nano-batch on one replica: the budget that composing fills."""

    replicas: int = 1
    """Whole copies of the base, each on `fsdp` x `tp` x `pp` GPUs."""

    fsdp: int = 1
    """GPUs that shard one copy of the base."""

    tp: int = 1
    """GPUs that share every linear of a shard."""

    pp: int = 1
    """Stages that a copy's layers are cut into."""

    adapters: Placement = "data_parallel"
    """data_parallel: every rank holds every adapter and takes some of its sequences; its gradients
    are summed before its step. rank_local: each job lives on one rank, and nothing of it crosses
    ranks. mixed: the jobs of `spread` are data-parallel, the others rank-local."""

    spread: tuple[str, ...] = ()
    """Jobs, by name, that are too big for one rank; for mixed adapters only."""

    def __post_init__(self) -> None:
        for name in ("bucket", "replicas", "fsdp", "tp", "pp"):
            if getattr(self, name) < 1:
                raise SpecError(
                    f"must be at least 1, got {getattr(self, name)}", field=f"plan.{name}"
                )
        if self.adapters not in PLACEMENTS:
            raise SpecError(
                f"must be one of {', '.join(PLACEMENTS)}, got {self.adapters}",
                field="plan.adapters",
            )
        if self.spread and self.adapters != "mixed":
            raise SpecError(
                "names jobs that span ranks, which needs plan.adapters: mixed", field="plan.spread"
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
        where = {
            "data_parallel": [],
            "rank_local": ["rank-local adapters"],
            "mixed": [f"rank-local adapters but {', '.join(self.spread) or 'none'}"],
        }[self.adapters]
        return ", ".join([copies, *parts, f"nano-batches of {self.bucket} tokens", *where])
