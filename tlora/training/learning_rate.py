"""The learning rate of one job at one step: a pure function, the curves of transformers'
schedulers."""

import math

from tlora.core.job import TrainSpec


def learning_rate(train: TrainSpec, step: int, total_steps: int) -> float:
    """The rate of the job's optimiser step number `step`, counted from 0."""
    return train.learning_rate * _factor(train, step, total_steps)


def whole_steps(steps: int | float, total_steps: int) -> int:
    """A number of steps, or a fraction in [0, 1) of all of them, rounded up."""
    return math.ceil(steps * total_steps) if 0 < steps < 1 else int(steps)


def _factor(train: TrainSpec, step: int, total: int) -> float:
    warmup = whole_steps(train.warmup_steps, total)
    floor = train.min_lr / train.learning_rate if train.learning_rate else 0.0
    kind = train.lr_scheduler_type
    if kind == "constant":
        return 1.0
    if step < warmup:
        rising = step / max(1, warmup)
        return rising * (1 - floor) + floor if kind == "wsd" else rising
    progress = (step - warmup) / max(1, total - warmup)
    match kind:
        case "constant_with_warmup":
            return 1.0
        case "linear":
            return max(0.0, 1.0 - progress)
        case "cosine":
            return _half_cosine(progress)
        case "cosine_with_min_lr":
            return _half_cosine(progress) * (1 - floor) + floor
        case "polynomial":
            return (1.0 - progress) * (1 - floor) + floor
        case "inverse_sqrt":
            timescale = warmup or 10_000
            return math.sqrt(timescale / (step + timescale - warmup))
        case "wsd":
            decay = whole_steps(train.decay_steps, total)
            decayed = step - (total - decay)
            return (
                1.0 if decayed < 0 else _half_cosine(decayed / max(1, decay)) * (1 - floor) + floor
            )
    raise AssertionError(kind)


def _half_cosine(progress: float) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
