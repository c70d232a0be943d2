"""How a group is laid over its GPUs. A value that checks itself, is printed with the run, and is
the same object that the cost model prices."""

from dataclasses import dataclass
from typing import Literal

from tlora.core.errors import SpecError

Placement = Literal["data_parallel", "rank_local", "mixed"]
PLACEMENTS: tuple[Placement, ...] = ("data_parallel", "rank_local", "mixed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """replicas x fsdp x tp x pp GPUs, each used once.

    A *rank* trains on tokens of its own: there are replicas x fsdp of them, and each has tp x pp
    GPUs. GPUs are counted with tp innermost, then fsdp, pp and replicas, so that those that talk
    most lie next to each other."""

    bucket: int
    """Tokens of a nano-batch on one rank: the budget that composing fills."""

    replicas: int = 1
    """Whole copies of the base, each on `fsdp` x `tp` x `pp` GPUs."""

    fsdp: int = 1
    """Ranks that shard one copy of the base. Each layer is gathered when its turn comes, forward
    and backward."""

    tp: int = 1
    """GPUs that share every linear of a shard."""

    pp: int = 1
    """Stages that a copy's layers are cut into."""

    kept_layers: int = 0
    """Of a sharded base, the layers that stay gathered once they were: frozen weights do not
    change, so these cost their memory and are never gathered again. The first ones."""

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
        if self.kept_layers < 0 or (self.kept_layers and self.fsdp == 1):
            raise SpecError(
                f"must be 0 where nothing is sharded, and never below, got {self.kept_layers}",
                field="plan.kept_layers",
            )
        if self.adapters not in PLACEMENTS:
            raise SpecError(
                f"must be one of {', '.join(PLACEMENTS)}, got {self.adapters}",
                field="plan.adapters",
            )
        if len(set(self.spread)) < len(self.spread):
            raise SpecError(f"names a job twice: {', '.join(self.spread)}", field="plan.spread")
        if self.spread and self.adapters != "mixed":
            raise SpecError(
                "names jobs that span ranks, which needs plan.adapters: mixed", field="plan.spread"
            )

    @property
    def gpus(self) -> int:
        return self.replicas * self.fsdp * self.tp * self.pp

    @property
    def ranks(self) -> int:
        """Those that take tokens."""
        return self.replicas * self.fsdp

    @property
    def is_replicated_only(self) -> bool:
        """One GPU, or whole copies."""
        return self.gpus == self.replicas

    @property
    def is_executed(self) -> bool:
        """The others have their place and their price, and nothing runs them yet."""
        return self.tp == self.pp == 1

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
        if self.kept_layers:
            parts.append(f"{self.kept_layers} layers kept gathered")
        return ", ".join([copies, *parts, f"nano-batches of {self.bucket} tokens", *where])
