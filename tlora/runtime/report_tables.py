"""The report's tables: every job's results, and its settings, told apart into those that differ
between jobs and those they share."""

import json
from dataclasses import dataclass

from tlora.config import load_plan
from tlora.core.errors import SpecError
from tlora.runtime.run_log import JobLog, Record, RunLog
from tlora.runtime.settings import default_settings
from tlora.training.preference import FIGURES

SYMBOLS = {
    "completed": "✓",
    "stopped early": "✓",
    "cancelled": "□",
    "failed": "✗",
    "paused": "‖",
    "unfinished": "…",
}


MEANINGS = {
    "control": "what all ranks run next, agreed before each nano-batch; waiting for the slowest",
    "backbone": "frozen weights, gathered from the ranks that hold a part each; beside computing",
    "gradient": "sums of jobs that span ranks, one at each of their steps",
    "figures": "losses of evaluations that span ranks; who begins where",
    "moving": "jobs that change ranks",
}
"""Of kinds of communication."""


@dataclass(frozen=True, slots=True)
class JobRow:
    name: str
    status: str
    """A key of SYMBOLS."""

    symbol: str
    reason: str | None
    steps: int
    total_steps: int | None
    loss: float | None
    first_eval_loss: float | None
    eval_loss: float | None
    best_eval_loss: float | None
    best_step: int | None
    tokens_seen: int
    adapter: str | None
    serving: list[str]


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """Of a job on pairs, the last it logged: held out where it has pairs held out."""

    name: str
    held_out: bool
    step: int
    accuracy: float
    margin: float
    chosen_reward: float
    rejected_reward: float


@dataclass(frozen=True, slots=True)
class RankRow:
    """A rank of a run under a plan: how much it had to do, and what it was told by others."""

    rank: int
    copy: int
    shard: int
    turns: int
    empty: int
    utilisation: float
    communication: float | None
    """Of its time, in collectives and waiting for others in them; None where it was not taken."""


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """What one kind of communication has cost, all ranks together."""

    kind: str
    meaning: str
    calls: int
    """Of one rank, the one that has most."""

    num_bytes: int
    """That reached all ranks."""

    seconds: float | None
    """Of one rank, on average; None where nobody took the time."""

    share: float | None
    """Of the ranks' time."""


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    differs: bool
    """From the default."""

    key: float | str
    """To sort by."""


@dataclass(frozen=True, slots=True)
class SettingColumn:
    name: str
    default: str
    cells: list[Cell]


@dataclass(frozen=True, slots=True)
class SharedSetting:
    name: str
    text: str
    differs: bool
    default: str


def job_rows(log: RunLog) -> list[JobRow]:
    return [job_row(job) for job in log.jobs]


def job_row(job: JobLog) -> JobRow:
    """From its result, or, of a job that has none yet, from the last it logged."""
    result = job.result or {}
    last = job.train[-1] if job.train else {}
    evaluations = [record["loss"] for record in job.evaluations]
    first = job.evaluations[0] if job.evaluations else {}
    numbers = [each for each in job.evaluations if each["loss"] is not None]
    best = min(numbers, key=lambda record: record["loss"], default={})
    status = str(result.get("status", "unfinished")).replace("_", " ")
    return JobRow(
        name=job.name,
        status=status,
        symbol=SYMBOLS.get(status, "?"),
        reason=result.get("reason"),
        steps=result.get("steps", last.get("step", 0)),
        total_steps=result.get("total_steps", last.get("total_steps", first.get("total_steps"))),
        loss=result.get("loss", last.get("loss")),
        first_eval_loss=result.get("first_eval_loss", first.get("loss")),
        eval_loss=result.get("eval_loss", evaluations[-1] if evaluations else None),
        best_eval_loss=result.get("best_eval_loss", best.get("loss")),
        best_step=result.get("best_step", best.get("step")),
        tokens_seen=result.get("tokens_seen", last.get("tokens_seen", 0)),
        adapter=result.get("adapter"),
        serving=result.get("serving", []),
    )


