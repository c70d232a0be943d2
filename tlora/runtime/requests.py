"""A job of a file as the scheduler sees it: from its spec, its data and the base's shape."""

from collections.abc import Iterable, Mapping

import numpy as np

from tlora.core.job import JobSpec, RunSpec
from tlora.core.load import JobLoad
from tlora.core.request import JobRequest
from tlora.data.cursor import total_steps
from tlora.data.prepare import PreparedData
from tlora.model.targets import Target, choose_targets

SAMPLE = 64
"""Lengths that stand for those of a dataset."""


def requests_of(
    spec: RunSpec, data: Mapping[str, PreparedData], targets: dict[str, Target], *, base: str
) -> list[JobRequest]:
    """In the order of the file; `base` names the profile. A job brings one GPU: more are the
    scheduler's to give."""
    return [request_of(job, data[job.name], targets, base=base) for job in spec.jobs]


def request_of(
    job: JobSpec, data: PreparedData, targets: dict[str, Target], *, base: str
) -> JobRequest:
    rows, train = len(data.train), job.train
    steps = total_steps(rows, train.batch_size, train.num_train_epochs, train.max_steps)
    return JobRequest(
        name=job.name,
        base=base,
        load=JobLoad(
            rank=job.lora.r,
            # A batch never has more rows than there are.
            batch_size=min(train.batch_size, rows),
            lengths=sampled(data.train.lengths, SAMPLE),
            weight=train.weight,
            coverage=coverage(choose_targets(job, targets), targets.values()),
        ),
        total_steps=max(1, steps),
        priority=train.weight,
    )


def sampled(lengths: np.ndarray, most: int) -> tuple[int, ...]:
    """All of them, or so many: the means of as many equal parts of the sorted lengths, and in the
    last place the longest, which memory is asked for."""
    ordered = np.sort(lengths)
    if len(ordered) <= most:
        return tuple(int(length) for length in ordered)
    parts = np.array_split(ordered, most)
    means = [max(1, round(float(part.mean()))) for part in parts[:-1]]
    return (*means, int(ordered[-1]))


def coverage(chosen: Iterable[Target], every: Iterable[Target]) -> float:
    """The part of all linears' widths that these are."""
    return widths(chosen) / widths(every)


def widths(targets: Iterable[Target]) -> int:
    """Adapter parameters per unit of rank."""
    return sum(target.in_features + target.out_features for target in targets)
