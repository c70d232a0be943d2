"""What a policy asks: the speed, the memory and the slowdowns of a group under a plan, what merging
gains, what moving costs.

The model is that of predict.py, carried to several replicas and written for many calls: what
depends on one job alone is worked out once (`JobFigures`), and a prediction is a few sums over the
group's jobs. Replicas take turns of whole sequences: in a round, each job's share is dealt to the
replicas, the fullest of them sets the time, and jobs whose batch is through sum their gradients.

One unit runs through it: *GPUs' worth*. A job that runs at its solo rate is worth the GPUs it
brings, at half that rate half of them. The worth of a group is the sum over its jobs: how many GPUs
would be needed to do its work with every job alone. It compares jobs of different bases and sizes.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple

from tlora.core.cluster import Cluster, Link, Tier
from tlora.core.errors import SpecError
from tlora.core.load import JobLoad
from tlora.core.plan import Plan
from tlora.core.request import JobRequest
from tlora.costs.predict import adapter_parameters
from tlora.costs.profile import Profile
from tlora.costs.rounds import (
    MEMORY_MARGIN,
    BaseCosts,
    Kernel,
    RoundWork,
    fullest_part,
    shared_tokens,
    usable_bytes,
    with_kernel,
)


@dataclass(slots=True)
class JobFigures:
    """What a prediction needs of one job."""

    batch_tokens: float
    mean_length: float
    longest: int
    parameters: float
    latent: float
    """Of the predictor's error: see `Costs.error`."""

    whole: RoundWork
    """A round with its whole batch."""

    beside_s: float
    """Of a batch's work on a device, what its rows do not say: attention and adapters."""

    least_s: float
    """Seconds of a GPU that a batch takes, however it is cut and whatever goes beside it."""

    solo_plan: Plan
    """A replica for every GPU it brings that a sequence can be found for, and the bucket that is
    fastest of those that fit."""

    solo_step_s: float
    """Seconds per step under that plan."""

    @property
    def solo_tokens_per_s(self) -> float:
        return self.batch_tokens / self.solo_step_s


@dataclass(frozen=True, slots=True)
class GroupPrediction:
    """Of jobs trained together under a plan, in the order asked for."""

    round_s: float
    """A nano-batch on every replica, and the steps that follow."""

    tokens: tuple[float, ...]
    """Of each job in a round."""

    steps_per_s: tuple[float, ...]
    memory_bytes: float | None
    """On the fullest GPU, at the peak; None where the profile has no measured memory."""

    fits: bool
    """With the margin; True where memory is not known."""

    worth: float
    """GPUs' worth."""

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / self.round_s


class Span(NamedTuple):
    key: int
    """Equal where the other two are."""

    replicas: int
    link: Link | None
    """Between them; None within one GPU."""


MOST_SPANS = 100_000
"""Kept at a time: there are many ways to choose GPUs."""

MOST_SHAPES = 10_000
"""Likewise of jobs."""


