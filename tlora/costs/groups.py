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
from functools import cached_property
from statistics import NormalDist
from typing import Literal

from tlora.core.cluster import Cluster, Link, Tier
from tlora.core.errors import SpecError
from tlora.core.load import JobLoad
from tlora.core.plan import Plan
from tlora.core.request import JobRequest
from tlora.costs.predict import adapter_parameters, rows_of
from tlora.costs.profile import Profile

Kernel = Literal["fused", "unfused"]

MEMORY_MARGIN = 0.05
"""Of the device, kept free: the memory model is a fit."""

UNFUSED_ROWS = 0.51 * 8192 / 8
"""What one more adapter costs in a loop over adapters, in rows of the saturated backbone: eight of
them added 51 % to the frozen linears of 8,192 rows (H200, 8B, rank 16, eager)."""

BUCKET_HALVINGS = 4
"""Plans may have the profile's budget of tokens, or that halved so many times."""


@dataclass(slots=True)
class JobFigures:
    """What a prediction needs of one job."""

    batch_tokens: float
    mean_length: float
    longest: int
    squares_per_token: float
    lora_s: float
    """Per token."""

    parameters: float
    step_s: float
    """The optimiser's, per step of this job."""

    latent: float
    """Of the predictor's error: see `Costs.error`."""

    solo_plan: Plan
    solo_step_s: float = 0.0
    """Seconds per step alone on the GPUs it brings; 0 until it is known."""

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
        self.profiles = {base: _with_kernel(each, kernel) for base, each in profiles.items()}
        self.cluster = cluster
        self.margin = margin
        self.error = error
        self.seed = seed
        self._figures: dict[str, JobFigures] = {}

    def profile(self, base: str) -> Profile:
        if base not in self.profiles:
            known = ", ".join(self.profiles) or "none"
            raise SpecError(f"no profile for base '{base}'; there is {known}", field="base")
        return self.profiles[base]

    def buckets(self, base: str) -> list[int]:
        """The budgets that plans may have, from the smallest."""
        budget = self.profile(base).budget_tokens
        return sorted({max(1, budget >> halving) for halving in range(BUCKET_HALVINGS + 1)})

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
        return self.predict([request], [1.0], plan, _narrowest(self.cluster, plan.gpus))

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
        if not plan.is_replicated_only:
            raise SpecError(f"only replicas are priced, not {plan}", field="plan")
        profile = self.profile(requests[0].base)
        figures = [self.figures(request) for request in requests]
        shares = shared_tokens(
            [each.batch_tokens for each in figures], weights, plan.bucket * plan.replicas
        )
        seconds, rows = self._round(profile, figures, shares, plan, self.cluster.link(tier))
        seconds /= speed
        seconds *= self._mistake(figures)
        steps_per_s = tuple(
            tokens / each.batch_tokens / seconds
            for tokens, each in zip(shares, figures, strict=True)
        )
        longest = max(each.longest for each in figures)
        memory = profile.memory.bytes(
            rows=max(rows, rows_of(profile, longest, plan.bucket)),
            adapter_parameters=sum(each.parameters for each in figures),
        )
        usable = self._usable_bytes(profile)
        return GroupPrediction(
            round_s=seconds,
            tokens=tuple(shares),
            steps_per_s=steps_per_s,
            memory_bytes=memory,
            fits=memory is None or usable is None or memory <= usable,
            worth=sum(
                request.gpus * rate * each.solo_step_s
                for request, rate, each in zip(requests, steps_per_s, figures, strict=True)
            ),
        )

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

    def _usable_bytes(self, profile: Profile) -> float | None:
        usable = profile.memory.usable_bytes
        own = self._memory_bytes
        if usable is None or own is None:
            found = usable if own is None else own
        else:
            found = min(usable, own)
        return None if found is None else found * (1 - self.margin)

    @cached_property
    def _memory_bytes(self) -> int | None:
        return self.cluster.memory_bytes(range(len(self.cluster)))

    def _round(
        self,
        profile: Profile,
        figures: Sequence[JobFigures],
        shares: Sequence[float],
        plan: Plan,
        link: Link | None,
    ) -> tuple[float, float]:
        """Seconds of a round, and the rows of the fullest replica."""
        replicas = plan.replicas
        total = squares = lora = sequences = steps = step_s = parameters = 0.0
        for tokens, each in zip(shares, figures, strict=True):
            total += tokens
            squares += tokens * each.squares_per_token
            lora += tokens * each.lora_s
            sequences += tokens / each.mean_length
            many = tokens / each.batch_tokens
            steps += many
            step_s += many * each.step_s
            parameters += many * each.parameters
        part = 1.0
        segments = float(len(figures))
        if replicas > 1:
            part = math.ceil(sequences / replicas - 1e-9) / sequences
            segments = sum(
                min(1.0, tokens / each.mean_length * part)
                for tokens, each in zip(shares, figures, strict=True)
            )
        rows = rows_of(profile, total * part, plan.bucket)
        time = profile.time
        work = time.row_s * rows + (time.square_s * squares + lora) * part
        seconds = time.fixed_s + time.segment_s * segments
        seconds += smooth_max(time.flat_s, work, time.sharpness)
        passes = min(1.0, steps)
        seconds += passes * profile.steps.pass_s + step_s
        if replicas > 1 and link is not None:
            ring = 2 * (replicas - 1) / replicas
            seconds += passes * link.latency_s + ring * 4 * parameters / link.bytes_per_s
        return seconds, rows

    def _mistake(self, figures: Sequence[JobFigures]) -> float:
        if not self.error:
            return 1.0
        latent = sum(each.latent for each in figures) / math.sqrt(len(figures))
        return math.exp(self.error * latent)

    def _new_figures(self, request: JobRequest) -> JobFigures:
        profile, load = self.profile(request.base), request.load
        parameters = adapter_parameters(profile, load)
        figures = JobFigures(
            batch_tokens=load.batch_tokens,
            mean_length=load.mean_length,
            longest=max(load.lengths),
            squares_per_token=load.squares_per_token,
            lora_s=load.coverage * (profile.time.lora_s + profile.time.rank_s * load.rank),
            parameters=parameters,
            step_s=profile.steps.job_s + profile.steps.parameter_s * parameters,
            latent=_normal(self.seed, request.name),
            solo_plan=solo_plan(load, request.gpus, profile.budget_tokens),
        )
        plan = figures.solo_plan
        link = self.cluster.link(_narrowest(self.cluster, plan.gpus))
        tokens = shared_tokens([figures.batch_tokens], [1.0], plan.bucket * plan.replicas)
        seconds, _ = self._round(profile, [figures], tokens, plan, link)
        rounds = figures.batch_tokens / tokens[0]
        figures.solo_step_s = rounds * seconds * self._mistake([figures])
        return figures


