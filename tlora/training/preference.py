"""Preference jobs: direct preference optimisation on pairs of answers.

With s the summed loss (minus the log-probability) of an answer under the adapter, and r the same
under the base model alone, the reward of an answer is beta * (r - s), and the loss of a pair

    -(1 - e) * log sigmoid(m) - e * log sigmoid(-m),    m = reward of chosen - reward of rejected

with e the label smoothing. Here is what is said of a pair to people, made on the host from losses
that have come back; what its tokens are sent back with is made on the device (packed_pairs.py).
"""

import math
from dataclasses import dataclass, field

from tlora.core.job import TrainSpec

FIGURES = ("accuracy", "margin", "chosen_reward", "rejected_reward")


@dataclass(frozen=True, slots=True)
class Dpo:
    """Settings of one job."""

    beta: float = 0.1
    label_smoothing: float = 0.0

    @classmethod
    def of(cls, train: TrainSpec) -> "Dpo | None":
        return cls(train.beta, train.label_smoothing) if train.on_pairs else None

    def judge(self, sums: tuple[float, float], reference: tuple[float, float]) -> "Judged":
        """From the summed losses of both sides, the chosen one first."""
        chosen, rejected = (
            self.beta * (base - own) for own, base in zip(sums, reference, strict=True)
        )
        margin = chosen - rejected
        smoothing = self.label_smoothing
        loss = (1.0 - smoothing) * softplus(-margin) + smoothing * softplus(margin)
        return Judged(loss, chosen, rejected)


@dataclass(frozen=True, slots=True)
class Judged:
    """A pair: its loss, and the rewards of its sides."""

    loss: float
    chosen: float
    rejected: float


@dataclass(slots=True)
class Tally:
    """Sums over the pairs of a batch."""

    pairs: int = 0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(FIGURES, 0.0))

    def add(self, judged: Judged) -> None:
        self.pairs += 1
        self.sums["accuracy"] += judged.chosen > judged.rejected
        self.sums["margin"] += judged.chosen - judged.rejected
        self.sums["chosen_reward"] += judged.chosen
        self.sums["rejected_reward"] += judged.rejected

    def figures(self) -> dict[str, float]:
        """Means by name; none where there were no pairs."""
        return {name: total / self.pairs for name, total in self.sums.items()} if self.pairs else {}


def softplus(value: float) -> float:
    return max(value, 0.0) + math.log1p(math.exp(-abs(value)))
