"""A nano-batch as the engine composes it of many jobs, for benchmarks of what runs in it: who has
how many tokens there, and whose batch begins."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from tlora.training.compose import Kind, Waiting, buckets_for, compose


@dataclass(frozen=True)
class Part:
    job: int
    tokens: int
    begins: bool
    """Nothing of its batch came before: its gradients are known to be zero."""


@dataclass
class _Job:
    batch: int
    random: Random
    left: list[int] = field(default_factory=list[int])
    begins: bool = True
    credit: float = 0.0


def composed_batch(
    ranks: Sequence[int],
    budget: int,
    *,
    lengths: Sequence[int],
    batches: Sequence[int],
    number: int,
) -> list[Part]:
    """The nano-batch of this number that jobs of these ranks make, in the order of the jobs. Sizes
    of batches, in sequences, are given to them in turn; lengths are drawn."""
    jobs = [_Job(batches[i % len(batches)], Random(i)) for i in range(len(ranks))]
    parts: list[Part] = []
    for _ in range(number + 1):
        for job in jobs:
            if not job.left:
                job.left, job.begins = job.random.choices(lengths, k=job.batch), True
        found = compose(
            [
                Waiting(str(i), Kind.TRAIN, job.left, credit=job.credit, rank=ranks[i])
                for i, job in enumerate(jobs)
            ],
            budget=budget,
            buckets=buckets_for(budget),
        )
        assert found is not None
        parts = []
        for pick in found.picks:
            job, taken = jobs[int(pick.job)], set(pick.indices)
            tokens = sum(job.left[index] for index in taken)
            parts.append(Part(int(pick.job), tokens, job.begins))
            job.left = [length for index, length in enumerate(job.left) if index not in taken]
            job.begins = False
        for name, credit in found.credits.items():
            jobs[int(name)].credit = credit
    return sorted(parts, key=lambda part: part.job)
