"""When a trial is given up: rules as pure functions over histories.

Every decision is a `Verdict` that says which rule, on which numbers, at which step, so that it can
be argued with. `alto` is the published early exit; `asha` and `median` look at every trial as it
comes, without a warm-up of all; `none` gives nobody up.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

from tlora.core.sweep import EarlyExitSpec, ObjectiveSpec
from tlora.tuning.history import NEARLY, History, slope, smoothed


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A trial is given up."""

    trial: str
    rule: str
    """diverging, overfitting, underperforming, asha, median, budget or person."""

    step: int
    numbers: dict[str, float] = field(default_factory=dict[str, float])
    """What the rule looked at."""

    why: str
    """The same as a sentence."""

    def __str__(self) -> str:
        return f"{self.rule} at step {self.step}: {self.why}"


class Rule(Protocol):
    @property
    def warmup(self) -> float | None:
        """Trials are held at this part of their steps until all have come as far; None: they run
        through."""
        ...

    @property
    def min_warmup_steps(self) -> int:
        """And not before so many, however few they have."""
        ...

    def judge(self, trial: str, histories: Mapping[str, History]) -> Verdict | None:
        """Asked after each evaluation of a trial; `histories` are those of all that have one."""
        ...

    def select(self, held: Mapping[str, History], num_trials: int) -> list[Verdict]:
        """Asked once, when all `num_trials` have warmed up: which of those still `held` go."""
        ...


def rule_of(spec: EarlyExitSpec, objective: ObjectiveSpec) -> Rule:
    match spec.method:
        case "alto":
            return Alto(spec, objective)
        case "asha":
            return Asha(spec, objective)
        case "median":
            return Median(spec, objective)
        case "none":
            return Nobody()


@dataclass(frozen=True, slots=True)
class Nobody:
    """Every trial runs to its end."""

    warmup: float | None = None
    min_warmup_steps: int = 1

    def judge(self, trial: str, histories: Mapping[str, History]) -> Verdict | None:
        return None

    def select(self, held: Mapping[str, History], num_trials: int) -> list[Verdict]:
        return []


@dataclass(frozen=True, slots=True)
class Alto:
    spec: EarlyExitSpec
    objective: ObjectiveSpec

    @property
    def warmup(self) -> float | None:
        return self.spec.warmup

    @property
    def min_warmup_steps(self) -> int:
        return self.spec.min_warmup_steps

    def judge(self, trial: str, histories: Mapping[str, History]) -> Verdict | None:
        history = histories[trial]
        rules = PAIRS if is_of_pairs(history) and self.spec.watch_accuracy else LOSSES
        found = (rule(trial, history, self.spec) for rule in rules)
        return next((verdict for verdict in found if verdict is not None), None)

    def select(self, held: Mapping[str, History], num_trials: int) -> list[Verdict]:
        return underperforming(held, num_trials, self.spec, self.objective)


def diverging(trial: str, history: History, spec: EarlyExitSpec) -> Verdict | None:
    """Smoothed training loss and held-out loss both rise, several evaluations in a row."""
    train = smoothed([each.train_loss for each in history.evaluations], spec.smoothing)
    held_out = [each.eval_loss for each in history.evaluations]
    window, patience = spec.diverging_window, spec.diverging_patience
    ends = range(len(train) - patience + 1, len(train) + 1)
    if ends[0] < window:
        return None
    slopes = [
        (slope(train[end - window : end]), slope(held_out[end - window : end])) for end in ends
    ]
    if any(min(pair) < spec.diverging_slope for pair in slopes):
        return None
    train_slope, eval_slope = slopes[-1]
    return Verdict(
        trial=trial,
        rule="diverging",
        step=history.step,
        numbers={
            "train_slope": train_slope,
            "eval_slope": eval_slope,
            "threshold": spec.diverging_slope,
            "times": patience,
            "train_loss": train[-1],
            "eval_loss": held_out[-1],
        },
        why=f"training loss rose by {train_slope:.4g} and held-out loss by {eval_slope:.4g} per "
        f"evaluation, {patience} times in a row at or above {spec.diverging_slope:g}",
    )


