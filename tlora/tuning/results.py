"""What came of a sweep, for programs and for `study.json`."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tlora.core.sweep import Params
from tlora.tuning.study import Phase, StudyState, Trial


@dataclass(frozen=True, slots=True)
class TrialResult:
    name: str
    params: Params
    status: str
    """completed, exited or failed; while a sweep runs also waiting, running, held or ready."""

    reason: str | None
    rule: str | None
    """Which one gave it up, if one did."""

    numbers: dict[str, float | None]
    """What the rule looked at."""

    step: int
    total_steps: int
    value: float | None
    tokens_seen: int


@dataclass(frozen=True, slots=True)
class Winner:
    """The best trial's adapter, and how to train it alone."""

    adapter: str
    job_file: str
    command: str


@dataclass(frozen=True, slots=True)
class Fusion:
    """The same trials together and one at a time, measured on this machine."""

    together_rate: float
    """Tokens per second."""

    alone_rate: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    output: Path
    trials: list[TrialResult]
    """In the order they were made."""

    best: TrialResult | None
    metric: str
    mode: str
    method: str
    tokens_spent: int
    tokens_full: int
    """What all trials would have taken to their ends."""

    tokens_given_up: int = 0
    """Of these, what trials that a rule gave up did not take."""

    wall_s: float
    """Of running, stops left out."""

    winner: Winner | None = None
    fusion: Fusion | None = None
    interrupted: bool = False
    over: bool = True

    @property
    def saved_fraction(self) -> float:
        """Of the tokens, by whatever ended trials before their ends."""
        return 1 - self.tokens_spent / self.tokens_full if self.tokens_full else 0.0

    @property
    def saved_by_exit(self) -> float:
        """Of the tokens, by the rules alone: not by failures, a spent budget or a person."""
        return self.tokens_given_up / self.tokens_full if self.tokens_full else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "v": 1,
            "kind": "study",
            "over": self.over,
            "best": best_as_json(self.best),
            "trials": [asdict(trial) for trial in self.trials],
            "objective": {"metric": self.metric, "mode": self.mode},
            "early_exit": self.method,
            "tokens_spent": self.tokens_spent,
            "tokens_full": self.tokens_full,
            "saved_fraction": round(self.saved_fraction, 6),
            "saved_by_exit": round(self.saved_by_exit, 6),
            "wall_s": round(self.wall_s, 3),
            "winner": asdict(self.winner) if self.winner else None,
            "fusion": asdict(self.fusion) if self.fusion else None,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskStudies:
    """Of a sweep with several tasks, or over several devices."""

    output: Path
    studies: dict[str, Study]
    """By task, in the order of the file."""

    wall_s: float
    devices: int
    predicted_s: float | None = None
    """What the plan at the start said."""

    one_after_another_s: float | None = None
    """What it said of the same tasks in turn, each with all devices."""

    @property
    def interrupted(self) -> bool:
        return any(study.interrupted for study in self.studies.values())

    @property
    def only(self) -> Study:
        """Of the one task, where there is one."""
        (study,) = self.studies.values()
        return study

    def as_json(self) -> dict[str, Any]:
        """As that of a study, with all trials; what is the best in is not compared over tasks."""
        if len(self.studies) == 1:
            return self.only.as_json()
        each = {name: study.as_json() for name, study in self.studies.items()}
        spent = sum(study.tokens_spent for study in self.studies.values())
        full = sum(study.tokens_full for study in self.studies.values())
        given_up = sum(study.tokens_given_up for study in self.studies.values())
        first = next(iter(each.values()))
        return {
            "v": 1,
            "kind": "study",
            "over": all(study.over for study in self.studies.values()),
            "best": None,
            "tasks": [
                {"name": name, **{key: value for key, value in one.items() if key not in SHARED}}
                for name, one in each.items()
            ],
            "trials": [
                {**trial, "task": name} for name, one in each.items() for trial in one["trials"]
            ],
            "objective": first["objective"],
            "early_exit": first["early_exit"],
            "tokens_spent": spent,
            "tokens_full": full,
            "saved_fraction": round(1 - spent / full, 6) if full else 0.0,
            "saved_by_exit": round(given_up / full, 6) if full else 0.0,
            "wall_s": round(self.wall_s, 3),
            "devices": self.devices,
            "predicted_s": self.predicted_s,
            "one_after_another_s": self.one_after_another_s,
            "winner": None,
            "fusion": None,
        }


SHARED = ("v", "kind", "trials", "objective", "early_exit")
"""What a task need not repeat."""


def best_as_json(best: TrialResult | None) -> dict[str, Any] | None:
    if best is None:
        return None
    return {"name": best.name, "params": best.params, "value": best.value}


def trial_result(state: StudyState, trial: Trial) -> TrialResult:
    verdict = trial.verdict
    numbers = verdict.numbers if verdict else {}
    return TrialResult(
        name=trial.name,
        params=trial.plan.params,
        status=trial.phase.value,
        reason=trial.reason,
        rule=verdict.rule if verdict else None,
        numbers={name: value if math.isfinite(value) else None for name, value in numbers.items()},
        step=trial.step,
        total_steps=trial.plan.total_steps,
        value=state.value(trial),
        tokens_seen=trial.tokens,
    )


def tokens_full(state: StudyState) -> int:
    """What a trial that ran to its end took is known; of the others it is what they would."""
    return sum(
        trial.tokens if trial.phase is Phase.COMPLETED else trial.plan.total_tokens
        for trial in state.trials.values()
    )


def tokens_given_up(state: StudyState) -> int:
    """What trials that a rule gave up would have taken to their ends."""
    return sum(
        trial.plan.total_tokens - trial.tokens
        for trial in state.trials.values()
        if trial.verdict is not None and trial.verdict.rule not in ("budget", "person")
    )
