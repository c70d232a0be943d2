"""Shares of the busiest program, which say what another way to share a list could gain."""

from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install '.[test]'")


@pytest.fixture
def module(load_script) -> ModuleType:
    return load_script("item_shares")


def test_equal_items_are_shared_evenly_by_every_way(module: ModuleType) -> None:
    assert set(module.shares(np.ones(12), 4).values()) == {1.0}


def test_who_had_a_long_item_gets_a_short_one(module: ModuleType) -> None:
    """Of 4, 3, 2, 1 two programs have 6 and 4 in turn, 5 and 5 otherwise; of five one is left."""
    assert module.shares(np.array([4.0, 3.0, 2.0, 1.0]), 2) == {
        "turns": 6 / 5,
        "snake": 1.0,
    }
    left = module.shares(np.array([4.0, 3.0, 3.0, 2.0, 2.0]), 2)
    assert left == {"turns": 9 / 7, "snake": 8 / 7}


def test_lists_of_unequal_jobs_are_shared_better_from_both_ends(module: ModuleType) -> None:
    place = module.Place("8b", "o", 8192, 32, uneven=True)
    costs = module.item_costs("reduce_b", place, (1.0, 1.0))
    assert len(costs) == 32 * 4096 // 256
    found = module.shares(costs, 132)
    assert found["snake"] < found["turns"]
