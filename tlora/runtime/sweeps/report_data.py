"""What the report of a sweep draws, from its log and its study: values in, values out."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from tlora.store.study import StudyTurn
from tlora.tuning.events import Completed, Evaluated, Failed

Json = dict[str, Any]
"""`study.json`, or a part of it."""

FATES = {
    "winner": "the best of all",
    "completed": "ran to its end",
    "underperforming": "not among the best after the warm-up",
    "diverging": "training and held-out loss rose",
    "overfitting": "held-out loss left the training loss behind",
    "asha": "not among the best at a rung",
    "median": "worse than the median of the others",
    "budget": "the sweep's budget was spent",
    "person": "stopped by hand",
    "failed": "failed",
    "live": "not over",
}
"""What can become of a trial, in the order of the legend."""

POINTS = 300
"""Of a curve; longer ones are thinned."""


def fate(trial: Json, best: str | None) -> str:
    if trial["name"] == best:
        return "winner"
    if trial["status"] in ("completed", "failed"):
        return str(trial["status"])
    if trial["status"] == "exited":
        return str(trial["rule"] or "budget")
    return "live"


def report_data(study: Json, turns: Sequence[StudyTurn]) -> Json:
    best = study["best"]["name"] if study["best"] else None
    curves = curves_of(turns)
    fates = [fate(trial, best) for trial in study["trials"]]
    return {
        "metric": study["objective"]["metric"],
        "mode": study["objective"]["mode"],
        "fates": [
            {"name": name, "words": words, "count": fates.count(name)}
            for name, words in FATES.items()
            if name in fates
        ],
        "trials": [
            {
                "name": trial["name"],
                "fate": found,
                "value": finite(trial["value"]),
                "params": trial["params"],
                "total_steps": trial["total_steps"],
                **thinned(curves.get(trial["name"], [])),
            }
            for trial, found in zip(study["trials"], fates, strict=True)
        ],
        "axes": axes_of(study["trials"]),
        "course": course(study, turns),
        "saving": saving(study),
    }


def curves_of(turns: Sequence[StudyTurn]) -> dict[str, list[Evaluated]]:
    """Every trial's evaluations, each step once."""
    found: dict[str, list[Evaluated]] = {}
    for turn in turns:
        if isinstance(turn.event, Evaluated):
            known = found.setdefault(turn.event.trial, [])
            if not known or turn.event.step > known[-1].step:
                known.append(turn.event)
    return found


def thinned(evaluations: list[Evaluated]) -> Json:
    each = max(1, math.ceil(len(evaluations) / POINTS))
    # The last one always: it is where the trial was given up.
    kept = [e for at, e in enumerate(evaluations) if at % each == 0 or at == len(evaluations) - 1]
    return {
        "step": [one.step for one in kept],
        "tokens": [one.tokens for one in kept],
        "eval_loss": [finite(one.metrics.get("eval_loss")) for one in kept],
        "loss": [finite(one.metrics.get("loss")) for one in kept],
    }


def axes_of(trials: Iterable[Json]) -> list[Json]:
    """The fields that differ: numbers on a scale, logarithmic where they span two powers of ten or
    more, words in a list."""
    values: dict[str, list[Any]] = {}
    for trial in trials:
        for name, value in trial["params"].items():
            values.setdefault(name, []).append(value)
    axes: list[Json] = []
    for name, found in values.items():
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in found)
        if not numbers:
            words = sorted({shown(value) for value in found})
            axes.append({"name": name, "kind": "words", "words": words})
            continue
        low, high = min(found), max(found)
        wide = low > 0 and high / low >= 32
        axes.append({"name": name, "kind": "log" if wide else "linear", "low": low, "high": high})
    return axes


def shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def course(study: Json, turns: Sequence[StudyTurn]) -> Json:
    """The best so far against the tokens that all trials together had trained on by then."""
    metric, least = study["objective"]["metric"], study["objective"]["mode"] == "min"
    keeps_best = metric == "eval_loss" and least
    tokens: dict[str, int] = {}
    values: dict[str, float] = {}
    points: list[tuple[int, float, str]] = []
    for turn in turns:
        event = turn.event
        if not isinstance(event, Evaluated | Completed | Failed):
            continue
        tokens[event.trial] = max(event.tokens, tokens.get(event.trial, 0))
        value = event.metrics.get(metric) if isinstance(event, Evaluated) else None
        if value is not None and math.isfinite(value):
            before = values.get(event.trial)
            values[event.trial] = min(value, before) if keeps_best and before else value
        if isinstance(event, Failed):
            values.pop(event.trial, None)
        if values:
            best = (min if least else max)(values, key=lambda name: values[name])
            points.append((sum(tokens.values()), values[best], best))
    kept = [point for at, point in enumerate(points) if at == 0 or point[1:] != points[at - 1][1:]]
    kept += points[-1:]
    return {
        "tokens": [at for at, _, _ in kept],
        "value": [value for _, value, _ in kept],
        "trial": [trial for _, _, trial in kept],
        "full": study["tokens_full"],
    }


def saving(study: Json) -> Json:
    """What early exit saved in tokens, and, where the rates were measured, what it and fusing saved
    in time."""
    by_fate: dict[str, int] = {}
    best = study["best"]["name"] if study["best"] else None
    for trial in study["trials"]:
        name = fate(trial, best)
        by_fate[name] = by_fate.get(name, 0) + trial["tokens_seen"]
    fusion = study["fusion"]
    times = None
    if fusion:
        times = {
            "alone_full": study["tokens_full"] / fusion["alone_rate"],
            "alone": study["tokens_spent"] / fusion["alone_rate"],
            "together": study["tokens_spent"] / fusion["together_rate"],
        }
    return {
        "spent": study["tokens_spent"],
        "full": study["tokens_full"],
        "by_fate": [[name, by_fate[name]] for name in FATES if name in by_fate],
        "others": study["saved_fraction"] - study["saved_by_exit"] >= 0.005,
        "times": times,
    }


def finite(value: float | None) -> float | None:
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
