"""The nano-batch controller on landscapes: it finds the best size, stays there, and costs little.

The bounds come from ten seeds each (`python benchmarks/controller_landscapes.py`), with some room.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import pairwise
from random import Random

import pytest

from tlora.runtime.benchmark.drawn_landscapes import FAMILIES, drawn
from tlora.runtime.benchmark.landscapes import (
    RECORDED,
    Drive,
    Landscape,
    PublishedRule,
    Rule,
    drive,
    landscapes,
    launch_bound,
    moved,
    ours,
    peaked,
    recorded,
    settings_for,
)
from tlora.training import controller as controller_module
from tlora.training import next_size as next_size_module
from tlora.training.compose import bucket_of
from tlora.training.controller import Controller, replay
from tlora.training.rates import Rates
from tlora.training.size_search import Action, ControllerSettings, Decision, Measure, ladder

SEEDS = range(4)
FLAT = launch_bound(1, 18_000.0)


def runs(landscape: Landscape) -> list[Drive]:
    return [drive(ours(landscape), landscape, seed=seed) for seed in SEEDS]


def settings(**changes: object) -> ControllerSettings:
    few = {"sizes": (64, 128, 256, 512), "start": 128, "idle": 256, "limit": 512, "warm_ups": 0}
    return ControllerSettings(**few | changes)  # type: ignore[arg-type]


def nano_batch(budget: int, tokens_per_s: float, **fields: object) -> Measure:
    return Measure(budget, budget, budget, budget / tokens_per_s, **fields)  # type: ignore[arg-type]


def fed(
    controller: Controller, count: int, tokens_per_s: float, **fields: object
) -> list[Decision]:
    """So many nano-batches of whatever size it asks for, all equally fast."""
    return [
        decision
        for _ in range(count)
        for decision in controller.observe(nano_batch(controller.budget, tokens_per_s, **fields))
    ]


# Landscapes.


@pytest.mark.parametrize("landscape", landscapes(), ids=lambda each: each.name)
def test_it_finds_the_best_size_and_costs_a_few_per_cent(landscape: Landscape) -> None:
    """Over the work of 300 nano-batches, everything counted: slow sizes on the way, first
    nano-batches that compile, looks beside the plateau."""
    found = runs(landscape)
    assert statistics.mean(run.regret for run in found) < 0.05
    assert statistics.mean(run.loss_at_the_end() for run in found) < 0.03
    assert max(run.out_of_memory for run in found) <= (2 if "not known" in landscape.name else 0)


def check_steady(found: list[Drive], most: int = 9) -> None:
    assert max(run.late_changes() for run in found) <= most


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03, 0.1])
def test_it_stays_on_a_plateau(noise: float) -> None:
    """In the second half of a run the size changes a few times: there and back, for a look."""
    check_steady(runs(Landscape(name=f"flat {noise}", rate=FLAT, noise=noise)))


@pytest.mark.parametrize("name", RECORDED)
def test_it_stays_at_the_knee_of_recorded_landscapes(name: str) -> None:
    """Launch-bound at first and flat from there, as on one H200."""
    check_steady(runs(recorded(name)))


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.1])
def test_the_published_rule_saw_tooths_on_a_plateau(noise: float) -> None:
    """The same check refuses it: whatever it tries next is as fast, so it never rests."""
    landscape = Landscape(name=f"flat {noise}", rate=FLAT, noise=noise)
    found = [drive(PublishedRule(landscape), landscape, seed=seed) for seed in SEEDS]
    assert min(run.late_changes() for run in found) > 40
    with pytest.raises(AssertionError):
        check_steady(found)


@pytest.mark.parametrize("name", ["1B with adapters, eager", "8B with adapters, eager"])
def test_the_published_rule_costs_more_on_recorded_landscapes(name: str) -> None:
    """With and without a threshold."""
    landscape = recorded(name)
    mine = statistics.mean(run.regret for run in runs(landscape))
    for tau in (0.0, 0.02):
        theirs = drive(PublishedRule(landscape, tau=tau), landscape).regret
        assert theirs > 3 * mine


MOVING = moved(peaked(8192, 2.5), peaked(2048, 2.5), 0.5)


def check_cheap_when_the_peak_moves() -> None:
    """Finding it twice, and noticing."""
    found = runs(Landscape(name="the peak moves", rate=MOVING, noise=0.01))
    assert statistics.mean(run.regret for run in found) < 0.05


def test_a_peak_that_moves_costs_less_than_five_per_cent() -> None:
    check_cheap_when_the_peak_moves()


def always_a_doubling(*_: object) -> float:
    return 1.0


def test_twins_that_take_long_steps_only_or_notice_late_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A doubling too far, and twice as many nano-batches until it is seen."""
    with monkeypatch.context() as patch:
        patch.setattr(next_size_module, "_doublings", always_a_doubling)
        with pytest.raises(AssertionError):
            check_cheap_when_the_peak_moves()
    monkeypatch.setattr(controller_module, "RECENT", 15)
    with pytest.raises(AssertionError):
        check_cheap_when_the_peak_moves()


