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

from tlora.core.cluster import Tier
from tlora.core.plan import Plan
from tlora.core.request import JobRequest
from tlora.costs.groups import Costs, GroupPrediction, JobFigures
from tlora.costs.rounds import BaseCosts
from tlora.training.compose import Composition, Kind, Waiting, compose

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
    jobs = [_Feed(request, weight) for request, weight in zip(requests, weights, strict=True)]
    sizes = [int(size) for size in base.profile.sizes(bucket)]
    seconds, segments = 0.0, 0
    for _ in range(NANO_BATCHES):
        found = compose([job.waiting for job in jobs], budget=bucket, buckets=sizes)
        assert found is not None, "a job always has something waiting"
        seconds += _seconds(base, found, jobs, figures, bucket)
        segments += len(found.picks)
    return Round(
        seconds=seconds / NANO_BATCHES,
        tokens=tuple(job.tokens / NANO_BATCHES for job in jobs),
        steps=tuple(
            job.sequences / request.load.batch_size / NANO_BATCHES
            for job, request in zip(jobs, requests, strict=True)
        ),
        segments=segments / NANO_BATCHES,
    )


def _seconds(
    base: BaseCosts,
    found: Composition,
    jobs: Sequence["_Feed"],
    figures: Sequence[JobFigures],
    bucket: int,
) -> float:
    """Of this nano-batch; its sequences leave those that wait."""
    picked = {pick.job: pick.indices for pick in found.picks}
    beside_s = steps = step_s = parameters = 0.0
    for job, each in zip(jobs, figures, strict=True):
        job.credit = found.credits[job.name]
        if job.name not in picked:
            continue
        lengths = job.take(picked[job.name])
        squares = sum(length**2 for length in lengths)
        lora_s = each.whole.lora_s / each.batch_tokens
        beside_s += base.time.square_s * squares + lora_s * sum(lengths)
        if not job.left:
            job.begin_batch()
            steps += each.whole.steps
            step_s += each.whole.step_s
            parameters += each.whole.parameters
    seconds, _ = base.seconds(
        float(found.tokens),
        beside_s,
        float(len(picked)),
        bucket,
        steps,
        step_s,
        parameters,
        1,
        None,
    )
    return seconds


class _Feed:
    """A job's sequences, batch by batch."""

    def __init__(self, request: JobRequest, weight: float) -> None:
        self.name, self.load, self.weight = request.name, request.load, weight
        self.credit = 0.0
        self.left: list[int] = []
        self.tokens = self.sequences = 0
        self._order = _shuffled(request)
        self.begin_batch()

    @property
    def waiting(self) -> Waiting:
        return Waiting(self.name, Kind.TRAIN, self.left, self.weight, self.credit, self.load.rank)

    def begin_batch(self) -> None:
        self.left = [next(self._order) for _ in range(self.load.batch_size)]

    def take(self, indices: Sequence[int]) -> list[int]:
        taken = [self.left[index] for index in indices]
        gone = set(indices)
        self.left = [each for index, each in enumerate(self.left) if index not in gone]
        self.tokens += sum(taken)
        self.sequences += len(taken)
        return taken


def _shuffled(request: JobRequest) -> Iterator[int]:
    """Its lengths, again and again, in ever another order."""
    draw = random.Random(request.name)
    lengths = list(request.load.lengths)
    while True:
        draw.shuffle(lengths)
        yield from lengths
