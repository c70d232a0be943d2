"""Who steps now, and how: one small table per step, copied to the device without waiting."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

COLUMNS = 10
(
    PLACE,  # among the steps that are due; below zero: this slot has none
    DECAY,  # 1 - rate * weight decay
    BETA1,
    WEIGHT1,  # 1 - beta1
    BETA2,
    WEIGHT2,
    EPSILON,
    STEP_SIZE,  # rate / (1 - beta1 ^ number)
    CORRECTION,  # sqrt(1 - beta2 ^ number)
    MAX_NORM,  # infinity: no clipping
) = range(COLUMNS)


class Order(NamedTuple):
    """One job's step."""

    slot: int
    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    number: int
    """Of this step, from 1."""

    max_norm: float | None

    def row(self, place: int) -> list[float]:
        row = [0.0] * COLUMNS
        row[PLACE] = place
        row[DECAY] = 1 - self.learning_rate * self.weight_decay
        row[BETA1], row[WEIGHT1] = self.beta1, 1 - self.beta1
        row[BETA2], row[WEIGHT2] = self.beta2, 1 - self.beta2
        row[EPSILON] = self.epsilon
        row[STEP_SIZE] = self.learning_rate / (1 - self.beta1**self.number)
        row[CORRECTION] = math.sqrt(1 - self.beta2**self.number)
        row[MAX_NORM] = math.inf if self.max_norm is None else self.max_norm
        return row


def order_table(orders: Sequence[Order], num_slots: int) -> torch.Tensor:
    """float32 [slots, COLUMNS] in host memory, from float64 as torch has them. What float32 does
    not hold becomes an infinity, and the job's weights with it."""
    rows = [[-1.0] * COLUMNS for _ in range(num_slots)]
    for place, order in enumerate(orders):
        assert rows[order.slot][PLACE] < 0, "a job steps once at a time"
        rows[order.slot] = order.row(place)
    return torch.tensor(rows, dtype=torch.float32)