@contextmanager
def without_margin() -> Iterator[None]:
    """Every difference counts as real."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rates, "margin", lambda *_, **__: 0.0)
        yield


@contextmanager
def deaf() -> Iterator[None]:
    """No difference ever counts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rates, "margin", lambda *_, **__: 10.0)
        yield


def test_a_twin_without_a_noise_margin_is_refused() -> None:
    """The check for a steady size sees it."""
    flat = Landscape(name="flat", rate=FLAT, noise=0.03)
    with without_margin(), pytest.raises(AssertionError):
        check_steady(runs(flat))


def test_a_twin_that_takes_everything_for_noise_is_refused() -> None:
    """It does not see that the best size has moved, and the loss at the end shows it."""
    shifting = Landscape(
        name="shift", rate=moved(peaked(8192, 2.5), peaked(2048, 2.5), 0.5), noise=0.01
    )
    assert max(run.loss_at_the_end() for run in runs(shifting)) < 0.03
    with deaf():
        assert min(run.loss_at_the_end() for run in runs(shifting)) > 0.1


def drawn_regret(family: str, rule: Callable[[Landscape], Rule] = ours) -> float:
    found = [drive(rule(each), each) for each in (drawn(family, i) for i in range(15))]
    return statistics.median(run.regret for run in found)


@pytest.mark.parametrize("family", FAMILIES)
def test_where_everything_is_drawn_it_costs_a_few_per_cent_as_well(family: str) -> None:
    """Shapes, noise, stumbles, warm-ups of one and a half to six times as long, memory that ends:
    half of the landscapes below eight per cent, and far below the published rule."""
    mine = drawn_regret(family)
    assert mine < 0.08 and mine < drawn_regret(family, PublishedRule)


def test_a_long_plateau_is_looked_beside_ever_more_rarely() -> None:
    """Ten times as long a run has a few looks more, and they cost next to nothing."""
    flat = recorded("8B frozen, eager")
    short, long = (drive(ours(flat), flat, nano_batches=n) for n in (300, 3000))
    assert long.changes <= short.changes + 10
    assert long.regret < 0.01


# A change at the best size.


def noticed_after(rates: list[float]) -> int | None:
    """Of nano-batches at a best size that had 1,000 tokens/s; none that leads to a search."""
    controller = Controller(settings(probe_after=10_000))
    draw = Random(3)
    while not controller.is_settled or controller.rates.count(128) < 20:
        fed(controller, 1, 1000.0 * math.exp(draw.gauss(0.0, 0.01)))
    for count, rate in enumerate(rates, 1):
        if controller.observe(nano_batch(128, rate)):
            return count
    return None


def check_notices_in_time() -> None:
    """The fourth slow nano-batch tells, three stumbles do not."""
    assert noticed_after([500.0] * 10) == 4
    assert noticed_after([300.0] * 3 + [1000.0] * 20) is None
    assert noticed_after([300.0, 1000.0] * 3 + [1000.0] * 20) is None


def test_a_change_is_told_from_stumbles_by_the_fourth_nano_batch() -> None:
    check_notices_in_time()


