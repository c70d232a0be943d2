"""The settings that a sweep tries."""

import math
import time
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from tlora.core.errors import SpecError
from tlora.core.sweep import AxisSpec, SearchSpec, When
from tlora.tuning.samplers import planned
from tlora.tuning.space import grid, ordered, sample

RATE = AxisSpec(field="train.learning_rate", kind="log", low=1e-5, high=1e-2)
RANK = AxisSpec(field="lora.r", kind="values", values=(4, 16, 64))
BATCH = AxisSpec(field="train.batch_size", kind="values", values=(1, 4))
DROPOUT = AxisSpec(
    field="lora.lora_dropout",
    kind="values",
    values=(0.0, 0.1),
    when=(When(field="lora.r", values=(16, 64)),),
)


def test_a_grid_fills_ranges_with_what_the_trials_leave() -> None:
    """48 trials over 3 ranks and 2 batch sizes leave 8 rates, evenly spaced in logarithms."""
    points = grid((RATE, RANK, BATCH), 48)
    rates = sorted({point["train.learning_rate"] for point in points})
    assert len(points) == 48 and len(rates) == 8
    assert rates[0] == 1e-5 and rates[-1] == 1e-2
    ratios = [high / low for low, high in pairwise(rates)]
    assert all(math.isclose(ratio, 1000 ** (1 / 7), rel_tol=1e-4) for ratio in ratios)
    assert not all(math.isclose(ratio, 1000 ** (1 / 8), rel_tol=1e-4) for ratio in ratios)


def test_a_field_with_a_condition_has_a_value_only_where_it_holds() -> None:
    """Rank 4 once, ranks 16 and 64 with both dropouts; whatever the order of the file."""
    for space in ((RANK, DROPOUT), (DROPOUT, RANK)):
        points = grid(space, None)
        assert len(points) == 1 + 2 * 2
        assert [point for point in points if point["lora.r"] == 4] == [{"lora.r": 4}]
    drawn = [sample((RANK, DROPOUT), Random(at)) for at in range(40)]
    assert all(("lora.lora_dropout" in each) == (each["lora.r"] != 4) for each in drawn)


def test_a_condition_on_values_that_are_never_tried_is_refused() -> None:
    """It would never hold, and the field never be tried; ranges have values that nobody lists, and
    one value that is tried is enough."""
    odd = replace(DROPOUT, when=(When(field="lora.r", values=(8, 32)),))
    with pytest.raises(SpecError, match=r"when: lora\.r is never 8 or 32; it is one of 4, 16, 64"):
        ordered((RANK, odd))
    assert ordered((RANK, replace(DROPOUT, when=(When(field="lora.r", values=(16, 32)),))))
    steps = AxisSpec(field="lora.r", kind="integer", low=2, high=10, step=4)
    with pytest.raises(SpecError, match=r"when: lora\.r is never 4; it is one of 2, 6, 10"):
        ordered((steps, replace(DROPOUT, when=(When(field="lora.r", values=(4,)),))))
    rate = replace(DROPOUT, when=(When(field="train.learning_rate", values=(1e-3,)),))
    assert len(ordered((RATE, rate))) == 2


def test_whole_numbers_are_drawn_and_laid_out_on_their_steps() -> None:
    """Both ends are reached and nothing between the steps."""
    axis = AxisSpec(field="lora.r", kind="integer", low=2, high=10, step=4)
    assert {sample((axis,), Random(at))["lora.r"] for at in range(60)} == {2, 6, 10}
    assert [point["lora.r"] for point in grid((axis,), 3)] == [2, 6, 10]
    assert [point["lora.r"] for point in grid((axis,), 2)] == [2, 10]


def test_a_random_trial_does_not_depend_on_how_many_there_are() -> None:
    """The first ten of a hundred are the ten of ten; another seed gives others."""

    def drawn(trials: int, seed: int = 0) -> list:
        return planned(SearchSpec(space=(RATE, RANK), sampler="random", trials=trials, seed=seed))

    assert drawn(100)[:10] == drawn(10) != drawn(10, seed=1)
    assert all(1e-5 <= each["train.learning_rate"] <= 1e-2 for each in drawn(100))
    # Half of them below the middle of the logarithms, not below the middle of the range.
    low = sum(each["train.learning_rate"] < 10**-3.5 for each in drawn(400))
    assert 160 < low < 240


def test_no_trial_is_drawn_twice() -> None:
    """A space of six points gives six trials, however many were asked for."""
    found = planned(SearchSpec(space=(RANK, BATCH), sampler="random", trials=50))
    assert len(found) == 6 == len({tuple(each.items()) for each in found})


def test_as_many_random_trials_as_a_grid_may_have_are_drawn_in_seconds() -> None:
    """Each is looked up among those before it, not compared with them all; more are a mistake."""
    began = time.process_time()
    found = planned(SearchSpec(space=(RATE, RANK), sampler="random", trials=20_000))
    assert len(found) == 20_000 and time.process_time() - began < 10
    with pytest.raises(SpecError, match=r"search\.trials: .* at most 100,000"):
        planned(SearchSpec(space=(RATE,), sampler="random", trials=100_001))


@pytest.mark.parametrize(
    ("space", "trials", "field"),
    [
        ((RANK, BATCH), 5, "search.trials"),
        ((RATE,), None, "search.space.train.learning_rate"),
        ((RATE, RANK, BATCH), 11, "search.trials"),
        ((DROPOUT,), None, "search.space.lora.lora_dropout"),
    ],
)
def test_what_cannot_be_laid_out_is_named(space: tuple, trials: int | None, field: str) -> None:
    """A grid larger than its trials, a range of unknown points, a condition on nothing."""
    with pytest.raises(SpecError) as caught:
        grid(space, trials)
    assert caught.value.field == field
