"""What a scheduler asks: how fast a group of jobs trains, each of them, and what memory it takes.

Pure: a profile and jobs in, figures out. Jobs that share an engine get tokens by weight, and none
more in a nano-batch than one batch of its own; a job steps when its batch is through. Here tokens
flow: that sequences are whole, so that nano-batches end a little below the budget, is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tlora.core.errors import SpecError
from tlora.core.load import JobLoad
from tlora.costs.model import NanoBatch, Segment
from tlora.costs.profile import Profile

KNEE_SHARE = 0.95
KNEE_LENGTH = 512
KNEE_RANK = 16
KNEE_LIMIT = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRate:
    tokens_per_s: float
    steps_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    tokens_per_s: float
    """Useful tokens of all jobs."""

    jobs: tuple[JobRate, ...]
    """In the order asked for."""

    nano_batch: NanoBatch
    nano_batch_s: float
    steps_s: float
    """Of the optimiser, per nano-batch."""

    memory_bytes: float | None
    """At the peak; None where the profile has no measured memory."""

    fits: bool | None
    """Into what the device has left; None where that is not known."""


def predict(
    profile: Profile, jobs: Sequence[JobLoad], *, budget_tokens: int | None = None
) -> Prediction:
    """Of these jobs trained together, in nano-batches of up to so many tokens."""
    if not jobs:
        raise SpecError("a group needs a job", field="jobs")
    budget = profile.budget_tokens if budget_tokens is None else budget_tokens
    if budget < 1:
        raise SpecError(f"must be at least 1, got {budget}", field="budget_tokens")
    shares = shares_of(jobs, budget)
    batch = NanoBatch(
        rows=rows_of(profile, sum(shares), budget),
        squares=sum(
            tokens * job.squares_per_token for tokens, job in zip(shares, jobs, strict=True)
        ),
        segments=tuple(
            Segment(tokens, job.rank, job.coverage)
            for tokens, job in zip(shares, jobs, strict=True)
        ),
    )
    # Of each job's batch that a nano-batch works off: it steps as often.
    steps = [tokens / job.batch_tokens for tokens, job in zip(shares, jobs, strict=True)]
    parameters = [adapter_parameters(profile, job) for job in jobs]
    nano_batch_s = profile.time.seconds(batch)
    steps_s = profile.steps.seconds(
        passes=min(1.0, sum(steps)),
        jobs=sum(steps),
        parameters=sum(each * many for each, many in zip(steps, parameters, strict=True)),
    )
    seconds = nano_batch_s + steps_s
    longest = max(max(job.lengths) for job in jobs)
    memory = profile.memory.bytes(
        rows=max(batch.rows, rows_of(profile, longest, budget)),
        adapter_parameters=sum(parameters),
    )
    usable = profile.memory.usable_bytes
    return Prediction(
        tokens_per_s=sum(shares) / seconds,
        jobs=tuple(
            JobRate(tokens_per_s=tokens / seconds, steps_per_s=many / seconds)
            for tokens, many in zip(shares, steps, strict=True)
        ),
        nano_batch=batch,
        nano_batch_s=nano_batch_s,
        steps_s=steps_s,
        memory_bytes=memory,
        fits=None if memory is None or usable is None else memory <= usable,
    )


def solo(profile: Profile, job: JobLoad, *, budget_tokens: int | None = None) -> Prediction:
    """Of the job alone on the device."""
    return predict(profile, [job], budget_tokens=budget_tokens)


def finish_times(
    profile: Profile,
    jobs: Sequence[JobLoad],
    tokens: Sequence[float],
    *,
    budget_tokens: int | None = None,
) -> list[float]:
    """Seconds until each job has passed so many tokens, if all start together and none joins: those
    that are through leave their room to the others."""
    finished = [0.0] * len(jobs)
    left = {place: float(many) for place, many in enumerate(tokens)}
    now = 0.0
    while left:
        running = list(left)
        rates = predict(
            profile, [jobs[place] for place in running], budget_tokens=budget_tokens
        ).jobs
        waits = [
            left[place] / rate.tokens_per_s for place, rate in zip(running, rates, strict=True)
        ]
        first = min(waits)
        now += first
        for place, rate, wait in zip(running, rates, waits, strict=True):
            left[place] -= first * rate.tokens_per_s
            # Those that end with it, but for rounding, end with it.
            if wait <= first * (1 + 1e-9):
                finished[place] = now
                del left[place]
    return finished


def adapter_parameters(profile: Profile, job: JobLoad) -> float:
    return profile.parameters_per_rank * job.rank * job.coverage


def shares_of(jobs: Sequence[JobLoad], budget: float) -> list[float]:
    """Tokens of each job in a nano-batch: by weight, at most its batch; what one cannot use goes
    to the others."""
    shares = [0.0] * len(jobs)
    # Those whose batch is small for their weight run out first.
    order = sorted(range(len(jobs)), key=lambda i: jobs[i].batch_tokens / jobs[i].weight)
    weights = sum(job.weight for job in jobs)
    left = float(budget)
    for i in order:
        shares[i] = min(jobs[i].batch_tokens, left * jobs[i].weight / weights)
        left -= shares[i]
        weights -= jobs[i].weight
    return shares


def rows_of(profile: Profile, tokens: float, budget: int) -> float:
    """With the padding up to a bucket. Buckets follow the budget; beyond it rows are a multiple
    of it, for a sequence that goes alone."""
    # The shares' sum is off by rounding.
    tokens *= 1 - 1e-9
    if tokens > budget:
        return -(-tokens // budget) * budget
    return next((size for size in profile.sizes(budget) if size >= tokens), float(budget))


def knee_tokens(profile: Profile) -> int | None:
    """The fewest tokens of a nano-batch that reach 95 % of the rate that very large ones would, for
    one job of rank 16; None if a million do not. Steps and padding are left out."""
    length = knee_length(profile)

    def rate(tokens: int) -> float:
        batch = NanoBatch(tokens, tokens * min(tokens, length), (Segment(tokens, KNEE_RANK),))
        return tokens / profile.time.seconds(batch)

    saturated = rate(KNEE_LIMIT)
    low, high = 1, KNEE_LIMIT
    while low < high:
        middle = (low + high) // 2
        if rate(middle) >= KNEE_SHARE * saturated:
            high = middle
        else:
            low = middle + 1
    return low if low < KNEE_LIMIT else None


def knee_length(profile: Profile) -> int:
    """512, or the longest sequences that were measured."""
    return min(
        KNEE_LENGTH, round(max(each.batch.squares / each.batch.tokens for each in profile.points))
    )