@pytest.mark.parametrize("recent", [5, 9])
def test_twins_that_are_hasty_or_slow_to_notice_are_refused(
    recent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_module, "RECENT", recent)
    with pytest.raises(AssertionError):
        check_notices_in_time()


def test_after_a_change_the_best_size_has_the_level_from_after_it() -> None:
    """An even number of measures, half of them from before, would have one in between, and a
    smaller size that is better would lose against it."""
    controller = Controller(settings(probe_after=10_000))
    fed(controller, 40, 1000.0)
    assert [each.action for each in fed(controller, 4, 500.0)] == [Action.HALVE]
    assert controller.rates.tokens_per_s(128) == pytest.approx(500.0)


def test_a_change_soon_after_the_search_is_noticed() -> None:
    """Ten measures are enough, with as many of them before it as judge a size."""
    controller = Controller(settings(sizes=(64, 128), start=128, idle=128, limit=128))
    fed(controller, 3, 1000.0)
    fed(controller, 2, 700.0)
    fed(controller, 3, 1000.0)
    assert controller.is_settled and controller.rates.count(128) == 6
    assert [each.action for each in fed(controller, 4, 500.0)] == [Action.HALVE]


@pytest.mark.parametrize(("start", "factor", "to"), [(64, 0.5, 128), (512, 1.5, 256)])
def test_at_the_end_of_the_sizes_a_change_is_followed_to_the_other_side(
    start: int, factor: float, to: int
) -> None:
    """The smallest size cannot be halved when it gets slower, and the peak may be above."""
    controller = Controller(settings(start=start, idle=512, probe_after=10_000))
    while not controller.is_settled:
        fed(controller, 1, 1000.0 if controller.budget == start else 500.0)
    fed(controller, 20, 1000.0)
    fed(controller, 4, 1000.0 * factor)
    assert controller.budget == to


# Measures.


def check_a_stumble_refuses_no_size() -> None:
    """The first of a trial's measures took three times as long."""
    controller = Controller(settings())
    fed(controller, 3, 1000.0)
    assert controller.budget == 256
    fed(controller, 1, 1500.0 / 3)
    fed(controller, 2, 1500.0)
    assert controller.best == 256


def test_one_stumble_does_not_refuse_a_size() -> None:
    """A second measure as bad would."""
    check_a_stumble_refuses_no_size()
    controller = Controller(settings())
    fed(controller, 3, 1000.0)
    assert [each.action for each in fed(controller, 2, 500.0)] == [Action.HALVE]


def test_a_twin_that_judges_two_measures_by_their_middle_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Rates, "highest", Rates.level)
    with pytest.raises(AssertionError):
        check_a_stumble_refuses_no_size()


def test_every_look_is_twice_as_long_after_the_last_as_that_was_after_its_own() -> None:
    """However long the first one had to wait until it was paid for."""
    for share in (0.02, 0.005):
        controller = Controller(settings(warm_ups=1, probe_share=share))
        fed(controller, 8, 1000.0)
        looks, settled = list[int](), 0
        for number in range(5000):
            for decision in fed(controller, 1, 1000.0):
                if decision.action is Action.PROBE:
                    looks.append(number - settled)
                else:
                    settled = number
        assert len(looks) >= 3
        assert all(later >= 2 * before for before, later in pairwise(looks))


def test_it_climbs_by_doubling_to_the_knee() -> None:
    """Noise aside, three measures each, and three more of the best where another is like it; then
    it is there."""
    controller = Controller(settings(warm_ups=1))
    rates = {64: 10.0, 128: 20.0, 256: 40.0, 512: 40.1}
    budgets, actions = [], []
    for _ in range(16):
        budgets.append(controller.budget)
        measure = nano_batch(controller.budget, rates[controller.budget])
        actions += [decision.action for decision in controller.observe(measure)]
    assert budgets == [128] * 4 + [256] * 4 + [512] * 4 + [256] * 4
    assert actions == [Action.DOUBLE, Action.DOUBLE, Action.AGAIN, Action.SETTLE]
    assert controller.is_settled