class Costs:
    """Predictions from the profiles of a cluster's GPUs, one for each base."""

    def __init__(
        self,
        profiles: Mapping[str, Profile],
        cluster: Cluster,
        *,
        kernel: Kernel = "fused",
        margin: float = MEMORY_MARGIN,
        error: float = 0.0,
        seed: int = 0,
    ) -> None:
        """With an `error` of 0.1, predicted seconds are off by a factor exp(0.1 z), z standard
        normal: drawn per job from seed and name, and for a group the sum of its jobs' draws / the
        root of their number. So a predictor is wrong in the same way every time it is asked."""
        self.cluster = cluster
        self.error = error
        self.seed = seed
        self._bases = {
            base: BaseCosts(with_kernel(each, kernel), usable_bytes(each, cluster, margin))
            for base, each in profiles.items()
        }
        self._figures: dict[str, JobFigures] = {}
        self._shapes: dict[tuple[str, JobLoad, int], JobFigures] = {}
        self._spans: dict[tuple[int, ...], Span] = {}

    def span(self, gpus: tuple[int, ...]) -> Span:
        """All that the price of a load on these GPUs depends on, but for their speeds."""
        found = self._spans.get(gpus)
        if found is None:
            tier = self.cluster.tier(gpus)
            found = Span(len(gpus) * len(Tier) + tier, len(gpus), self.cluster.link(tier))
            if len(self._spans) >= MOST_SPANS:
                self._spans.clear()
            self._spans[gpus] = found
        return found

    def base(self, name: str) -> BaseCosts:
        if name not in self._bases:
            known = ", ".join(self._bases) or "none"
            raise SpecError(f"no profile for base '{name}'; there is {known}", field="base")
        return self._bases[name]

    def profile(self, base: str) -> Profile:
        return self.base(base).profile

    def figures(self, request: JobRequest) -> JobFigures:
        """Kept by the job's name: a request never changes."""
        found = self._figures.get(request.name)
        if found is None:
            found = self._new_figures(request)
            self._figures[request.name] = found
        return found

    def forget(self, job: str) -> None:
        """A job that is done."""
        self._figures.pop(job, None)

    def solo(self, request: JobRequest) -> GroupPrediction:
        """Alone on the GPUs it brings, next to each other."""
        plan = self.figures(request).solo_plan
        return self.predict([request], [1.0], plan, narrowest(self.cluster, plan.gpus))

    def predict(
        self,
        requests: Sequence[JobRequest],
        weights: Sequence[float],
        plan: Plan,
        tier: Tier,
        *,
        speed: float = 1.0,
    ) -> GroupPrediction:
        """`tier` is how far apart the plan's GPUs lie, `speed` that of the slowest of them."""
        if not plan.is_replicated_only or (plan.replicas > 1 and plan.adapters != "data_parallel"):
            raise SpecError(
                f"policies know replicas with data-parallel adapters, not {plan}: "
                "costs.plans.price_plan prices it",
                field="plan",
            )
        base = self.base(requests[0].base)
        figures = [self.figures(request) for request in requests]
        shares = shared_tokens(
            [each.batch_tokens for each in figures], weights, plan.bucket * plan.replicas
        )
        work = _sum_of_parts(shares, figures)
        segments = segments_of(work, shares, figures, plan.replicas)
        link = self.cluster.link(tier)
        seconds, rows = base.round_s(work, segments, plan.bucket, plan.replicas, link)
        seconds *= self.mistake(sum(each.latent for each in figures), len(figures)) / speed
        steps_per_s = tuple(
            tokens / each.batch_tokens / seconds
            for tokens, each in zip(shares, figures, strict=True)
        )
        memory, fits = base.memory(
            rows,
            max(each.longest for each in figures),
            plan.bucket,
            sum(each.parameters for each in figures),
        )
        return GroupPrediction(
            round_s=seconds,
            tokens=tuple(shares),
            steps_per_s=steps_per_s,
            memory_bytes=memory or None,
            fits=fits,
            worth=sum(
                request.gpus * rate * each.solo_step_s
                for request, rate, each in zip(requests, steps_per_s, figures, strict=True)
            ),
        )

    def mistake(self, latents: float, jobs: int) -> float:
        """The factor by which predicted seconds of a group are off."""
        return math.exp(self.error * latents / math.sqrt(jobs)) if self.error else 1.0

    def start_s(self, base: str) -> float:
        """Of a new group: load the base, attach, warm up."""
        profile = self.profile(base)
        return (profile.load_s or 0.0) + profile.attach_s + profile.warmup_s

    def join_s(self, base: str) -> float:
        """An attach to a live group; the group stands still meanwhile."""
        return self.profile(base).attach_s

    def leave_s(self, base: str) -> float:
        """A detach; the group stands still meanwhile."""
        return self.profile(base).detach_s

    def move_s(self, base: str) -> float:
        """Of a job from a live group to another."""
        return self.leave_s(base) + self.join_s(base)

    def resize_s(self, base: str, *, grows: bool) -> float:
        """New replicas load and warm up while the others go on, and then take part: the group
        stands still for an attach. Fewer replicas, another bucket or other weights cost nothing."""
        return self.profile(base).attach_s if grows else 0.0

    def _new_figures(self, request: JobRequest) -> JobFigures:
        """Many jobs are of one shape, and differ in what is predicted wrongly of them."""
        shape = (request.base, request.load, request.gpus)
        figures = self._shapes.get(shape)
        if figures is None:
            if len(self._shapes) >= MOST_SHAPES:
                self._shapes.clear()
            figures = self._shapes[shape] = self._figures_of(request)
        if not self.error:
            return figures
        latent = _normal(self.seed, request.name)
        step_s = figures.solo_step_s * self.mistake(latent, 1)
        return replace(figures, latent=latent, solo_step_s=step_s)

    def _figures_of(self, request: JobRequest) -> JobFigures:
        """Without a mistake."""
        base, load = self.base(request.base), request.load
        profile = base.profile
        parameters = adapter_parameters(profile, load)
        step_s = profile.steps.job_s + profile.steps.parameter_s * parameters
        tokens = load.batch_tokens
        lora_s = load.coverage * (profile.time.lora_s + profile.time.rank_s * load.rank)
        whole = RoundWork(
            tokens=tokens,
            squares=tokens * load.squares_per_token,
            lora_s=tokens * lora_s,
            sequences=float(load.batch_size),
            steps=1.0,
            step_s=step_s,
            parameters=parameters,
        )
        beside_s = profile.time.square_s * whole.squares + whole.lora_s
        replicas = min(request.gpus, load.batch_size)
        link = self.cluster.link(narrowest(self.cluster, replicas))
        longest = max(load.lengths)
        found: list[tuple[bool, float, int]] = []
        for bucket in base.buckets:
            part = min(1.0, bucket * replicas / tokens)
            seconds, rows = base.round_s(whole.times(part), 1.0, bucket, replicas, link)
            _, fits = base.memory(rows, longest, bucket, parameters)
            found.append((not fits, seconds / part, bucket))
        _, seconds, bucket = min(found)
        return JobFigures(
            batch_tokens=tokens,
            mean_length=load.mean_length,
            longest=longest,
            parameters=parameters,
            latent=0.0,
            whole=whole,
            beside_s=beside_s,
            least_s=profile.time.row_s * tokens + beside_s,
            solo_plan=Plan(replicas=replicas, bucket=bucket),
            solo_step_s=seconds,
        )