def solo_plan(load: JobLoad, gpus: int, bucket: int) -> Plan:
    """A replica for every GPU that a sequence can be found for."""
    return Plan(replicas=min(gpus, load.batch_size), bucket=bucket)


def shared_tokens(
    batch_tokens: Sequence[float], weights: Sequence[float], capacity: float
) -> list[float]:
    """Of each job in a round: by weight, at most its batch; what one cannot use goes to the
    others."""
    if sum(batch_tokens) <= capacity:
        return list(batch_tokens)
    shares = [0.0] * len(batch_tokens)
    # Those whose batch is small for their weight run out first.
    order = sorted(range(len(batch_tokens)), key=lambda i: batch_tokens[i] / weights[i])
    left, heavy = capacity, sum(weights)
    for i in order:
        shares[i] = min(batch_tokens[i], left * weights[i] / heavy)
        left -= shares[i]
        heavy -= weights[i]
    return shares


def smooth_max(one: float, other: float, sharpness: float) -> float:
    large, small = (one, other) if one > other else (other, one)
    if small <= 0:
        return large
    return large * (1 + (small / large) ** sharpness) ** (1 / sharpness)


def _with_kernel(profile: Profile, kernel: Kernel) -> Profile:
    if kernel == "fused":
        return profile
    loop_s = UNFUSED_ROWS * profile.time.row_s
    return replace(profile, time=replace(profile.time, segment_s=profile.time.segment_s + loop_s))


def _narrowest(cluster: Cluster, gpus: int) -> Tier:
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
