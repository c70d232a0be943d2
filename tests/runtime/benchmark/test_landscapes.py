"""The world that rules for the size of nano-batches are tried in, and the published rule."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from tlora.runtime.benchmark.drawn_landscapes import FAMILIES, drawn
from tlora.runtime.benchmark.landscapes import (
    RECORDED,
    START,
    WARM_UP,
    Informed,
    Landscape,
    PublishedRule,
    drive,
    interpolated,
    launch_bound,
    moved,
    ours,
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


def test_what_a_first_nano_batch_costs_belongs_to_the_landscape() -> None:
    landscape = Landscape(name="peak", rate=peaked(4096, 2.0))
    usual, cold = (
        drive(Fixed(4096), replace(landscape, warm_up=warm_up)).regret for warm_up in (3.0, 5.0)
    )
    assert cold == pytest.approx(2 * usual)


def test_who_knows_the_rates_notices_a_change_at_the_next_nano_batch() -> None:
    """And comes to no other size than the best ones; with neighbours to each of theirs twice."""
    rate = moved(peaked(8192, 2.5), peaked(4096, 2.5), 0.5)
    landscape = Landscape(name="moves", rate=rate)
    run = drive(Informed(landscape), landscape)
    assert run.budgets[0] == START and set(run.budgets[1:]) == {8192, 4096}
    assert run.changes == 2
    late = [b for b, done in zip(run.budgets, run.done, strict=True) if done >= 0.5]
    assert late[0] == 8192 and set(late[1:]) == {4096}
    careful = drive(Informed(landscape, neighbours=True), landscape)
    counts = {size: careful.budgets.count(size) for size in (10240, 7168, 5120, 3584)}
    assert set(counts.values()) == {2} and careful.regret > run.regret


@pytest.mark.parametrize("seed", range(3))
def test_no_rule_costs_less_than_one_that_knows_the_rates(seed: int) -> None:
    """Noise aside; and where nothing has to be found the first nano-batch is all it costs."""
    for family in FAMILIES:
        landscape = replace(drawn(family, seed), noise=0.0, stumbles=0.0)
        least = drive(Informed(landscape), landscape).regret
        assert 0.0 < least <= drive(ours(landscape), landscape).regret
        assert least <= drive(PublishedRule(landscape), landscape).regret
    flat = Landscape(name="flat", rate=launch_bound(1))
    run = drive(Informed(flat), flat)
    assert set(run.budgets) == {START} and run.regret < 0.002


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drawn_landscape_is_the_same_by_number_and_name(family: str) -> None:
    """And no two numbers or names are; rates stay within what a device might do."""
    seen = set()
    for number, name in ((1, "landscape"), (2, "landscape"), (1, "others")):
        one, same = (drawn(family, number, name=name) for _ in range(2))
        for done in (0.0, 0.5, 1.0):
            rates = [one.rate(size, done) for size in one.sizes]
            assert rates == [same.rate(size, done) for size in one.sizes]
            assert min(rates) > 100.0 and max(rates) < 120_000.0
        assert (one.noise, one.warm_up, one.changes) == (same.noise, same.warm_up, same.changes)
        seen.add((one.noise, one.warm_up, one.rate(2048, 0.1)))
    assert len(seen) == 3


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