def _sum_of_parts(shares: Sequence[float], figures: Sequence[JobFigures]) -> RoundWork:
    """Of each job so many tokens. In one piece, because simulations ask for little else."""
    tokens = squares = lora_s = sequences = steps = step_s = parameters = 0.0
    for share, each in zip(shares, figures, strict=True):
        part, whole = share / each.batch_tokens, each.whole
        tokens += whole[0] * part
        squares += whole[1] * part
        lora_s += whole[2] * part
        sequences += whole[3] * part
        steps += whole[4] * part
        step_s += whole[5] * part
        parameters += whole[6] * part
    return RoundWork(tokens, squares, lora_s, sequences, steps, step_s, parameters)


def segments_of(
    work: RoundWork, shares: Sequence[float], figures: Sequence[JobFigures], replicas: int
) -> float:
    """In the fullest replica, on average."""
    if replicas == 1:
        return float(len(figures))
    part = fullest_part(work.sequences, replicas)
    return sum(
        min(1.0, tokens / each.mean_length * part)
        for tokens, each in zip(shares, figures, strict=True)
    )


def narrowest(cluster: Cluster, gpus: int) -> Tier:
    """For so many GPUs of an empty cluster."""
    if gpus == 1:
        return Tier.GPU
    if gpus <= max(len(node.gpus) for node in cluster.nodes):
        return Tier.NODE
    sizes = {node.number: len(node.gpus) for node in cluster.nodes}
    racks = max(sum(sizes[node] for node in rack.nodes) for rack in cluster.racks)
    return Tier.RACK if gpus <= racks else Tier.CLUSTER


def _normal(seed: int, name: str) -> float:
    """Standard normal, from these alone."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest) + 0.5) / 2**64
    return NormalDist().inv_cdf(uniform)
