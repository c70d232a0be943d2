"""What is known of a trial: its evaluations, in order, and what they are worth."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tlora.core.sweep import ObjectiveSpec

NEARLY = 1e-9
"""Of a trial: what rounding may make of the same part of its steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A trial at one step."""

    step: int
    tokens: int
    """Trained so far."""

    metrics: dict[str, Any]
    """eval_loss; loss: the mean training loss since the evaluation before; and so on."""

    @property
    def train_loss(self) -> float:
        return float(self.metrics["loss"])

    @property
    def eval_loss(self) -> float:
        return float(self.metrics["eval_loss"])

    @property
    def eval_accuracy(self) -> float | None:
        """Of preference jobs alone."""
        found = self.metrics.get("eval_accuracy")
        return None if found is None else float(found)


@dataclass(frozen=True, slots=True)
class History:
    """Of one trial."""

    total_steps: int
    evaluations: tuple[Evaluation, ...] = ()

    def then(self, evaluation: Evaluation) -> "History":
        return History(self.total_steps, (*self.evaluations, evaluation))

    @property
    def step(self) -> int:
        return self.evaluations[-1].step if self.evaluations else 0

    @property
    def share(self) -> float:
        """How far it is: trials with other batch sizes have other numbers of steps."""
        return self.step / self.total_steps

    def until(self, share: float) -> "History":
        """What was known when it was so far."""
        last = (share + NEARLY) * self.total_steps
        kept = [each for each in self.evaluations if each.step <= last]
        return History(self.total_steps, tuple(kept))

    def value(self, objective: ObjectiveSpec) -> float | None:
        """What it is worth: its best evaluation where that one's adapter is kept, else its last."""
        values = self.values(objective.metric)
        if not values:
            return None
        return min(values) if objective.keeps_best else values[-1]

    def values(self, metric: str) -> list[float]:
        found = (each.metrics.get(metric) for each in self.evaluations)
        return [float(value) for value in found if value is not None]


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """An exponential moving average that starts at the first value."""
    found: list[float] = []
    for value in values:
        found.append(weight * value + (1 - weight) * found[-1] if found else value)
    return found


def slope(values: Sequence[float]) -> float:
    """Per evaluation, by least squares; of two values their difference."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    above = sum((at - middle) * (value - mean) for at, value in enumerate(values))
    return above / sum((at - middle) ** 2 for at in range(len(values)))
