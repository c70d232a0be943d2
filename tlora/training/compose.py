"""Who shares the next nano-batch: a pure decision over what every job has waiting.

Jobs are served by deficit round robin: a job pays with credit for the tokens it gets, and what a
pass has cost is granted back to all waiting jobs in proportion to their weights. The job with the
largest claim (credit for its weight) always goes first, so nobody waits for ever; the others that
are owed something follow, and room that they leave is filled by whoever fits. Whoever is served has
a turn of several sequences, for every adapter in a nano-batch costs by itself: many jobs come one
after another, not all of them with a little every time. A job offers only what is left of its
current batch, so a nano-batch never holds two batches of one job; what it cannot use because its
batch ran out is not saved up.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    TRAIN = "train"
    EVALUATE = "eval"
    REFERENCE = "reference"
    """Forward, and without adapters: what the base model makes of preference pairs."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What one job could put into a nano-batch now."""

    job: str
    kind: Kind
    lengths: Sequence[int]
    """Tokens of the sequences still to go, in the job's own order; not empty. A preference pair is
    one of them, with the tokens of both sides."""

    weight: float = 1.0
    credit: float = 0.0
    """Tokens it is owed (or, negative, has had in advance), as the last composition left it."""

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
    """Of all that were waiting, after this pass."""

    budget: int = 0
    """What it was composed for."""

    full: bool = False
    """Not cut short for want of work: something had to wait, or hardly any room is left."""


NEARLY_FULL = 15 / 16

TURNS = 8
"""A turn ends with the sequence that makes it this part of the budget."""

PARTS = 32
SMALLEST = 4
"""Sizes are thirty-seconds of the budget, from an eighth on. On an H200 the time of a nano-batch is
in proportion to its rows from a quarter of 8,192 on, so padding is dear; capturing a size takes
about as long as one nano-batch, once."""


def buckets_for(budget: int, *, step: int | None = None) -> tuple[int, ...]:
    """Sizes a nano-batch may have: multiples of `step`, or a bounded number of them, which a device
    captures."""
    if step is not None:
        return (*range(step, budget, step), budget)
    return tuple(sorted({max(1, budget * part // PARTS) for part in range(SMALLEST, PARTS + 1)}))


def bucket_of(tokens: int, budget: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds the tokens; beyond them, the smallest multiple of the
    budget."""
    multiple = -(-tokens // budget) * budget
    return min((size for size in buckets if size >= tokens), default=multiple)


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
    members = [_Member(each, place, in_order) for place, each in enumerate(waiting)]
    head = max(members, key=lambda member: member.claim)
    sharing = [member for member in members if member.kind is head.kind]
    if head.lengths[0] > budget:
        head.take(budget)
    else:
        _fill(sharing, head, budget)
    tokens = sum(member.tokens for member in sharing)
    return Composition(
        kind=head.kind,
        rows=bucket_of(tokens, budget, buckets),
        tokens=tokens,
        picks=tuple(Pick(member.job, tuple(member.taken)) for member in sharing if member.taken),
        credits=_settle(members, head.kind, budget),
        budget=budget,
        full=tokens >= NEARLY_FULL * budget or any(member.has_more for member in sharing),
    )


class _Member:
    """A job while a nano-batch is being filled."""

    def __init__(self, waiting: Waiting, place: int, in_order: bool) -> None:
        self.job = waiting.job
        self.kind = waiting.kind
        self.weight = waiting.weight
        self.rank = waiting.rank
        self.credit = waiting.credit
        self.lengths = waiting.lengths
        self.place = place
        self.taken: list[int] = []
        self.tokens = 0
        self._in_order = in_order
        self._next = 0
        self._shortest = min(waiting.lengths)

    @property
    def claim(self) -> float:
        return self.credit / self.weight

    @property
    def has_more(self) -> bool:
        return len(self.taken) < len(self.lengths)

    def fits(self, room: int) -> bool:
        """Move on to the first sequence that fits. The room only shrinks while a nano-batch is
        filled, so that what was passed over need not be looked at again."""
        if self._shortest > room:
            return False
        while self._next < len(self.lengths) and self.lengths[self._next] > room:
            if self._in_order:
                return False
            self._next += 1
        return self._next < len(self.lengths)

    def take(self, budget: int) -> int:
        """The next sequence: its tokens. No debt grows beyond a nano-batch: room that nobody else
        could use is free, or a job would have to make up for all the gaps it ever filled."""
        length = self.lengths[self._next]
        self.taken.append(self._next)
        self._next += 1
        self.tokens += length
        self.credit = max(self.credit - length, min(self.credit, -max(budget, length)))
        return length


class _Queue:
    """Members by claim, the largest first."""

    def __init__(self, members: list[_Member]) -> None:
        self._heap = [(-member.claim, member.place, member) for member in members]
        heapq.heapify(self._heap)

    def first(self, room: int) -> _Member | None:
        """The first that has something that fits; those before it have not, and are out."""
        while self._heap and not self._heap[0][2].fits(room):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def reorder_first(self) -> None:
        """The first has taken something."""
        member = self._heap[0][2]
        heapq.heapreplace(self._heap, (-member.claim, member.place, member))


def _fill(members: list[_Member], head: _Member, budget: int) -> None:
    """Whole sequences up to the budget: the head's next ones, then what is owed, then what fits.

    Among those that are owed something the adapters' work decides, so that the sum of tokens x rank
    is alike in all nano-batches: while the ranks so far are above the mean that the weights make,
    the largest claim among the jobs of lower rank is next, and the other way round.
    """
    weights = sum(member.weight for member in members)
    mean_rank = sum(member.weight * member.rank for member in members) / weights
    # Where all claims would meet if this nano-batch could be cut by weight.
    even = (sum(member.credit for member in members) - budget) / weights
    low = _Queue([member for member in members if member.rank <= mean_rank])
    high = _Queue([member for member in members if member.rank > mean_rank])
    queue, member = (low if head.rank <= mean_rank else high), head
    room = budget
    excess = 0.0
    while member is not None:
        tokens = member.take(budget)
        while tokens * TURNS < budget and member.fits(room - tokens):
            tokens += member.take(budget)
        queue.reorder_first()
        room -= tokens
        excess += (member.rank - mean_rank) * tokens
        queue, other = (low, high) if excess > 0 else (high, low)
        member, instead = queue.first(room), other.first(room)
        if member is None or (instead is not None and member.claim <= even < instead.claim):
            queue, member = other, instead


def _settle(members: list[_Member], kind: Kind, budget: int) -> dict[str, float]:
    """Credits after the pass: what it cost is granted back by weight, so that the credits of those
    who have more to do sum to zero. A job whose batch ran out comes back at best level with the
    first of those who could have joined and had to wait, or with the mean. If nobody has more to
    do, nobody is owed anything, and who has had more remembers a turn of it: or the first of equals
    would have the turn that is left over every time."""
    behind = [member for member in members if member.has_more]
    if not behind:
        first = max(member.claim for member in members)
        return {
            member.job: max((member.claim - first) * member.weight, -budget / TURNS)
            for member in members
        }
    mean = sum(member.credit for member in behind) / sum(member.weight for member in behind)
    front = max([mean, *(member.claim for member in behind if member.kind is kind)])
    for member in members:
        claim = member.claim if member.has_more else min(member.claim, front)
        member.credit = (claim - mean) * member.weight
    return {member.job: member.credit for member in members}
