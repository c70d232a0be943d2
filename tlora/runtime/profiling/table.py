"""A profile for people: its parameters with their units, how well they fit, and where the knee is.
Fits in 80 columns."""

from collections.abc import Sequence

from tlora.costs.model import NanoBatch
from tlora.costs.predict import KNEE_RANK, KNEE_SHARE, knee_length, knee_tokens
from tlora.costs.profile import Profile
from tlora.runtime.benchmark.table import Table, wrapped

SHOWN_POINTS = 8
UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9), ("ps", 1e-12))


def title(profile: Profile) -> list[str]:
    kept = sum(point.heldout for point in profile.points)
    return wrapped(
        f"{profile.shape} in {profile.dtype} on {profile.device}: {len(profile.points)} "
        f"nano-batches measured, {kept} of them kept from the fit"
    )


def parameters(profile: Profile) -> Table:
    time, steps = profile.time, profile.steps
    return Table(
        ("time of a nano-batch", "", "unit"),
        [
            ("fixed", *duration(time.fixed_s)),
            ("per job in it", *duration(time.segment_s)),
            ("flat: launches, weights", *duration(time.flat_s)),
            ("backbone, per row", *duration(time.row_s)),
            ("attention, per squared token", *duration(time.square_s)),
            ("LoRA, per token", *duration(time.lora_s)),
            ("LoRA, per token and rank", *duration(time.rank_s)),
            ("sharpness of the maximum", f"{time.sharpness:g}", ""),
            ("optimiser, per round", *duration(steps.pass_s)),
            ("optimiser, per job", *duration(steps.job_s)),
            ("optimiser, per parameter", *duration(steps.parameter_s)),
        ],
    )


def heldout(profile: Profile) -> Table:
    """The points that the fit never saw, those that it predicts worst first."""

    def error(batch: NanoBatch, seconds: float) -> float:
        return (profile.time.seconds(batch) / seconds - 1) * 100

    kept = [point for point in profile.points if point.heldout]
    kept.sort(key=lambda point: -abs(error(point.batch, point.seconds)))
    rows = [
        (
            f"{point.batch.rows:,.0f}",
            f"{point.batch.squares / point.batch.tokens:,.0f}",
            f"{len(point.batch.segments)}",
            f"{_mean_rank(point.batch):.0f}",
            f"{point.seconds * 1e3:,.2f}",
            f"{profile.time.seconds(point.batch) * 1e3:,.2f}",
            f"{error(point.batch, point.seconds):+.1f} %",
        )
        for point in kept[:SHOWN_POINTS]
    ]
    return Table(("held out: rows", "length", "jobs", "rank", "ms", "predicted", "error"), rows)


def sentences(profile: Profile) -> list[str]:
    fitted = profile.error_pct(heldout=False)
    noise = profile.noise_pct
    found = [
        f"Held-out error: {profile.heldout_error_pct:.1f} % on average"
        + (f", {fitted:.1f} % on the fitted points" if fitted is not None else "")
        + ("." if noise is None else f"; repeats of one point spread by {noise:.1f} %."),
        *_group(profile),
        _knee(profile),
        f"Attaching a job takes {profile.attach_s * 1e3:,.1f} ms, detaching "
        f"{profile.detach_s * 1e3:,.1f} ms, the first nano-batch {profile.warmup_s:,.2f} s.",
        _memory(profile),
        *_skipped(profile),
        *(f"Note: {note}." for note in profile.notes),
    ]
    return [line for text in found for line in wrapped(text)]


def text(profile: Profile) -> list[str]:
    """All of it, without colour."""
    parts: Sequence[list[str]] = (
        title(profile),
        parameters(profile).lines(),
        heldout(profile).lines(),
        sentences(profile),
    )
    return [line for part in parts for line in [*part, ""]]


def duration(seconds: float) -> tuple[str, str]:
    """In the unit that leaves one to three digits before the point."""
    if not seconds:
        return "0", ""
    unit, size = next(((unit, size) for unit, size in UNITS if seconds >= size), ("fs", 1e-15))
    return f"{seconds / size:.2f}", unit


def _group(profile: Profile) -> list[str]:
    check = profile.group_check
    if check is None:
        return []
    return [
        f"A group of {check.jobs} jobs, {check.tokens:,} tokens in all, was predicted to take "
        f"{check.predicted_s:.2f} s and took {check.measured_s:.2f} s: {check.error_pct:+.1f} %."
    ]


def _mean_rank(batch: NanoBatch) -> float:
    return sum(segment.tokens * segment.rank for segment in batch.segments) / batch.tokens


def _knee(profile: Profile) -> str:
    largest = max(point.batch.rows for point in profile.points)
    knee = knee_tokens(profile)
    length = knee_length(profile)
    what = f"{KNEE_SHARE:.0%} of the saturated rate (rank {KNEE_RANK}, sequences of {length})"
    if knee is None or knee > largest:
        return f"The knee, {what}, lies beyond the {largest:,.0f} tokens that were measured."
    return f"The knee, {what}, is at {knee:,} tokens."


def _memory(profile: Profile) -> str:
    memory = profile.memory
    counted = (
        f"Memory: {_size(memory.weights_bytes)} of weights, "
        f"{memory.adapters_bytes(profile.parameters_per_rank) / 2**20:,.2f} MiB per unit of rank"
    )
    if memory.row_bytes is None or memory.fixed_bytes is None or memory.reserve_bytes is None:
        return f"{counted}."
    return (
        f"{counted}, {memory.row_bytes / 2**20:,.3f} MiB per row of a nano-batch, "
        f"{memory.fixed_bytes / 2**30:,.2f} GiB besides, {memory.reserve_bytes / 2**30:,.2f} GiB "
        "in reserve."
    )


def _size(num_bytes: float) -> str:
    """Small models are told in MiB."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:,.1f} MiB"
    return f"{num_bytes / 2**30:,.2f} GiB"


def _skipped(profile: Profile) -> list[str]:
    reasons = [each.reason for each in profile.skipped]
    return [
        f"Left out: {reasons.count(reason)} nano-batches of "
        f"{min(each.rows for each in profile.skipped if each.reason == reason):,} rows or more, "
        f"{reason}."
        for reason in dict.fromkeys(reasons)
    ]
