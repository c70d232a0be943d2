"""Who steps now, and how: one small table per step, copied to the device without waiting."""

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


def order_table(orders: Sequence[Order], num_slots: int) -> torch.Tensor:
    """float32 [slots, COLUMNS] in host memory. Made in float64, as torch makes them; what float32
    does not hold becomes an infinity, and the weights with it."""
    slots = [order.slot for order in orders]
    assert len(set(slots)) == len(slots), "a job steps once at a time"
    limits = [float("inf") if order.max_norm is None else order.max_norm for order in orders]
    plain = torch.tensor([order[1:7] for order in orders], dtype=torch.float64).reshape(-1, 6)
    rate, beta1, beta2, epsilon, decay, number = plain.unbind(1)
    columns = {
        PLACE: torch.arange(len(orders), dtype=torch.float64),
        DECAY: 1 - rate * decay,
        BETA1: beta1,
        WEIGHT1: 1 - beta1,
        BETA2: beta2,
        WEIGHT2: 1 - beta2,
        EPSILON: epsilon,
        STEP_SIZE: rate / (1 - beta1**number),
        CORRECTION: (1 - beta2**number).sqrt(),
        MAX_NORM: torch.tensor(limits, dtype=torch.float64),
    }
    table = torch.full((num_slots, COLUMNS), -1.0)
    table[slots] = torch.stack([columns[i] for i in range(COLUMNS)], dim=1).float()
    return table
