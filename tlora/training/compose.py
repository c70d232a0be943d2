"""Who shares the next nano-batch: a pure decision over what every job has waiting.

Jobs are served by deficit round robin: each pass gives every waiting job credit in proportion to
its weight, a job pays for the tokens it gets, and room that entitled jobs leave is filled by
whoever fits. A job offers only what is left of its current batch, so a nano-batch never holds two
batches of one job; what it cannot use because its batch ran out is not saved up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    TRAIN = "train"
    EVALUATE = "eval"


@dataclass(frozen=True, slots=True)
class Waiting:
    """What one job could put into a nano-batch now."""

    job: str
    kind: Kind
    lengths: Sequence[int]
    """Tokens of the sequences still to go, in the job's own order; not empty."""

    weight: float = 1.0
    credit: float = 0.0
    """Tokens it is owed (or, negative, has had in advance)."""

    rank: int = 1
    """Its work per token in the adapters, which composing levels."""


@dataclass(frozen=True, slots=True)
class Pick:
    job: str
    indices: tuple[int, ...]
    """Into the job's `lengths`, in the order they are packed."""


@dataclass(frozen=True, slots=True)
class Composition:
    kind: Kind
    rows: int
    """The bucket: rows of the nano-batch, padding included."""

    tokens: int
    picks: tuple[Pick, ...]
    credits: dict[str, float]
    """Every member's credit after this pass."""


def buckets_for(budget: int, *, step: int | None = None) -> tuple[int, ...]:
    """Sizes a nano-batch may have: multiples of `step`, or halves of the budget down to an
    eighth."""
    if step is not None:
        return (*range(step, budget, step), budget)
    return tuple(sorted({max(1, budget // 8), max(1, budget // 4), max(1, budget // 2), budget}))


def bucket_of(tokens: int, budget: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds the tokens; beyond the budget, the smallest multiple of it."""
    if tokens > budget:
        return -(-tokens // budget) * budget
    return min(size for size in buckets if size >= tokens)


def compose(
    waiting: Sequence[Waiting],
    *,
    budget: int,
    buckets: Sequence[int],
    in_order: bool = False,
) -> Composition | None:
    """The next nano-batch, or None if nothing waits.

    `in_order` keeps each job's sequences in its own order even where a later one would fill a gap.
    A sequence longer than the budget goes alone.
    """
    if not waiting:
        return None
    kind = max(waiting, key=lambda each: each.credit / each.weight).kind
    members = [_Member(each) for each in waiting if each.kind is kind]
    total_weight = sum(member.weight for member in members)
    for member in members:
        member.entitle(budget * member.weight / total_weight, budget)
    members.sort(key=lambda member: -member.credit / member.weight)
    head = members[0]
    if head.next_length > budget:
        head.take(0)
    else:
        _fill(members, budget, in_order)
    tokens = sum(member.tokens for member in members)
    order = {each.job: place for place, each in enumerate(waiting)}
    taken = sorted((member for member in members if member.taken), key=lambda m: order[m.job])
    return Composition(
        kind=kind,
        rows=bucket_of(tokens, budget, buckets),
        tokens=tokens,
        picks=tuple(Pick(member.job, tuple(member.taken)) for member in taken),
        credits={member.job: member.settled_credit() for member in members},
    )


class _Member:
    """A job while a nano-batch is being filled."""

    def __init__(self, waiting: Waiting) -> None:
        self.job = waiting.job
        self.weight = waiting.weight
        self.rank = waiting.rank
        self.credit = waiting.credit
        self.lengths = waiting.lengths
        self.left = list(range(len(waiting.lengths)))
        self.taken: list[int] = []
        self.tokens = 0

    @property
    def next_length(self) -> int:
        return self.lengths[self.left[0]]

    def entitle(self, tokens: float, budget: int) -> None:
        """More credit than the next sequence or a whole nano-batch needs would only buy bursts."""
        self.credit = min(self.credit + tokens, max(budget, self.next_length))

    def first_fit(self, room: int, in_order: bool) -> int | None:
        """The place in `left` of a sequence that fits, or None."""
        places = range(min(1, len(self.left))) if in_order else range(len(self.left))
        return next((p for p in places if self.lengths[self.left[p]] <= room), None)

    def take(self, place: int) -> int:
        index = self.left.pop(place)
        self.taken.append(index)
        self.tokens += self.lengths[index]
        self.credit -= self.lengths[index]
        return self.lengths[index]

    def settled_credit(self) -> float:
        return self.credit if self.left else min(self.credit, 0.0)


def _fill(members: list[_Member], budget: int, in_order: bool) -> None:
    room = budget
    for member in members:
        while member.left and member.next_length <= min(room, member.credit):
            room -= member.take(0)
    waiting = [(member.rank, length) for member in members for length in member.lengths]
    mean_rank = sum(rank * length for rank, length in waiting) / sum(n for _, n in waiting)
    excess = sum((member.rank - mean_rank) * member.tokens for member in members)
    while True:
        fitting = [
            (member, place)
            for member in members
            if (place := member.first_fit(room, in_order)) is not None
        ]
        if not fitting:
            return
        # Level the adapters' work: what brings the sum of tokens x rank nearest to the mean goes
        # first; equals by credit.
        member, place = min(
            fitting,
            key=lambda each: (
                abs(excess + (each[0].rank - mean_rank) * each[0].lengths[each[0].left[each[1]]]),
                -each[0].credit / each[0].weight,
            ),
        )
        length = member.take(place)
        room -= length
        excess += (member.rank - mean_rank) * length
