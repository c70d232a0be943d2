"""A comparison in words and numbers, for a terminal of 80 columns."""

from dataclasses import dataclass
from typing import Any

from tlora.core.wording import number_of
from tlora.simulation.compare import Comparison


@dataclass(frozen=True, slots=True)
class Table:
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def title(comparison: Comparison) -> list[str]:
    setting = comparison.setting
    jobs, gpus = len(setting.trace.jobs), setting.gpus
    load = "all at once" if comparison.load is None else f"load {comparison.load:.2f}"
    seeds = "" if setting.seeds == 1 else f", mean of {setting.seeds} seeds"
    lines = [
        f"{setting.trace.name}: {jobs:,} job{'' if jobs == 1 else 's'} on "
        f"{number_of(gpus, 'GPU')}, {load}, "
        f"predictor error {setting.predictor_error:.0%}{seeds}.",
        f"Profile {setting.profile_name}: {setting.profile.device}.",
    ]
    skipped, left_out = len(setting.trace.skipped), setting.trace.left_out
    if skipped:
        lines.append(f"{skipped:,} bad row{'s were' if skipped > 1 else ' was'} skipped.")
    if left_out:
        lines.append(f"{left_out:,} rows asked for no GPU or never ran, and are left out.")
    return lines


def times(comparison: Comparison) -> Table:
    rows = [
        (
            policy,
            *(duration(found["jct_s"][part]) for part in ("mean", "p50", "p95", "p99")),
            duration(found["queue_s"]["mean"]),
            duration(found["makespan_s"]),
        )
        for policy, found in _means(comparison)
    ]
    header = ("policy", "JCT mean", "p50", "p95", "p99", "queued", "makespan")
    return Table(header, tuple(rows))


def use(comparison: Comparison) -> Table:
    rows = [
        (
            policy,
            rate(found["tokens_per_s"]),
            f"{found['util_busy']:.0%}",
            f"{found['util_effective']:.0%}",
            ratio(found["slowdown"]["p95"]),
            ratio(found["ftf"]["p95"]),
            ratio(found["ftf"]["max"]),
            f"{found['regroups']:,.0f}",
        )
        for policy, found in _means(comparison)
    ]
    header = (
        *("policy", "tokens/s", "busy", "effective", "slow p95", "ftf p95", "ftf max", "moves"),
    )
    return Table(header, tuple(rows))


def sentences(comparison: Comparison) -> list[str]:
    """What a reader would work out by hand, and what went wrong."""
    found = dict(_means(comparison))
    lines: list[str] = []
    ours = found.get("tlora")
    for policy, other in found.items():
        if ours is None or policy == "tlora":
            continue
        # One that refused all jobs, or was refused them, has no times.
        if ours["jct_s"]["mean"] is None or other["jct_s"]["mean"] is None:
            continue
        lines.append(
            f"tlora against {policy}: mean JCT {_shorter(ours, other, 'mean')}, "
            f"p99 {_shorter(ours, other, 'p99')}, "
            f"tokens per GPU in use {_times(ours, other, 'tokens_per_gpu_s')}."
        )
    slowest = max(found, key=lambda policy: found[policy]["decision_ms"]["p99"] or 0.0)
    decided = found[slowest]["decision_ms"]["p99"]
    lines.append(f"Decisions took {decided:.1f} ms at p99 at most ({slowest}).")
    for policy, each in found.items():
        if each["jobs_failed"]:
            lines.append(f"{policy}: {_failed_words(each['jobs_failed'], comparison, policy)}.")
    return lines


def _failed_words(count: float, comparison: Comparison, policy: str) -> str:
    """With the first of them, if the first seed had one."""
    words = f"{number_of(count, 'job')} {'was' if count == 1 else 'were'} refused or failed"
    for job in comparison.first[policy].recorder.jobs.values():
        if job.reason is not None:
            return f"{words}; {job.request.name}: {job.reason}"
    return words


def duration(seconds: float | None) -> str:
    """42 s, 3.1 min, 5.0 h, 2.5 d."""
    if seconds is None:
        return "-"
    for length, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"


def rate(value: float) -> str:
    if value < 9_999.5:
        return f"{value:,.0f}"
    return f"{value / 1e3:,.0f}k" if value < 999_500 else f"{value / 1e6:.2f}M"


def ratio(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 99.5 else f"{value:,.0f}"


def _means(comparison: Comparison) -> list[tuple[str, dict[str, Any]]]:
    return [(policy, comparison.mean(policy)) for policy in comparison.setting.policies]


def _shorter(ours: dict[str, Any], other: dict[str, Any], which: str) -> str:
    if ours["jct_s"][which] <= other["jct_s"][which]:
        return f"{_times(other, ours, 'jct_s', which)} shorter"
    return f"{_times(ours, other, 'jct_s', which)} longer"


def _times(upper: dict[str, Any], lower: dict[str, Any], *names: str) -> str:
    above: Any = upper
    below: Any = lower
    for name in names:
        above, below = above[name], below[name]
    return "-" if not above or not below else f"{above / below:.2f}x"
