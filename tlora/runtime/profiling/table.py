"""A profile for people: its parameters with their units, how well they fit, and where the knee is.
Fits in 80 columns."""

from collections.abc import Sequence

from tlora.costs.model import NanoBatch
from tlora.costs.predict import KNEE_LENGTH, KNEE_RANK, KNEE_SHARE, knee_tokens
from tlora.costs.profile import Profile
from tlora.runtime.benchmark.table import Table, wrapped

SHOWN_POINTS = 8


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
            ("fixed", f"{time.fixed_s * 1e3:.3f}", "ms"),
            ("per job in it", f"{time.segment_s * 1e3:.3f}", "ms"),
            ("flat: launches, weights", f"{time.flat_s * 1e3:.3f}", "ms"),
            ("backbone, per row", f"{time.row_s * 1e6:.4f}", "us"),
            ("attention, per squared token", f"{time.square_s * 1e12:.3f}", "ps"),
            ("LoRA, per token", f"{time.lora_s * 1e6:.4f}", "us"),
            ("LoRA, per token and rank", f"{time.rank_s * 1e9:.4f}", "ns"),
            ("sharpness of the maximum", f"{time.sharpness:g}", ""),
            ("optimiser, per round", f"{steps.pass_s * 1e3:.3f}", "ms"),
            ("optimiser, per job", f"{steps.job_s * 1e3:.3f}", "ms"),
            ("optimiser, per parameter", f"{steps.parameter_s * 1e12:.3f}", "ps"),
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


def _mean_rank(batch: NanoBatch) -> float:
    return sum(segment.tokens * segment.rank for segment in batch.segments) / batch.tokens


def _knee(profile: Profile) -> str:
    largest = max(point.batch.rows for point in profile.points)
    knee = knee_tokens(profile)
    what = f"{KNEE_SHARE:.0%} of the saturated rate (rank {KNEE_RANK}, sequences of {KNEE_LENGTH})"
    if knee is None or knee > largest:
        return f"The knee, {what}, lies beyond the {largest:,.0f} tokens that were measured."
    return f"The knee, {what}, is at {knee:,} tokens."


def _memory(profile: Profile) -> str:
    memory = profile.memory
    counted = (
        f"Memory: {memory.weights_bytes / 2**30:,.2f} GiB of weights, "
        f"{memory.adapters_bytes(profile.parameters_per_rank) / 2**20:,.2f} MiB per unit of rank"
    )
    if memory.row_bytes is None or memory.fixed_bytes is None or memory.reserve_bytes is None:
        return f"{counted}."
    return (
        f"{counted}, {memory.row_bytes / 2**20:,.3f} MiB per row of a nano-batch, "
        f"{memory.fixed_bytes / 2**30:,.2f} GiB besides, {memory.reserve_bytes / 2**30:,.2f} GiB "
        "in reserve."
    )


def _skipped(profile: Profile) -> list[str]:
    reasons = [each.reason for each in profile.skipped]
    return [
        f"Left out: {reasons.count(reason)} nano-batches of "
        f"{min(each.rows for each in profile.skipped if each.reason == reason):,} rows or more, "
        f"{reason}."
        for reason in dict.fromkeys(reasons)
    ]
