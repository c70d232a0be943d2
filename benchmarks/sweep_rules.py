"""What rules of early exit save and lose: `python benchmarks/sweep_rules.py DIR... [--json F]`.

Each DIR is a sweep that `tlora tune` ran with `-o early_exit=none`. Its curves are brought through
each rule again (tlora/tuning/rerun.py), which trains nothing: what part of the tokens the rule
would have saved, whether it would have kept the best trial, and how much worse its winner would
have been. docs/sweeps.md has figures.
"""

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlora.core.sweep import EarlyExitSpec, ObjectiveSpec
from tlora.store.study import read_study_log
from tlora.tuning.exits import rule_of
from tlora.tuning.rerun import curves_of, plans_of, rerun
from tlora.tuning.results import tokens_full
from tlora.tuning.study import StudyState

RULES = {
    "alto, as published": EarlyExitSpec(min_warmup_steps=1),
    "alto": EarlyExitSpec(),
    "alto, 3 steps": EarlyExitSpec(min_warmup_steps=3),
    "alto, 4 steps": EarlyExitSpec(min_warmup_steps=4),
    "alto, warm-up 10 %": EarlyExitSpec(warmup=0.1),
    "alto, warm-up 2 %": EarlyExitSpec(warmup=0.02),
    "alto, overfitting past best": EarlyExitSpec(overfitting_past_best=True),
    "alto, warm-up 10 %, past best": EarlyExitSpec(warmup=0.1, overfitting_past_best=True),
    "asha": EarlyExitSpec(method="asha"),
    "median": EarlyExitSpec(method="median"),
    "none": EarlyExitSpec(method="none"),
}


@dataclass(frozen=True)
class Outcome:
    sweep: str
    rule: str
    saved: float
    kept_best: bool
    best: float
    """What the winner is worth."""

    regret: float
    """By how much that is worse than the best of all, as a part of it."""

    place: int
    """Of the winner among all trials run to their ends."""

    exits: dict[str, int]


def outcomes(root: Path) -> list[Outcome]:
    log = read_study_log(root)
    events = [turn.event for turn in log.turns()]
    about = log.about() or {}
    log.close()
    objective = ObjectiveSpec(**about["spec"]["search"]["objective"])
    plans, curves = plans_of(events), curves_of(events)
    full = rerun(StudyState(rule_of(RULES["none"], objective), objective), plans, curves)
    ranked = [trial.name for trial in full.ranked()]
    assert full.best is not None, f"{root} has no best trial"
    target = full.value(full.best)
    found: list[Outcome] = []
    for name, rule in RULES.items():
        state = rerun(StudyState(rule_of(rule, objective), objective), plans, curves)
        best = state.best
        assert best is not None and target is not None
        value = state.value(best)
        assert value is not None
        spent = state.tokens_spent
        exits = Counter(t.verdict.rule for t in state.trials.values() if t.verdict is not None)
        found.append(
            Outcome(
                sweep=root.name,
                rule=name,
                saved=1 - spent / tokens_full(full),
                kept_best=best.name == ranked[0],
                best=value,
                regret=abs(value - target) / abs(target),
                place=ranked.index(best.name) + 1,
                exits=dict(exits),
            )
        )
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="F")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    print(f"{'sweep':<22}{'rule':<32}{'saved':>6}  {'best':>8}  {'regret':>7}  place  given up")
    for directory in options.directories:
        for each in outcomes(directory):
            exits = ", ".join(f"{count} {rule}" for rule, count in each.exits.items())
            print(
                f"{each.sweep:<22}{each.rule:<32}{each.saved:>6.1%}  {each.best:>8.4f}  "
                f"{each.regret:>7.2%}  {each.place:>5}  {exits}"
            )
            rows.append({"kind": "sweep_rules", **vars(each)})
    if options.json:
        options.json.write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
