"""What is said of the jobs' data before training: everything for a few jobs, one line per dataset
for many."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tlora.core.job import JobSpec
from tlora.data.prepare import PreparedData

FEW_JOBS = 4
"""So many are described in full."""

MOST_LINES = 12
NAMED_JOBS = 3
NAME_WIDTH = 20


def full_lines(data: Mapping[str, PreparedData]) -> list[str]:
    """Every job's data, in a few lines each."""
    return [f"{name}: {line}" for name, each in data.items() for line in each.report.lines()]


def start_lines(
    jobs: Sequence[JobSpec], data: Mapping[str, PreparedData], whole: Path
) -> list[str]:
    """What a person should see before training; `whole` is where the rest can be read."""
    if len(jobs) <= FEW_JOBS:
        return [*full_lines(data), *idle_settings(jobs)]
    datasets: dict[tuple[tuple[str, ...], str], list[JobSpec]] = {}
    for job in jobs:
        datasets.setdefault((job.data.paths, data[job.name].key), []).append(job)
    shown = list(datasets.values())[: MOST_LINES if len(datasets) > MOST_LINES + 1 else None]
    cells = [
        (who(sharing), file_name(sharing[0].data.paths), facts([data[job.name] for job in sharing]))
        for sharing in shown
    ]
    widths = [max(len(cell[column]) for cell in cells) for column in (0, 1)]
    count = f"{len(datasets)} datasets" if len(datasets) > 1 else "one dataset"
    lines = [f"{count} of {len(jobs)} jobs (tokens: median to longest), in full in {whole}"]
    lines += [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in cells]
    if len(shown) < len(datasets):
        lines.append(f"  and {len(datasets) - len(shown)} more datasets")
    return [*lines, *idle_settings(jobs)]


def idle_settings(jobs: Sequence[JobSpec]) -> list[str]:
    """A word on what a file asks for and will not get. No error: defaults that most jobs can use
    are often shared with some that cannot."""
    idle = [job.name for job in jobs if job.eval.steps is not None and not job.holds_out]
    if not idle:
        return []
    names = ", ".join(idle[:NAMED_JOBS])
    names += f" and {len(idle) - NAMED_JOBS} more" if len(idle) > NAMED_JOBS else ""
    return [
        f"{names}: no rows are held out, so eval.steps does nothing; set eval.split or "
        "data.eval_path"
    ]


def who(sharing: Sequence[JobSpec]) -> str:
    return shortened(sharing[0].name) if len(sharing) == 1 else f"{len(sharing)} jobs"


def file_name(paths: tuple[str, ...]) -> str:
    first, *others = paths
    more = f" +{len(others)}" if others else ""
    return shortened(Path(first).name, NAME_WIDTH - len(more)) + more


def shortened(text: str, most: int = NAME_WIDTH) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def facts(data: Sequence[PreparedData]) -> str:
    """Of one dataset, as the jobs that share it see it."""
    reports = [each.report for each in data]
    tokens = sum(report.train_tokens for report in reports)
    trained = sum(report.train_targets for report in reports)
    first = reports[0]
    parts = [
        f"{first.rows_read:,} {'pairs' if first.pairs else 'rows'}",
        f"{first.lengths.median:,}-{first.lengths.longest:,} tokens",
        f"{trained / tokens:.0%} trained",
        f"{span([report.eval_rows for report in reports])} held out",
    ]
    if any(report.rows_truncated for report in reports):
        parts.append(f"{span([report.rows_truncated for report in reports])} cut")
    if any(report.rows_dropped for report in reports):
        parts.append(f"{span([report.rows_dropped for report in reports])} left out as too long")
    if any(report.rows_empty for report in reports):
        parts.append(f"{span([report.rows_empty for report in reports])} with an empty answer")
    return ", ".join(parts)


def span(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{high:,}" if low == high else f"{low:,}-{high:,}"
