"""Nano-batches as the engine composes them of many jobs, for benchmarks of what runs in them: who
has how many tokens there, and whose batch begins."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random

from tlora.training.compose import Composition, Kind, Waiting, buckets_for, compose

Composer = Callable[[list[Waiting], int], Composition | None]


@dataclass(frozen=True)
class Part:
    job: int
    tokens: int
    begins: bool
    """Nothing of its batch came before: its gradients are known to be zero."""


@dataclass
class Job:
    lengths: Sequence[int]
    """To draw from."""

    rank: int
    batch: int
    """Sequences."""

    random: Random
    left: list[int] = field(default_factory=list[int])
    begins: bool = True
    credit: float = 0.0

    def waiting(self, name: str) -> Waiting:
        if not self.left:
            self.left, self.begins = self.random.choices(self.lengths, k=self.batch), True
        return Waiting(name, Kind.TRAIN, self.left, 1.0, self.credit, self.rank)


def as_the_engine(waiting: list[Waiting], budget: int) -> Composition | None:
    return compose(waiting, budget=budget, buckets=buckets_for(budget))


def nano_batches(
    jobs: Sequence[Job], budget: int, composer: Composer = as_the_engine
) -> Iterator[tuple[Composition, list[Part]]]:
    """One after the other, without end; parts in the order of the jobs."""
    while True:
        composition = composer([job.waiting(str(i)) for i, job in enumerate(jobs)], budget)
        assert composition is not None
        parts: list[Part] = []
        for pick in composition.picks:
            job, taken = jobs[int(pick.job)], set(pick.indices)
            tokens = sum(job.left[index] for index in taken)
            parts.append(Part(int(pick.job), tokens, job.begins))
            job.left = [length for index, length in enumerate(job.left) if index not in taken]
            job.begins = False
        for name, credit in composition.credits.items():
            jobs[int(name)].credit = credit
        yield composition, sorted(parts, key=lambda part: part.job)


def composed_batch(
    ranks: Sequence[int],
    budget: int,
    *,
    lengths: Sequence[int],
    batches: Sequence[int],
    number: int,
) -> list[Part]:
    """The nano-batch of this number that jobs of these ranks make. Sizes of batches, in sequences,
    are given to them in turn; lengths are drawn."""
    jobs = [
        Job(lengths, rank, batches[i % len(batches)], Random(i)) for i, rank in enumerate(ranks)
    ]
    _, parts = next(islice(nano_batches(jobs, budget), number, None))
    return parts
