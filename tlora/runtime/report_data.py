"""A run's curves and bars, thinned to what a screen can show: values in, values out.

Points that are averages say of how many. The sums stay right: a bar of ten nano-batches is their
mean, and the throughput of a while is what was done in it over how long it took.
"""

import math
from collections.abc import Iterable, Sequence

from tlora.runtime.placement import stays as stays_of
from tlora.runtime.run_log import NanoBatch, Record, RunLog
from tlora.training.size_search import Measure

POINTS = 40_000
"""Of all training curves together; each has between 100 and 2,000."""

BARS = 240
CLOSE_UP = 120
"""Nano-batches shown one by one at the beginning and at the end of a long run."""

SPANS = 200
"""Points of the throughput curve."""

MARKS = 300
"""Decisions on the size of nano-batches that are shown, the latest ones."""


def report_data(log: RunLog) -> dict[str, object]:
    """What the report's script draws."""
    limit = max(100, min(2000, POINTS // max(1, len(log.jobs))))
    return {
        "jobs": [
            {
                "name": job.name,
                "train": curve(job.train, log, limit),
                "eval": curve(job.evaluations, log, limit),
            }
            for job in log.jobs
        ],
        "throughput": throughput(log),
        "composition": composition(log),
        "tuning": tuning(log),
        "placement": placement(log),
        "resumed": [round(seconds, 2) for seconds in log.sessions.running[1:]],
    }


def curve(records: Sequence[Record], log: RunLog, limit: int) -> dict[str, object]:
    """One list per axis; `each` is how many logged steps a point stands for."""
    each = max(1, math.ceil(len(records) / limit))
    chunks = [records[at : at + each] for at in range(0, len(records), each)]
    return {
        "each": each,
        "step": [chunk[-1]["step"] for chunk in chunks],
        "loss": [significant(mean(record["loss"] for record in chunk)) for chunk in chunks],
        "tokens": [chunk[-1]["tokens_seen"] for chunk in chunks],
        "time": [round(log.sessions.running_time(chunk[-1]["time"]), 2) for chunk in chunks],
    }


def throughput(log: RunLog) -> dict[str, object]:
    """Tokens and rows per second, turn by turn or several together; a stop in between is no
    time."""
    found = turns(log.nano_batches)
    each = max(1, len(found) // 40 if len(found) <= 40 * 8 else math.ceil(len(found) / SPANS))
    spans = [
        [batch for turn in found[at : at + each] for batch in turn]
        for at in range(0, len(found), each)
    ]
    if len(spans) > 1 and len(found) % each:
        # What is left over is too short a while to tell a rate from.
        spans[-2:] = [[*spans[-2], *spans[-1]]]
    began = [0.0, *(span[-1].ended for span in spans)][: len(spans)]
    seconds = [max(1e-6, span[-1].ended - start) for span, start in zip(spans, began, strict=True)]
    return {
        "each": each,
        "of": "nano-batch" if len(found) == len(log.nano_batches) else "turn",
        "time": [round(span[-1].ended, 2) for span in spans],
        "useful": [
            rate(map(useful, span), took) for span, took in zip(spans, seconds, strict=True)
        ],
        "rows": [
            rate((batch.rows for batch in span), took)
            for span, took in zip(spans, seconds, strict=True)
        ],
        "jobs": jobs_running(log, [span[-1].ended for span in spans]),
    }


def turns(batches: Sequence[NanoBatch]) -> list[list[NanoBatch]]:
    """On one device a nano-batch is a turn. On several, those that ran at the same time, one of
    each: ranks end together, and the moment between two of them is no while to tell a rate from."""
    found: list[list[NanoBatch]] = []
    for batch in batches:
        turn = found[-1] if found else []
        is_beside = turn and batch.ended - batch.seconds < turn[-1].ended
        if is_beside and all(batch.device != each.device for each in turn):
            turn.append(batch)
        else:
            found.append([batch])
    return found


def jobs_running(log: RunLog, times: Sequence[float]) -> list[int]:
    """How many jobs were there at each of these times."""
    here: set[str] = set()
    counts: list[int] = []
    moves = iter(log.attendance)
    move = next(moves, None)
    for time in times:
        while move is not None and move.at < time:
            (here.add if move.came else here.discard)(move.job)
            move = next(moves, None)
        counts.append(len(here))
    return counts


def composition(log: RunLog) -> dict[str, dict[str, object]]:
    """Who shared the nano-batches: the whole run in bars, and of a long one both ends as they
    were."""
    batches = log.nano_batches
    index = {job.name: at for at, job in enumerate(log.jobs)}
    each = max(1, math.ceil(len(batches) / BARS))
    views = {"whole run": bars(batches, 0, each, index)}
    if each > 1:
        views[f"first {CLOSE_UP}"] = bars(batches[:CLOSE_UP], 0, 1, index)
        begin = len(batches) - CLOSE_UP
        views[f"last {CLOSE_UP}"] = bars(batches[begin:], begin, 1, index)
    return views


def bars(
    batches: Sequence[NanoBatch], begin: int, each: int, index: dict[str, int]
) -> dict[str, object]:
    """Means over `each` nano-batches. `tokens` lists job, tokens, job, tokens and so on."""
    chunks = [batches[at : at + each] for at in range(0, len(batches), each)]
    tokens: list[list[int]] = []
    for chunk in chunks:
        sums: dict[int, int] = {}
        for batch in chunk:
            for job, count in batch.tokens.items():
                if job in index:
                    sums[index[job]] = sums.get(index[job], 0) + count
        tokens.append([n for job in sorted(sums) for n in (job, round(sums[job] / len(chunk)))])
    return {
        "begin": begin,
        "each": each,
        "count": len(batches),
        "rows": [round(mean(batch.rows for batch in chunk)) for chunk in chunks],
        "eval": [round(mean(float(batch.evaluation) for batch in chunk), 2) for chunk in chunks],
        "time": [round(chunk[-1].ended, 2) for chunk in chunks],
        "tokens": tokens,
    }


def placement(log: RunLog) -> list[dict[str, object]] | None:
    """Device by device, who was there when; None for a run on one."""
    index = {job.name: at for at, job in enumerate(log.jobs)}
    lost = [each.at for each in log.lost]
    found = [stay for stay in stays_of(log.attendance, log.seconds, lost) if stay.job in index]
    devices = sorted({stay.device for stay in found})
    if not devices:
        return None
    return [
        {
            "device": device,
            "name": f"{'rank' if log.about.get('plan') else 'device'} {device}",
            "lanes": 1 + max(stay.lane for stay in found if stay.device == device),
            "stays": [
                [index[stay.job], stay.lane, round(stay.began, 2), round(stay.ended, 2)]
                for stay in found
                if stay.device == device
            ],
        }
        for device in devices
    ]


def tuning(log: RunLog) -> dict[str, object] | None:
    """How the size of nano-batches was found: the sizes and rates over time, and the decisions.
    None if it was fixed."""
    if not log.tuned:
        return None
    batches = [batch for batch in log.nano_batches if batch.measure and batch.measure.train]
    spans = stays(batches, math.ceil(len(batches) / SPANS))
    decisions = log.tuned[-MARKS:]
    return {
        "time": [round(span[-1].ended, 2) for span in spans],
        "budget": [measured(span[0]).budget for span in spans],
        "rate": [full_rate(span) for span in spans],
        "left_out": len(log.tuned) - len(decisions),
        "marks": [
            {
                "time": round(each.at, 2),
                "action": each.decision.action.value,
                "measured": each.decision.measured,
                "rate": each.decision.tokens_per_s,
                "budget": each.decision.budget,
                "why": each.decision.why,
            }
            for each in decisions
        ],
    }


def stays(batches: Sequence[NanoBatch], most: int) -> list[list[NanoBatch]]:
    """Nano-batches in a row for one budget, at most so many together."""
    spans: list[list[NanoBatch]] = []
    for batch in batches:
        last = spans[-1] if spans else []
        same = last and measured(last[0]).budget == measured(batch).budget
        if same and len(last) < max(1, most):
            last.append(batch)
        else:
            spans.append([batch])
    return spans


def measured(batch: NanoBatch) -> Measure:
    assert batch.measure is not None
    return batch.measure


def full_rate(span: Sequence[NanoBatch]) -> float | None:
    """Useful tokens/s of those that were filled."""
    found = [measured(batch) for batch in span if measured(batch).full]
    seconds = sum(measure.seconds for measure in found)
    return significant(sum(measure.tokens for measure in found) / seconds) if seconds else None


def useful(batch: NanoBatch) -> int:
    return sum(batch.tokens.values())


def rate(counts: Iterable[int], seconds: float) -> float:
    return significant(sum(counts) / seconds) or 0.0


def mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def significant(value: float) -> float | None:
    """Six digits are more than a screen shows; what is not finite is no JSON number."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