def overfitting(trial: str, history: History, spec: EarlyExitSpec) -> Verdict | None:
    """Held-out loss is well above the smoothed training loss, several evaluations in a row."""
    patience = spec.overfitting_patience
    train = smoothed([each.train_loss for each in history.evaluations], spec.smoothing)
    held_out = [each.eval_loss for each in history.evaluations]
    if len(train) < patience:
        return None
    gaps = [_gap(train[at], held_out[at]) for at in range(len(train) - patience, len(train))]
    if any(gap <= spec.overfitting_gap for gap in gaps):
        return None
    best = min(range(len(held_out)), key=lambda at: held_out[at])
    if spec.overfitting_past_best and best >= len(held_out) - patience:
        return None
    return Verdict(
        trial=trial,
        rule="overfitting",
        step=history.step,
        numbers={
            "gap": gaps[-1],
            "threshold": spec.overfitting_gap,
            "times": patience,
            "train_loss": train[-1],
            "eval_loss": held_out[-1],
            "best_eval_loss": held_out[best],
            "best_step": history.evaluations[best].step,
        },
        why=f"held-out loss {held_out[-1]:.4f} is {gaps[-1]:.0%} above the training loss "
        f"{train[-1]:.4f}, {patience} times in a row above {spec.overfitting_gap:.0%}; the best, "
        f"{held_out[best]:.4f} at step {history.evaluations[best].step}, is kept",
    )


def is_of_pairs(history: History) -> bool:
    """Of a preference job, of which the accuracy on held-out pairs is known."""
    return all(each.eval_accuracy is not None for each in history.evaluations)


def diverging_on_pairs(trial: str, history: History, spec: EarlyExitSpec) -> Verdict | None:
    """Both losses rise, and the accuracy on held-out pairs does not: a loss that rises because the
    adapter is surer of the pairs it gets wrong, while it gets more right, is no divergence."""
    verdict = diverging(trial, history, spec)
    accuracies = _accuracies(history)
    reach = spec.diverging_window + spec.diverging_patience - 1
    if verdict is None or accuracies[-1] > accuracies[-reach]:
        return None
    before, after = accuracies[-reach], accuracies[-1]
    return replace(
        verdict,
        numbers={**verdict.numbers, "accuracy_before": before, "accuracy": after},
        why=f"{verdict.why}, and accuracy went from {before:.0%} to {after:.0%}",
    )


def overfitting_on_pairs(trial: str, history: History, spec: EarlyExitSpec) -> Verdict | None:
    """Held-out loss is well above its own lowest, several evaluations in a row, and the accuracy is
    no better than it was there. The training loss of pairs goes to zero in any trial that learns,
    and says nothing about the others."""
    patience = spec.overfitting_patience
    held_out, accuracies = [each.eval_loss for each in history.evaluations], _accuracies(history)
    best = min(range(len(held_out)), key=lambda at: held_out[at])
    late = range(len(held_out) - patience, len(held_out))
    if late[0] <= best:
        return None
    gaps = [_gap(held_out[best], held_out[at]) for at in late]
    better = max(accuracies[at] for at in late) > accuracies[best]
    if better or any(gap <= spec.overfitting_gap for gap in gaps):
        return None
    step = history.evaluations[best].step
    return Verdict(
        trial=trial,
        rule="overfitting",
        step=history.step,
        numbers={
            "gap": gaps[-1],
            "threshold": spec.overfitting_gap,
            "times": patience,
            "eval_loss": held_out[-1],
            "accuracy": accuracies[-1],
            "best_eval_loss": held_out[best],
            "best_accuracy": accuracies[best],
            "best_step": step,
        },
        why=f"held-out loss {held_out[-1]:.4f} is {gaps[-1]:.0%} above its lowest, "
        f"{held_out[best]:.4f} at step {step}, {patience} times in a row above "
        f"{spec.overfitting_gap:.0%}, and accuracy is {accuracies[-1]:.0%}, no better than "
        f"{accuracies[best]:.0%} there; that one is kept",
    )


LOSSES = (diverging, overfitting)
PAIRS = (diverging_on_pairs, overfitting_on_pairs)


def _accuracies(history: History) -> list[float]:
    return [each.eval_accuracy or 0.0 for each in history.evaluations]


def _gap(train: float, held_out: float) -> float:
    """A training loss of zero is as overfitted as can be."""
    return (held_out - train) / train if train > 0 else math.inf if held_out > train else 0.0