@pytest.mark.parametrize("pace_of", [0.998, 1.0, 1.002])
def test_a_device_that_changes_its_pace_does_not_decide_which_size_is_better(
    pace_of: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a fifth of a per cent at every nano-batch, while the next size is 1.5 % faster, or slower.
    The twin that measures the best on one side alone misses the faster one."""

    def found(gain: float) -> int:
        controller = Controller(settings(sizes=(128, 256), idle=256, limit=256))
        for i in range(40):
            rate = 1000.0 * pace_of**i * (gain if controller.budget == 256 else 1.0)
            controller.observe(nano_batch(controller.budget, rate))
            if controller.is_settled:
                return controller.best
        raise AssertionError("it never settles")

    assert (found(1.015), found(0.985)) == (256, 128)
    monkeypatch.setattr(controller_module, "DRIFT", 0.0)
    assert (found(1.015), found(0.985)) == (128 if pace_of < 1 else 256, 128)


def test_the_best_is_measured_again_as_often_as_it_is_compared_and_no_longer_than_work_lasts() -> (
    None
):
    """Where nothing fills it any more, what is known decides."""
    controller = Controller(settings(patience=4))
    fed(controller, 3, 1000.0)
    assert [each.action for each in fed(controller, 3, 1002.0)] == [Action.AGAIN]
    assert controller.budget == 128 and controller.rates.count(128) == 3
    assert not fed(controller, 3, 1000.0, full=False)
    assert [each.action for each in fed(controller, 1, 1000.0, full=False)] == [Action.SETTLE]


def test_of_the_best_the_latest_measures_count_and_no_more_than_of_the_other() -> None:
    """Many from before would outvote those that come after."""
    controller = Controller(settings())
    fed(controller, 40, 1000.0)
    assert controller.is_settled
    decisions = fed(controller, 4, 1100.0)
    assert [each.action for each in decisions] == [Action.DOUBLE] and controller.rates.count(
        128
    ) > 3
    assert [each.action for each in fed(controller, 3, 1100.0)] == [Action.AGAIN]
    assert controller.rates.count(128) == 3
    assert controller.rates.tokens_per_s(128) == pytest.approx(1100.0)


def test_trimmed_rates_are_the_latest_ones_of_one_size() -> None:
    rates = Rates()
    for size in (64, 128):
        for tokens_per_s in (1.0, 2.0, 3.0):
            rates.add(size, size * tokens_per_s)
    rates.trim(64, 1)
    assert rates.tokens_per_s(64) == pytest.approx(192.0) and rates.count(64) == 1
    assert rates.count(128) == 3


def test_a_look_beside_a_plateau_goes_back_at_once() -> None:
    """It is paid for by the time it may cost."""
    actions = [each.action for each in fed(Controller(settings()), 110, 1000.0)]
    assert actions == [Action.DOUBLE, Action.AGAIN, Action.SETTLE, Action.PROBE, Action.BACK]


def test_what_is_far_better_or_far_worse_is_not_measured_again() -> None:
    for factor, action in ((1.2, Action.DOUBLE), (0.8, Action.HALVE)):
        controller = Controller(settings())
        fed(controller, 3, 1000.0)
        assert [each.action for each in fed(controller, 3, 1000.0 * factor)] == [action]


@pytest.mark.parametrize("warm_ups", [0, 1, 3])
def test_warm_ups_of_a_size_do_not_count(warm_ups: int) -> None:
    """However slow: a nano-batch of new rows may have been compiled for."""
    controller = Controller(settings(warm_ups=warm_ups))
    for size in (128, 256):
        fed(controller, warm_ups, 1e-3)
        assert controller.rates.count(size) == 0 and controller.budget == size
        fed(controller, 3, 10.0 * size)
    assert controller.best == 256


def test_what_was_cut_short_or_not_trained_says_nothing() -> None:
    """Nor does a sequence that is longer than the budget."""
    controller = Controller(settings())
    fed(controller, 5, 1.0, full=False)
    fed(controller, 5, 1.0, train=False)
    controller.observe(Measure(128, 384, 300, 100.0))
    assert controller.rates.count(128) == 0
    fed(controller, 3, 1000.0)
    assert controller.rates.tokens_per_s(128) == pytest.approx(1000.0)


def test_a_size_that_no_work_fills_is_given_up() -> None:
    """Until the group changes."""
    controller = Controller(settings())
    fed(controller, 3, 1000.0)
    assert controller.budget == 256
    decisions = fed(controller, controller.settings.patience, 1000.0, full=False)
    assert controller.budget == 128 and "not the work" in decisions[-1].why
    fed(controller, 400, 1000.0)
    assert controller.best == 128 and not controller.rates.count(256)
    fed(controller, 3, 1500.0, group=1)
    assert controller.budget == 256


def test_without_any_work_to_fill_it_the_size_is_the_usual_one() -> None:
    """Evaluations have work, and small nano-batches would hold them up."""
    controller = Controller(settings())
    fed(controller, 100, 1000.0, full=False)
    assert controller.budget == controller.settings.idle


# Memory.


@pytest.mark.parametrize("limit", [512, 640, 5120, 9000])
def test_it_never_exceeds_the_limit(limit: int) -> None:
    """Though larger would be faster, on the way or for a look."""
    sizes = ladder(512, 16384)
    controller = Controller(ControllerSettings(sizes=sizes, start=512, idle=512, limit=limit))
    budgets = set()
    for _ in range(1000):
        budgets.add(controller.budget)
        controller.observe(nano_batch(controller.budget, float(controller.budget)))
    assert max(budgets) == max(size for size in sizes if size <= limit)


def test_an_out_of_memory_lowers_the_limit_for_good() -> None:
    """A size that did not fit is not tried again, not after a change of group either."""
    landscape = Landscape(
        name="small memory", rate=launch_bound(9000), limit=5120, changes=(0.3, 0.6)
    )
    run = drive(ours(landscape), landscape, nano_batches=1000)
    failed = [measure.rows for measure in run.measures if measure.out_of_memory]
    assert 1 <= len(failed) <= 2 and len(set(failed)) == len(failed)
    assert run.budgets[-1] == 5120
    limits = [decision for decision in run.decisions if decision.action is Action.LIMIT]
    assert len(limits) == len(failed)


def test_an_out_of_memory_at_the_best_size_leads_to_a_smaller_one() -> None:
    """To one that has run if there is one; in the end below all sizes that were meant."""
    controller = Controller(settings(start=512, idle=512))
    for expected in (256, 128, 64, 32):
        rows = controller.budget
        (decision,) = controller.observe(Measure(rows, rows, 0, 0.0, out_of_memory=True))
        assert (decision.action, controller.budget) == (Action.LIMIT, expected)
    fed(controller, 100, 1000.0)
    assert controller.budget == 32 and controller.buckets(32) == (32,)


# Groups.


def test_a_change_of_group_that_moves_nothing_costs_nothing() -> None:
    """The best is measured again, which any nano-batch does, and no other size is tried."""
    landscape = replace(recorded("8B with adapters, eager"), changes=())
    controller = ours(landscape)
    drive(controller, landscape, nano_batches=60)
    best = controller.best
    assert controller.is_settled
    rate = landscape.rate(best, 0.0)
    decisions = [each for group in range(1, 9) for each in fed(controller, 5, rate, group=group)]
    assert {decision.action for decision in decisions} == {Action.HOLD}
    assert {decision.budget for decision in decisions} == {best}


def test_a_change_of_group_starts_from_the_best_known() -> None:
    """If the best no longer holds the search goes on from there, not from the start."""
    landscape = Landscape(
        name="groups",
        rate=moved(launch_bound(2000), launch_bound(9000), 0.5),
        changes=(0.5,),
        noise=0.01,
    )
    run = drive(ours(landscape), landscape)
    after = [b for b, done in zip(run.budgets, run.done, strict=True) if done >= 0.5]
    assert min(after) >= 4096 and after[-1] == 16384


def test_jobs_that_come_and_go_do_not_keep_it_from_the_knee() -> None:
    """A job that ends with every few nano-batches of the run: the search goes on over it."""
    often = tuple(at / 100 for at in range(1, 100))
    landscape = replace(recorded("1B with adapters, eager"), changes=often)
    for run in runs(landscape):
        assert run.regret < 0.05 and run.loss_at_the_end() < 0.03


def test_a_change_of_group_during_a_search_is_looked_at_after_it() -> None:
    """What was measured before the change may not hold: the best is measured again."""
    controller = Controller(settings())
    fed(controller, 3, 1000.0)
    assert controller.budget == 256
    decisions = fed(controller, 6, 1000.0, group=1)
    assert [each.action for each in decisions] == [Action.AGAIN, Action.SETTLE]
    assert not controller.is_settled
    assert [each.action for each in fed(controller, 3, 1000.0, group=1)] == [Action.HOLD]
    assert controller.is_settled and controller.budget == 128


# The trace.


def test_the_decisions_can_be_replayed_from_the_measures() -> None:
    """Also after they were written down; a measure that is missing shows."""
    landscape = replace(
        next(each for each in landscapes() if "not known" in each.name), changes=(0.3, 0.7)
    )
    run = drive(ours(landscape), landscape)
    lines = [json.dumps(asdict(measure)) for measure in run.measures]
    measures = [Measure(**json.loads(line)) for line in lines]
    assert run.decisions and replay(settings_for(landscape), measures) == run.decisions
    assert replay(settings_for(landscape), measures[1:]) != run.decisions


def test_every_change_of_size_is_in_the_trace() -> None:
    """With what was measured, and why."""
    for landscape in landscapes():
        run = drive(ours(landscape), landscape)
        budgets = run.budgets[:1]
        at = {decision.nano_batch: decision for decision in run.decisions}
        for number in range(1, len(run.budgets)):
            budgets.append(at[number].budget if number in at else budgets[-1])
        assert budgets == run.budgets
        assert all(decision.why for decision in run.decisions)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_it_is_told_breaks_it(seed: int) -> None:
    """Any mix of what may happen, told late at times: it stays within its sizes and what memory has
    shown, and can be replayed."""
    draw = Random(seed)
    sizes = ladder(64, 2048)
    tuned = ControllerSettings(sizes=sizes, start=256, idle=512, limit=1500, patience=4)
    controller, told, decided, group = Controller(tuned), [], [], 0
    budgets, failed = [controller.budget] * 2, 10_000
    for _ in range(600):
        group += draw.random() < 0.05
        budget = budgets[-draw.randint(1, 2)]
        rows = draw.choice([budget, budget, budget, max(1, budget // 2), 3 * budget])
        full = rows <= budget and draw.random() < 0.8
        lost = 64 < rows <= budget and draw.random() < 0.01
        seconds = rows / 1000.0 * draw.lognormvariate(0.0, 0.5)
        measure = Measure(budget, rows, rows, seconds, draw.random() < 0.9, full, group, lost)
        told.append(measure)
        decided += controller.observe(measure)
        failed = min(failed, rows) if lost else failed
        budgets.append(controller.budget)
        assert controller.budget <= 1500 and controller.budget < failed
    assert replay(tuned, told) == decided


# Sizes.


def test_sizes_rise_by_a_quarter_at_most() -> None:
    """From any of them a doubling is one, too."""
    sizes = ladder(512, 16384)
    assert sizes[:6] == (512, 640, 768, 896, 1024, 1280) and sizes[-1] == 16384
    assert all(after <= 1.25 * size for size, after in pairwise(sizes))
    assert all(2 * size in sizes for size in sizes if 2 * size <= 16384)


def test_budgets_share_their_buckets() -> None:
    """A nano-batch of few tokens has rows that were compiled for under another budget."""
    controller = Controller(settings_for(recorded("8B frozen, eager")))
    seen = {
        bucket_of(tokens, budget, controller.buckets(budget))
        for budget in controller.settings.sizes
        for tokens in range(1, budget, 97)
    }
    assert seen <= set(controller.settings.sizes)


@pytest.mark.parametrize(
    "wrong",
    [{"sizes": (128, 64)}, {"sizes": (0, 128, 256)}, {"start": 100}, {"idle": 64}, {"limit": 64}],
)
def test_impossible_settings_are_refused(wrong: dict[str, object]) -> None:
    """At once, not in the middle of a run."""
    with pytest.raises(ValueError):
        settings(**wrong)
