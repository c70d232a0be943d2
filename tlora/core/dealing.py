"""Which rank a job lives on: one rule, for the planner that prices it and the ranks that do it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tlora.core.request import JobRequest

RANK_COST = 1e-3
"""What a rank row adds to a token's work, beside the backbone's. A linear of [n, n] costs a token
4 n^2 forward and backward of the frozen weight, an adapter of rank r 12 r n: 3 r / n, of n = 4096
and all linears about 7e-4; the adapters' products are less efficient."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a job still has to do."""

    job: str
    tokens: float
    rank: int
    """Of its adapter."""

    def work(self, rank_cost: float) -> float:
        return self.tokens * (1.0 + rank_cost * self.rank)


def load_of(request: JobRequest, *, step: int = 0) -> Load:
    """After so many of its steps."""
    left = max(0, request.total_steps - step)
    return Load(request.name, left * request.load.batch_tokens, request.load.rank)


def least_loaded(
    loads: Sequence[Load],
    places: Mapping[str, int],
    num_ranks: int,
    *,
    rank_cost: float = RANK_COST,
) -> int:
    """The rank that a job more goes to, with these on their ranks: whoever has the least work."""
    work = [0.0] * num_ranks
    for load in loads:
        work[places[load.job]] += load.work(rank_cost)
    return work.index(min(work))


def deal_jobs(
    loads: Sequence[Load], num_ranks: int, *, rank_cost: float = RANK_COST
) -> dict[str, int]:
    """The rank of each job: the largest first, to whoever has the least work (longest processing
    time first, at most 4/3 of the best)."""
    work = [0.0] * num_ranks
    places: dict[str, int] = {}
    for load in sorted(loads, key=lambda load: (-load.work(rank_cost), load.job)):
        rank = work.index(min(work))
        places[load.job] = rank
        work[rank] += load.work(rank_cost)
    return places