def underperforming(
    held: Mapping[str, History], num_trials: int, spec: EarlyExitSpec, objective: ObjectiveSpec
) -> list[Verdict]:
    """All but the best part of all trials, by their last evaluation; of equals the earlier one
    stays. Trials that went before have taken places among those that go."""
    most = num_kept(spec, num_trials)
    last = {name: _last(history, objective) for name, history in held.items()}
    ranked = sorted(last, key=lambda name: objective.key(last[name]))
    if len(ranked) <= most:
        return []
    cut = last[ranked[most - 1]]
    return [
        Verdict(
            trial=name,
            rule="underperforming",
            step=held[name].step,
            numbers={
                "value": last[name],
                "cut": cut,
                "place": place,
                "kept": most,
                "trials": num_trials,
            },
            why=f"{objective.metric} {last[name]:.4f} after the warm-up is place {place} of "
            f"{num_trials}; the best {most} go on, the last of them with {cut:.4f}",
        )
        for place, name in enumerate(ranked[most:], most + 1)
    ]


def num_kept(spec: EarlyExitSpec, num_trials: int) -> int:
    """As the part was typed: 0.07 of 100 is 7, not a little more."""
    return math.ceil(round(spec.keep * num_trials, 9))


def _last(history: History, objective: ObjectiveSpec) -> float:
    values = history.values(objective.metric)
    return values[-1] if values else objective.key(math.inf)


@dataclass(frozen=True, slots=True)
class Asha:
    """Asynchronous successive halving, the stopping kind: at a rung a trial goes on if it is among
    the best of those that have reached it so far."""

    spec: EarlyExitSpec
    objective: ObjectiveSpec
    warmup: float | None = None
    min_warmup_steps: int = 1

    def judge(self, trial: str, histories: Mapping[str, History]) -> Verdict | None:
        rung = self._reached(histories[trial])
        if rung is None:
            return None
        values = {
            name: value
            for name, history in histories.items()
            if (value := value_at(history, rung, self.objective)) is not None
        }
        if trial not in values:
            return None
        ranked = sorted(values, key=lambda name: self.objective.key(values[name]))
        place, most = ranked.index(trial) + 1, max(1, len(ranked) // self.spec.reduction)
        if place <= most:
            return None
        return Verdict(
            trial=trial,
            rule="asha",
            step=histories[trial].step,
            numbers={
                "rung": rung,
                "value": values[trial],
                "cut": values[ranked[most - 1]],
                "place": place,
                "reached": len(ranked),
            },
            why=f"{self.objective.metric} {values[trial]:.4f} at {rung:.0%} of its steps is place "
            f"{place} of the {len(ranked)} that came so far; the best {most} go on",
        )

    def select(self, held: Mapping[str, History], num_trials: int) -> list[Verdict]:
        return []

    def rungs(self) -> list[float]:
        found, at = list[float](), self.spec.first_rung
        while at < 1:
            found.append(at)
            at *= self.spec.reduction
        return found

    def _reached(self, history: History) -> float | None:
        """The highest rung that its last evaluation is the first one past."""
        before = (
            history.evaluations[-2].step / history.total_steps
            if len(history.evaluations) > 1
            else 0.0
        )
        rungs = [rung for rung in self.rungs() if before < rung - NEARLY < history.share]
        return max(rungs, default=None)


def value_at(history: History, share: float, objective: ObjectiveSpec) -> float | None:
    """What a trial was worth at its first evaluation past this part of its steps."""
    for at, each in enumerate(history.evaluations):
        if each.step >= (share - NEARLY) * history.total_steps:
            return History(history.total_steps, history.evaluations[: at + 1]).value(objective)
    return None


@dataclass(frozen=True, slots=True)
class Median:
    """A trial goes if its best so far is worse than the median of what others were on average by
    the same part of their steps."""

    spec: EarlyExitSpec
    objective: ObjectiveSpec
    warmup: float | None = None
    min_warmup_steps: int = 1

    def judge(self, trial: str, histories: Mapping[str, History]) -> Verdict | None:
        mine = histories[trial]
        values = mine.values(self.objective.metric)
        if mine.share < self.spec.grace or not values:
            return None
        means = [
            sum(found) / len(found)
            for name, other in histories.items()
            if name != trial and other.share >= mine.share
            if (found := other.until(mine.share).values(self.objective.metric))
        ]
        if len(means) < self.spec.min_trials:
            return None
        best, middle = min(values, key=self.objective.key), median(means)
        if self.objective.key(best) <= self.objective.key(middle):
            return None
        return Verdict(
            trial=trial,
            rule="median",
            step=mine.step,
            numbers={"best": best, "median": middle, "others": len(means), "share": mine.share},
            why=f"its best {self.objective.metric}, {best:.4f}, is worse than {middle:.4f}, the "
            f"median of {len(means)} others' means by {mine.share:.0%} of their steps",
        )

    def select(self, held: Mapping[str, History], num_trials: int) -> list[Verdict]:
        return []