def preference_rows(log: RunLog) -> list[PreferenceRow]:
    rows: list[PreferenceRow] = []
    for job in log.jobs:
        last = (job.evaluations or job.train or [{}])[-1]
        if all(name in last for name in FIGURES):
            figures = {name: float(last[name]) for name in FIGURES}
            rows.append(PreferenceRow(job.name, bool(job.evaluations), last["step"], **figures))
    return rows


def setting_names(log: RunLog) -> list[str]:
    """In the order of the file; the name is the row's own."""
    names = dict.fromkeys(name for job in log.jobs for name in job.settings)
    return [name for name in names if name != "name"]


def setting_columns(log: RunLog) -> list[SettingColumn]:
    """Settings that are not the same for all jobs."""
    defaults = default_settings()
    columns: list[SettingColumn] = []
    for name in setting_names(log):
        values = [job.settings.get(name) for job in log.jobs]
        if all(value == values[0] for value in values):
            continue
        default = defaults.get(name)
        known = name in defaults
        cells = [Cell(shown(value), known and value != default, key(value)) for value in values]
        columns.append(SettingColumn(name, shown(default) if known else "", cells))
    return columns


def shared_settings(log: RunLog) -> list[SharedSetting]:
    """Settings that all jobs have alike, those off their defaults first."""
    defaults = default_settings()
    found: list[SharedSetting] = []
    for name in setting_names(log):
        values = [job.settings.get(name) for job in log.jobs]
        if any(value != values[0] for value in values):
            continue
        known = name in defaults
        differs = not known or values[0] != defaults[name]
        default = shown(defaults[name]) if known else ""
        found.append(SharedSetting(name, shown(values[0]), differs, default))
    return sorted(found, key=lambda setting: not setting.differs)


def shown(value: object) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
        case list():
            return ", ".join(map(shown, value))
        case dict():
            return ", ".join(f"{name}: {shown(each)}" for name, each in value.items()) or "none"
        case _:
            return str(value)


def key(value: object) -> float | str:
    return float(value) if isinstance(value, int | float) else shown(value)


def plan_text(log: RunLog) -> str | None:
    """Of a run over several ranks: the plan that it ended under."""
    try:
        return str(load_plan(log.about["plan"]))
    except (KeyError, TypeError, SpecError):
        return None


def read_ranks(log: RunLog) -> list[Record]:
    """Of the last group of ranks, if there was one and it came to its end."""
    try:
        return json.loads((log.root / "group.json").read_text())["ranks"]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def rank_rows(log: RunLog) -> list[RankRow]:
    try:
        return [
            RankRow(
                rank=each["rank"],
                copy=each["replica"],
                shard=each["shard"],
                turns=each["turns"],
                empty=each["empty"],
                utilisation=each["utilisation"],
                communication=communication_share(each),
            )
            for each in read_ranks(log)
        ]
    except (KeyError, TypeError):
        return []


def communication_share(rank: Record) -> float | None:
    """Of its time, as far as it was taken."""
    spent = sum(tally.get("seconds", 0.0) for tally in rank["collectives"].values())
    return spent / rank["seconds"] if spent and rank.get("seconds") else None


def traffic_rows(log: RunLog) -> list[TrafficRow]:
    """By kind, the one with the most bytes first."""
    ranks = read_ranks(log)
    try:
        kinds = dict.fromkeys(kind for each in ranks for kind in each["collectives"])
        total = sum(each.get("seconds", 0.0) for each in ranks)
        rows: list[TrafficRow] = []
        for kind in kinds:
            tallies = [each["collectives"].get(kind, {}) for each in ranks]
            spent = sum(tally.get("seconds", 0.0) for tally in tallies)
            rows.append(
                TrafficRow(
                    kind=kind,
                    meaning=MEANINGS.get(kind, ""),
                    calls=max(tally.get("calls", 0) for tally in tallies),
                    num_bytes=sum(tally.get("num_bytes", 0) for tally in tallies),
                    seconds=spent / len(ranks) if spent else None,
                    share=spent / total if spent and total else None,
                )
            )
    except (KeyError, TypeError):
        return []
    return sorted(rows, key=lambda row: -row.num_bytes)
