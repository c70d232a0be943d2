"""Who takes what: the sequences of a job that spans ranks, and which of the others change ranks;
where they begin is core/dealing.py.

Pure decisions, the same on every rank that is asked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tlora.core.dealing import RANK_COST, Load


def deal_sequences(lengths: Sequence[int], num_ranks: int, *, first: int = 0) -> list[int]:
    """The rank of each sequence of a batch: the longest first, to whoever has the fewest tokens.
    Among equals `first` comes first, so that small batches do not all begin at one rank."""
    tokens = [0] * num_ranks
    ranks = [0] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        least = min(range(num_ranks), key=lambda rank: (tokens[rank], (rank - first) % num_ranks))
        ranks[index] = least
        tokens[least] += lengths[index]
    return ranks


@dataclass(frozen=True, slots=True)
class Move:
    job: str
    source: int
    target: int


def moves_to_balance(
    loads: Sequence[Load],
    places: Mapping[str, int],
    num_ranks: int,
    *,
    slack: float = 0.2,
    move_cost: float = 0.0,
    rank_cost: float = RANK_COST,
) -> list[Move]:
    """Jobs that change ranks so that no rank has more than `1 + slack` of the mean work; one at a
    time from the fullest rank to the emptiest, as long as that makes the fullest one emptier. None
    if the fullest gains less than the moves cost: `move_cost` each, in tokens' work."""
    here = dict(places)
    size = {load.job: load.work(rank_cost) for load in loads}
    work = [0.0] * num_ranks
    for job, rank in here.items():
        work[rank] += size.get(job, 0.0)
    mean, most = sum(work) / num_ranks, max(work)
    moves: list[Move] = []
    while len(moves) < len(loads):
        fullest = max(range(num_ranks), key=lambda rank: (work[rank], -rank))
        emptiest = min(range(num_ranks), key=lambda rank: (work[rank], rank))
        if work[fullest] <= (1.0 + slack) * mean:
            break
        gap = work[fullest] - work[emptiest]
        movable = [job for job, rank in here.items() if rank == fullest and 0 < size[job] < gap]
        if not movable:
            break
        # What comes nearest to half of the gap levels the two.
        job = min(movable, key=lambda job: (abs(gap / 2 - size[job]), job))
        moves.append(Move(job, fullest, emptiest))
        here[job] = emptiest
        work[fullest] -= size[job]
        work[emptiest] += size[job]
    return moves if most - max(work) > len(moves) * move_cost else []
