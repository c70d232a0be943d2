"""The work that every arm does: jobs, and random tokens of the lengths asked for."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tlora.core.job import DataSpec, JobSpec, LoraSpec, TrainSpec
from tlora.core.sequence import TokenSequence

LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Done:
    """What an arm has worked off."""

    tokens: int
    """Of real sequences; padding is not counted."""

    sequences: int
    steps: int
    """Optimiser steps of all jobs; 0 where nothing is trained."""


@dataclass(frozen=True, slots=True)
class Workload:
    jobs: list[JobSpec]
    rows: dict[str, list[TokenSequence]]
    """Each job passes its rows once."""

    @property
    def sequences(self) -> list[TokenSequence]:
        return [row for rows in self.rows.values() for row in rows]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))

    @property
    def total_rank(self) -> int:
        return sum(job.lora.r for job in self.jobs)

    @property
    def longest(self) -> int:
        return max(map(len, self.sequences))

    def of(self, jobs: Sequence[JobSpec]) -> Done:
        """What training these jobs comes to."""
        rows = [row for job in jobs for row in self.rows[job.name]]
        steps = sum(job.train.max_steps or 0 for job in jobs)
        return Done(sum(map(len, rows)), len(rows), steps)


def new_workload(
    *,
    num_jobs: int,
    ranks: Sequence[int],
    batches: Sequence[int],
    lengths: Sequence[int],
    steps: int,
    dropout: float,
    vocabulary: int,
) -> Workload:
    """Ranks and batch sizes go round; lengths are drawn, the same on every machine."""
    generator = np.random.Generator(np.random.PCG64(0))
    jobs: list[JobSpec] = []
    rows: dict[str, list[TokenSequence]] = {}
    for i in range(num_jobs):
        rank, batch = ranks[i % len(ranks)], batches[i % len(batches)]
        job = JobSpec(
            name=f"job-{i}",
            data=DataSpec(path="random tokens"),
            lora=LoraSpec(r=rank, lora_alpha=32.0, lora_dropout=dropout),
            train=TrainSpec(
                batch_size=batch,
                max_steps=steps,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                seed=i,
            ),
        )
        drawn = generator.integers(0, len(lengths), batch * steps)
        jobs.append(job)
        rows[job.name] = [
            _random_row(generator, lengths[index], vocabulary) for index in drawn.tolist()
        ]
    return Workload(jobs, rows)


def _random_row(generator: np.random.Generator, length: int, vocabulary: int) -> TokenSequence:
    ids = generator.integers(0, vocabulary, length).astype(np.int32)
    return TokenSequence(ids, ids)


def in_batches_by_length(
    rows: Sequence[TokenSequence], budget_tokens: int
) -> list[list[TokenSequence]]:
    """Sorted by length, and cut so that no batch, padded to its longest, is beyond the budget."""
    batches: list[list[TokenSequence]] = []
    for row in sorted(rows, key=len):
        if batches and (len(batches[-1]) + 1) * len(row) <= budget_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def in_full_batches(rows: Sequence[TokenSequence], budget_tokens: int) -> list[list[TokenSequence]]:
    """First fit, longest first: as few batches as possible, none beyond the budget."""
    batches: list[list[TokenSequence]] = []
    room: list[int] = []
    for row in sorted(rows, key=len, reverse=True):
        place = next((i for i, left in enumerate(room) if left >= len(row)), None)
        if place is None:
            batches.append([])
            room.append(max(budget_tokens, len(row)))
            place = len(room) - 1
        batches[place].append(row)
        room[place] -= len(row)
    return batches
