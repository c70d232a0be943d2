"""Costs of groups whose nano-batches are composed as the engine composes them.

`Costs` deals a round's tokens as if they were a liquid, so that policies can ask thousands of times
in a turn. The engine puts whole sequences into a nano-batch and never two batches of one job, so
where the batches of a group do not all fit into the bucket, the nano-batch after a full one is
part empty: small jobs step more often than a liquid would let them, and large ones less often.
Here the engine's own composer is run over the jobs' lengths, and every nano-batch has its price.
That takes milliseconds a group: for an executor, which asks when a group changes.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tlora.core.cluster import Tier
from tlora.core.plan import Plan
from tlora.core.request import JobRequest
from tlora.costs.groups import Costs, GroupPrediction, JobFigures
from tlora.costs.rounds import BaseCosts
from tlora.training.compose import Kind, Waiting, compose

NANO_BATCHES = 256
"""So many are composed of a group."""


class ComposedCosts(Costs):
    """On one GPU. Replicas are dealt to as `Costs` does it, and so are rounds that others ask for
    by their sums."""

    def predict(
        self,
        requests: Sequence[JobRequest],
        weights: Sequence[float],
        plan: Plan,
        tier: Tier,
        *,
        speed: float = 1.0,
    ) -> GroupPrediction:
        dealt = super().predict(requests, weights, plan, tier, speed=speed)
        if plan.replicas > 1:
            return dealt
        base = self.base(requests[0].base)
        figures = [self.figures(request) for request in requests]
        mean = composed_round(base, requests, figures, weights, plan.bucket)
        pace = self.mistake(sum(each.latent for each in figures), len(figures)) / speed
        steps_per_s = tuple(steps / (mean.seconds * pace) for steps in mean.steps)
        return replace(
            dealt,
            round_s=mean.seconds * pace,
            tokens=mean.tokens,
            steps_per_s=steps_per_s,
            worth=sum(
                request.gpus * rate * each.solo_step_s
                for request, rate, each in zip(requests, steps_per_s, figures, strict=True)
            ),
        )

    def _figures_of(self, request: JobRequest) -> JobFigures:
        """A job alone is composed, too, under the plan that policies have for it."""
        figures = super()._figures_of(request)
        plan = figures.solo_plan
        if plan.replicas > 1:
            return figures
        mean = composed_round(self.base(request.base), [request], [figures], [1.0], plan.bucket)
        return replace(figures, solo_step_s=mean.seconds / mean.steps[0])


@dataclass(frozen=True, slots=True)
class Round:
    """A nano-batch and the steps that follow, on average."""

    seconds: float
    tokens: tuple[float, ...]
    """Of each job."""

    steps: tuple[float, ...]
    segments: float
    """Jobs that are in it."""


def composed_round(
    base: BaseCosts,
    requests: Sequence[JobRequest],
    figures: Sequence[JobFigures],
    weights: Sequence[float],
    bucket: int,
) -> Round:
    """Each job's data come in an order that is its own, whoever is beside it."""
    jobs = [
        Feed(request, each, weight)
        for request, each, weight in zip(requests, figures, weights, strict=True)
    ]
    sizes = sizes_of(base, bucket)
    seconds, segments = 0.0, 0
    for _ in range(NANO_BATCHES):
        found = next_nano_batch(base, jobs, bucket, sizes)
        seconds += found.seconds
        segments += found.segments
    return Round(
        seconds=seconds / NANO_BATCHES,
        tokens=tuple(job.tokens / NANO_BATCHES for job in jobs),
        steps=tuple(job.steps / NANO_BATCHES for job in jobs),
        segments=segments / NANO_BATCHES,
    )


class Feed:
    """A job's sequences, batch by batch, and what it has trained."""

    def __init__(
        self, request: JobRequest, figures: JobFigures, weight: float, *, seed: int = 0
    ) -> None:
        self.name, self.load, self.figures = request.name, request.load, figures
        self.weight = weight
        self.credit = 0.0
        self.left: list[int] = []
        self.tokens = self._sequences = 0
        self._order = _shuffled(request, seed)
        self.begin_batch()

    @property
    def waiting(self) -> Waiting:
        return Waiting(self.name, Kind.TRAIN, self.left, self.weight, self.credit, self.load.rank)

    @property
    def steps(self) -> float:
        """A batch that is under way counts by its sequences."""
        return self._sequences / self.load.batch_size

    def begin_batch(self) -> None:
        self.left = [next(self._order) for _ in range(self.load.batch_size)]

    def take(self, indices: Sequence[int]) -> list[int]:
        taken = [self.left[index] for index in indices]
        gone = set(indices)
        self.left = [each for index, each in enumerate(self.left) if index not in gone]
        self.tokens += sum(taken)
        self._sequences += len(taken)
        return taken


class ComposedNanoBatch(NamedTuple):
    seconds: float
    """With the steps after it."""

    segments: int


def next_nano_batch(
    base: BaseCosts, jobs: Sequence[Feed], bucket: int, sizes: Sequence[int]
) -> ComposedNanoBatch:
    """What it has taken is trained; whose batch is through begins the next."""
    found = compose([job.waiting for job in jobs], budget=bucket, buckets=sizes)
    assert found is not None, "a job always has something waiting"
    picked = {pick.job: pick.indices for pick in found.picks}
    beside_s = steps = step_s = parameters = 0.0
    for job in jobs:
        job.credit = found.credits[job.name]
        if job.name not in picked:
            continue
        lengths, whole = job.take(picked[job.name]), job.figures.whole
        squares = sum(length**2 for length in lengths)
        lora_s = whole.lora_s / job.figures.batch_tokens
        beside_s += base.time.square_s * squares + lora_s * sum(lengths)
        if not job.left:
            job.begin_batch()
            steps += whole.steps
            step_s += whole.step_s
            parameters += whole.parameters
    tokens, segments = float(found.tokens), float(len(picked))
    seconds, _ = base.seconds(
        tokens, beside_s, segments, bucket, steps, step_s, parameters, 1, None
    )
    return ComposedNanoBatch(seconds, len(picked))


def sizes_of(base: BaseCosts, bucket: int) -> list[int]:
    """That the engine pads to."""
    return [int(size) for size in base.profile.sizes(bucket)]


def _shuffled(request: JobRequest, seed: int) -> Iterator[int]:
    """Its lengths, again and again, in ever another order."""
    draw = random.Random(f"{seed}:{request.name}")
    lengths = list(request.load.lengths)
    while True:
        draw.shuffle(lengths)
        yield from lengths
