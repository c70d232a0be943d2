"""A round's tokens dealt to the ranks of a plan: which jobs each holds, and its work in a round."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tlora.core.dealing import deal_jobs, load_of
from tlora.core.plan import Plan
from tlora.core.request import JobRequest
from tlora.costs.groups import JobFigures, segments_of
from tlora.costs.rounds import NO_WORK, RoundWork, fullest_part, shared_tokens


def placement_of(requests: Sequence[JobRequest], plan: Plan) -> list[int | None]:
    """The rank of each job as a group deals them, None for those that span all."""
    local = [each for each in requests if not _spans_ranks(each.name, plan)]
    places = deal_jobs([load_of(each) for each in local], plan.ranks)
    return [places.get(each.name) for each in requests]


@dataclass(frozen=True, slots=True)
class RankWork:
    work: RoundWork
    """Of a round, on this rank."""

    segments: float
    parameters: float
    """Of the adapters that it holds."""


@dataclass(frozen=True, slots=True)
class RankKind:
    """Ranks on which the same jobs live: one that has some, or all that have none."""

    local: Sequence[int]
    count: int


class Deck:
    """A round's tokens, dealt to ranks. A job that spans ranks competes on each with a part of its
    batch and of its weight."""

    def __init__(
        self,
        figures: Sequence[JobFigures],
        weights: Sequence[float],
        placement: Sequence[int | None],
        plan: Plan,
    ) -> None:
        self.figures = figures
        self.placement = placement
        self.ranks = plan.ranks
        self.tokens = [0.0] * len(figures)
        self._spread = [job for job, rank in enumerate(placement) if rank is None]
        self.kinds = _kinds(placement, plan.ranks)
        """In place of the ranks, of which a plan may have thousands for a few jobs."""

        least = [math.inf] * len(figures)
        for kind in self.kinds:
            jobs = [*kind.local, *self._spread]
            parts = [1 if placement[job] is not None else self.ranks for job in jobs]
            shares = shared_tokens(
                [figures[job].batch_tokens / part for job, part in zip(jobs, parts, strict=True)],
                [weights[job] / part for job, part in zip(jobs, parts, strict=True)],
                plan.bucket * plan.pp,
            )
            for job, part, share in zip(jobs, parts, shares, strict=True):
                least[job] = min(least[job], share * part)
        self.tokens = least
        self.spread_work = self._sum(self._spread)
        self._spread_segments = 0.0
        if self._spread:
            self._spread_segments = segments_of(
                self.spread_work,
                [self.tokens[job] for job in self._spread],
                [figures[job] for job in self._spread],
                self.ranks,
            )

    @property
    def largest_spread(self) -> float:
        """Parameters of the largest adapter that spans ranks."""
        return max((self.figures[job].parameters for job in self._spread), default=0.0)

    @property
    def longest(self) -> list[int]:
        return [each.longest for each in self.figures]

    @property
    def empty_ranks(self) -> int:
        """Sequences of the jobs that span ranks go first to those that have nothing else."""
        without = sum(kind.count for kind in self.kinds if not kind.local)
        return max(0, without - math.ceil(self.spread_work.sequences - 1e-9))

    def rank(self, local: Sequence[int], *, of_the_fullest: bool = True) -> RankWork:
        """One with these jobs. Of those that span ranks it has what the fullest has, or what all
        have on average: each round another one may be the fullest."""
        work = self._sum(local)
        held = sum(self.figures[job].parameters for job in (*local, *self._spread))
        segments = float(len(local))
        if self._spread:
            shared, part = self.spread_work, 1 / self.ranks
            if of_the_fullest:
                part = fullest_part(shared.sequences, self.ranks)
            work = work.plus(
                # Every rank takes the whole step of such a job.
                shared.times(part)._replace(
                    steps=shared.steps, step_s=shared.step_s, parameters=shared.parameters
                )
            )
            segments += self._spread_segments
        return RankWork(work, segments, held)

    def _sum(self, jobs: Sequence[int]) -> RoundWork:
        work = NO_WORK
        for job in jobs:
            each = self.figures[job]
            work = work.plus(each.whole.times(self.tokens[job] / each.batch_tokens))
        return work


def _kinds(placement: Sequence[int | None], ranks: int) -> list[RankKind]:
    local: dict[int, list[int]] = {}
    for job, rank in enumerate(placement):
        if rank is not None:
            local.setdefault(rank, []).append(job)
    kinds = [RankKind(local[rank], 1) for rank in sorted(local)]
    if len(local) < ranks:
        kinds.append(RankKind((), ranks - len(local)))
    return kinds


def _spans_ranks(job: str, plan: Plan) -> bool:
    return plan.adapters == "data_parallel" or (plan.adapters == "mixed" and job in plan.spread)
