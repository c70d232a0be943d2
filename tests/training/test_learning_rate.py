"""Our learning rates are those of transformers' schedulers, step by step."""

import math

import pytest
import torch
from transformers import optimization

from tlora.core.job import Schedule, TrainSpec
from tlora.training.learning_rate import learning_rate, whole_steps

PEAK = 3e-3
Scheduler = torch.optim.lr_scheduler.LambdaLR


def their_rates(train: TrainSpec, total: int) -> list[float]:
    """What transformers' scheduler gives the optimiser in each of `total` steps."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([weight], lr=train.learning_rate)
    scheduler = their_scheduler(train, optimiser, total)
    rates = []
    for step in range(total):
        if step:
            optimiser.step()
            scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates


def their_scheduler(train: TrainSpec, optimiser: torch.optim.Optimizer, total: int) -> Scheduler:
    # A fraction as TrainingArguments.get_warmup_steps reads it.
    fraction = 0 < train.warmup_steps < 1
    warmup = math.ceil(train.warmup_steps * total) if fraction else int(train.warmup_steps)
    match train.lr_scheduler_type:
        case "cosine_with_min_lr":
            return optimization.get_cosine_with_min_lr_schedule_with_warmup(
                optimiser, warmup, total, min_lr=train.min_lr
            )
        case "polynomial":
            return optimization.get_polynomial_decay_schedule_with_warmup(
                optimiser, warmup, total, lr_end=train.min_lr
            )
        case "wsd":
            return optimization.get_wsd_schedule(
                optimiser,
                warmup,
                whole_steps(train.decay_steps, total),
                num_training_steps=total,
                min_lr_ratio=train.min_lr / train.learning_rate,
            )
        case kind:
            return optimization.get_scheduler(kind, optimiser, warmup, total)


def our_rates(train: TrainSpec, total: int) -> list[float]:
    return [learning_rate(train, step, total) for step in range(total)]


SCHEDULES: list[Schedule] = [
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "wsd",
]


@pytest.mark.parametrize("min_lr", [0.0, 4e-4])
@pytest.mark.parametrize("warmup", [0, 1, 7, 0.03, 0.25, 40])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_step_has_transformers_rate(
    schedule: Schedule, warmup: int | float, min_lr: float
) -> None:
    """All schedules, all steps, warm-up in steps and as a fraction, with and without a floor."""
    train = TrainSpec(
        learning_rate=PEAK, lr_scheduler_type=schedule, warmup_steps=warmup, min_lr=min_lr
    )
    for total in (1, 40, 101):
        assert our_rates(train, total) == pytest.approx(their_rates(train, total), rel=1e-12)


@pytest.mark.parametrize("decay", [0, 5, 0.5, 90])
def test_wsd_decays_in_its_last_steps(decay: int | float) -> None:
    """The last part in steps or as a fraction, also where it meets the warm-up."""
    train = TrainSpec(
        learning_rate=PEAK,
        lr_scheduler_type="wsd",
        warmup_steps=20,
        decay_steps=decay,
        min_lr=1e-4,
    )
    assert our_rates(train, 100) == pytest.approx(their_rates(train, 100), rel=1e-12)


def test_a_schedule_off_by_one_step_is_refused() -> None:
    """The tolerance sees a step counted from one."""
    train = TrainSpec(learning_rate=PEAK, lr_scheduler_type="cosine", warmup_steps=5)
    late = [learning_rate(train, step + 1, 40) for step in range(40)]
    assert late != pytest.approx(their_rates(train, 40), rel=1e-3)


def test_no_learning_rate_is_no_error() -> None:
    """A rate of zero stays zero, floor and all."""
    for schedule in SCHEDULES:
        train = TrainSpec(learning_rate=0.0, lr_scheduler_type=schedule, warmup_steps=3)
        assert our_rates(train, 10) == [0.0] * 10
