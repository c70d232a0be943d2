"""Which nano-batches a profile measures."""

import numpy as np
import pytest

from tlora.runtime.profiling.grid import (
    BARE,
    EIGHT,
    RANKS,
    Plan,
    choose_plans,
    dealt,
    mixed,
    whole,
)


def plans_for(largest: int, positions: int | None) -> list[Plan]:
    generator = np.random.Generator(np.random.PCG64(0))
    return choose_plans(largest=largest, positions=positions, generator=generator)


@pytest.mark.parametrize(
    ("largest", "positions"), [(16_384, 131_072), (2048, 256), (256, 256), (64, None), (1000, 100)]
)
def test_every_plan_fits_its_nano_batch_and_the_base(largest: int, positions: int | None) -> None:
    """No sequence beyond the positions, no nano-batch beyond its rows or hardly filled."""
    for plan in plans_for(largest, positions):
        assert 0.85 * plan.rows < sum(plan.lengths) <= plan.rows <= largest
        assert min(plan.lengths) >= 2 and plan.longest <= (positions or largest)
        assert all(place <= len(RANKS) for place in plan.team)


def test_a_device_gets_points_of_every_kind_on_both_sides_of_the_fit() -> None:
    """Six sizes; lengths of 128, 512 and 2,048; enough to fit, a fifth or more to check."""
    plans = plans_for(16_384, 131_072)
    assert {plan.rows for plan in plans} == {512, 1024, 2048, 4096, 8192, 16_384}
    assert {plan.longest for plan in plans if len(set(plan.lengths)) == 1} == {128, 512, 2048}
    fitted = [plan for plan in plans if not plan.heldout]
    assert len(fitted) >= 20 and len(plans) - len(fitted) >= len(plans) / 5
    assert {plan.rows for plan in fitted} == {plan.rows for plan in plans}
    assert sum(plan.team == BARE for plan in fitted) == 2
    assert any(plan.heldout and len(set(plan.lengths)) > 3 for plan in plans)


def test_the_same_plans_are_held_out_every_time() -> None:
    """Chosen before anything is measured, so that nobody can choose by what comes out."""
    assert plans_for(4096, 4096) == plans_for(4096, 4096)
    assert len(set(plans_for(4096, 4096))) == len(plans_for(4096, 4096))


def test_lengths_fill_what_they_should() -> None:
    """A rest becomes a shorter sequence; mixed lengths lie between the ends."""
    assert whole(1000, 300) == (300, 300, 300, 100)
    assert whole(901, 300) == (300, 300, 300)
    drawn = mixed(5000, (10, 700), np.random.Generator(np.random.PCG64(1)))
    assert 4999 <= sum(drawn) <= 5000 and max(drawn) <= 700 and min(drawn[:-1]) >= 10


def test_sequences_are_dealt_in_turn() -> None:
    """With fewer sequences than jobs some get none."""
    assert dealt((5, 6, 7), (2, 4)) == {2: [5, 7], 4: [6]}
    assert dealt((5,), EIGHT) == {0: [5]}
