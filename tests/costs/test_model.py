"""The time of a nano-batch, on hand-made numbers."""

from dataclasses import replace

import numpy as np
import pytest
from support.costs import TIME

from tlora.costs.model import NanoBatch, NanoBatchTime, Segment, StepTime, gradient, predicted

BATCH = NanoBatch(1000, 50_000, (Segment(600, 8), Segment(300, 16, 0.5)))
SHARP = NanoBatchTime(
    fixed_s=1.0,
    segment_s=0.5,
    flat_s=7.0,
    row_s=0.01,
    square_s=1e-4,
    lora_s=0.002,
    rank_s=1e-3,
    sharpness=400.0,
)


def test_a_nano_batch_costs_what_the_formula_says() -> None:
    """By hand: 10 + 5 + 0.002 x 750 + 1e-3 x (600 x 8 + 150 x 16) of work against 7 flat."""
    work = 10 + 5 + 1.5 + 7.2
    assert SHARP.seconds(BATCH) == pytest.approx(1 + 2 * 0.5 + work, rel=1e-3)
    for name in ("fixed_s", "segment_s", "row_s", "square_s", "lora_s", "rank_s"):
        twin = replace(SHARP, **{name: getattr(SHARP, name) * 1.05})
        assert twin.seconds(BATCH) != pytest.approx(1 + 2 * 0.5 + work, rel=1e-3), name


def test_the_smaller_of_launches_and_work_is_hidden() -> None:
    """Half of the tokens of a nano-batch below the knee cost nearly the same."""
    small = NanoBatch(100, 0, (Segment(100, 8),))
    assert replace(SHARP, row_s=0.02).seconds(small) == pytest.approx(1 + 0.5 + 7, rel=1e-3)
    assert SHARP.seconds(small) == pytest.approx(1 + 0.5 + 7, rel=1e-3)
    assert replace(SHARP, flat_s=7.2).seconds(small) != pytest.approx(1 + 0.5 + 7, rel=1e-3)


def test_the_gradient_is_the_slope_and_times_the_parameters_the_time() -> None:
    """Against finite differences; the fit rests on both."""
    features = np.array([BATCH.features, NanoBatch(8192, 1e6, (Segment(8192, 64),)).features])
    theta = np.array(TIME.seconds_each)
    slopes = gradient(theta, features, TIME.sharpness)
    for place in range(len(theta)):
        step = 1e-4 * theta[place]
        after, before = (
            predicted(theta + sign * step * np.eye(len(theta))[place], features, TIME.sharpness)
            for sign in (1, -1)
        )
        assert slopes[:, place] == pytest.approx((after - before) / (2 * step), rel=1e-4, abs=0)
    seconds = [TIME.seconds(BATCH)]
    assert slopes[:1] @ theta == pytest.approx(seconds)
    assert 1.01 * slopes[:1] @ theta != pytest.approx(seconds, rel=1e-3)


def test_no_time_is_lost_where_all_is_zero() -> None:
    """A fit passes through such places."""
    assert predicted(np.zeros(7), np.array([BATCH.features]), 8.0) == pytest.approx([0.0])


def test_steps_cost_by_round_job_and_parameter() -> None:
    """By hand."""
    steps = StepTime(pass_s=1.0, job_s=0.1, parameter_s=1e-3)
    assert steps.seconds(passes=1, jobs=3, parameters=500) == pytest.approx(1 + 0.3 + 0.5)
