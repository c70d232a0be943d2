"""Failures and slow spells."""

import pytest

from tlora.core.cluster import uniform_cluster
from tlora.core.errors import SpecError
from tlora.core.event import GpuFailure, GpuRepair, Straggler
from tlora.simulation.world import World, draw_events

CLUSTER = uniform_cluster(16)
MONTH_S = 30 * 86_400.0
ROUGH = World(
    gpu_mtbf_s=200 * 3600, node_mtbf_s=500 * 3600, repair_s=7200, straggle_every_s=100 * 3600
)


def test_the_same_seed_gives_the_same_events_in_order() -> None:
    """And another seed others; a calm world none."""
    events = draw_events(ROUGH, CLUSTER, until_s=MONTH_S, seed=1)
    assert events == draw_events(ROUGH, CLUSTER, until_s=MONTH_S, seed=1)
    assert events != draw_events(ROUGH, CLUSTER, until_s=MONTH_S, seed=2)
    assert [each.time for each in events] == sorted(each.time for each in events)
    assert draw_events(World(), CLUSTER, until_s=MONTH_S, seed=1) == []


def test_a_gpu_that_is_down_neither_fails_nor_straggles() -> None:
    """Every failure is repaired; whole nodes fail too."""
    down: set[int] = set()
    sizes: set[int] = set()
    for event in draw_events(ROUGH, CLUSTER, until_s=MONTH_S, seed=0):
        match event:
            case GpuFailure(gpus=gpus):
                assert not down & set(gpus)
                down |= set(gpus)
                sizes.add(len(gpus))
            case GpuRepair(gpus=gpus):
                assert down >= set(gpus)
                down -= set(gpus)
            case Straggler(gpu=gpu, speed=speed):
                assert speed == 1 or gpu not in down
    assert not down and {1, 8} <= sizes


def test_failures_come_as_often_as_asked() -> None:
    """Within four standard deviations of a Poisson count; twice as often would be seen."""
    world = World(gpu_mtbf_s=50 * 3600, repair_s=60)
    count = sum(
        isinstance(each, GpuFailure)
        for each in draw_events(world, CLUSTER, until_s=MONTH_S, seed=0)
    )
    expected = 16 * MONTH_S / (50 * 3600 + 60)
    assert abs(count - expected) < 4 * expected**0.5 < abs(count - 2 * expected)


@pytest.mark.parametrize(
    "wrong", [{"gpu_mtbf_s": 0.0}, {"repair_s": -1.0}, {"straggle_speed": 1.0}]
)
def test_an_impossible_world_is_refused(wrong) -> None:
    """By the field."""
    with pytest.raises(SpecError, match=next(iter(wrong))):
        World(**wrong)
