"""The world that rules for the size of nano-batches are tried in, and the published rule."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from tlora.runtime.benchmark.landscapes import (
    RECORDED,
    WARM_UP,
    Landscape,
    PublishedRule,
    drive,
    interpolated,
    peaked,
    recorded,
)
from tlora.training.size_search import Decision, Measure


@dataclass
class Fixed:
    """A rule that stays at one size."""

    budget: int

    def observe(self, measure: Measure) -> Sequence[Decision]:
        return ()


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_points_are_kept(name: str) -> None:
    """Between two of them lies what is between their rates."""
    points = RECORDED[name]
    rate = interpolated({size: float(value) for size, value in points.items()})
    assert {size: round(rate(size, 0.0)) for size in points} == points
    low, high = sorted(points)[:2]
    assert points[low] < rate((low + high) // 2, 0.0) < points[high]


def test_who_knows_the_best_size_pays_for_its_first_nano_batch_only() -> None:
    """Noise aside and with it; any other size costs what it is slower."""
    landscape = Landscape(name="peak", rate=peaked(4096, 2.0))
    for noise in (0.0, 0.05):
        run = drive(Fixed(4096), replace(landscape, noise=noise), nano_batches=500)
        assert run.regret == pytest.approx((WARM_UP - 1) / 1000, rel=0.3)
        assert run.changes == 0 and run.loss_at_the_end() == pytest.approx(0.0)
    slower = landscape.rate(4096, 0.0) / landscape.rate(8192, 0.0) - 1
    other = drive(Fixed(8192), landscape, nano_batches=500)
    assert other.loss_at_the_end() == pytest.approx(slower) and other.regret > slower


def test_the_published_rule_is_as_published() -> None:
    """N += 4 if the batch was faster by tau, else N / 2, and at least 1; after every batch."""
    rule = PublishedRule(recorded("8B frozen, eager"), tau=0.1)
    counts = []
    for batch_seconds in (8.0, 6.0, 5.9, 5.0, 5.1, 5.2, 5.3, 5.4, 5.5):
        count = round(16384 / rule.budget) if not counts else counts[-1][1]
        for _ in range(count):
            rule.observe(Measure(rule.budget, rule.budget, 16384 // count, batch_seconds / count))
        counts.append((count, rule._count))
    assert counts == [(8, 8), (8, 12), (12, 6), (6, 10), (10, 5), (5, 2), (2, 1), (1, 1), (1, 1)]
