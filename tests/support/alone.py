"""A job in company against the same job by itself."""

from collections.abc import Callable

import pytest

from support.tiny import Fed, distance, tiny_engine, train
from tlora.model.adapters import AdapterWeights
from tlora.training.engine import Engine

# Relative, in float32, after the few steps that these tests take. Measured between a job in company
# and the same job alone: at most 1e-6 in the adapters, 4e-8 in the losses.
ROUNDING = 5e-6


def weights(engine: Engine, job: Fed) -> AdapterWeights:
    return engine.super_model.weights(job.name)


def alone(job: Callable[[], Fed], budget_tokens: int = 128) -> tuple[Fed, AdapterWeights]:
    """The job by itself, undisturbed."""
    solo, engine = job(), tiny_engine(budget_tokens)
    outcomes = train(engine, [solo])
    assert not any(outcome.error for outcome in outcomes) and solo.failure is None
    return solo, weights(engine, solo)


def as_alone(engine: Engine, job: Fed, make: Callable[[], Fed]) -> bool:
    solo, expected = alone(make)
    return (
        job.losses == pytest.approx(solo.losses, rel=ROUNDING)
        and distance(weights(engine, job), expected) < ROUNDING
    )
