"""Where a search for the size of nano-batches goes next: from what it has measured, and no further
than it pays."""

import math
from collections.abc import Callable
from random import Random

import pytest

from tlora.training import next_size as module
from tlora.training.next_size import DRIFT, Parabola, next_size, parabola
from tlora.training.rates import Verdict
from tlora.training.size_search import ladder

SIZES = ladder(512, 16384)
WORTH = 0.01
Level = Callable[[int], float]


def peaked(peak: float, width: float) -> Level:
    return lambda size: -((math.log2(size / peak) / width) ** 2)


def after(
    verdict: Verdict, best: int, levels: dict[int, float], allowed: tuple[int, ...] = SIZES
) -> int | None:
    return next_size(verdict, best=best, levels=levels, allowed=allowed, worth=WORTH)


def searched(level: Level, start: int, sizes: tuple[int, ...] = SIZES) -> tuple[int, list[int]]:
    """The size that a search without noise ends at, and its trials."""
    best, trials, levels = start, [], {start: level(start)}
    trial = 2 * start
    while trial is not None:
        assert trial in sizes and trial not in levels
        trials.append(trial)
        levels[trial] = level(trial)
        gain = levels[trial] - levels[best]
        verdict = Verdict.ALIKE
        if abs(gain) > WORTH:
            verdict = Verdict.BETTER if gain > 0 else Verdict.WORSE
        best = trial if verdict is Verdict.BETTER else best
        trial = after(verdict, best, levels, sizes)
    return best, trials


# The parabola.


def check_parabola(through: Callable[..., Parabola]) -> None:
    """It has the levels of the three sizes, in any order, and falls back to the first one's level
    as far beyond the peak as that is before it."""
    draw = Random(1)
    for _ in range(50):
        peak, width = 2 ** draw.uniform(9, 14), draw.uniform(1.0, 4.0)
        level = peaked(peak, width)
        size, one, other = draw.sample(SIZES, 3)
        found = through({each: level(each) for each in (size, one, other)}, size, one, other)
        for each in SIZES:
            assert found.gain(each) == pytest.approx(level(each) - level(size), abs=1e-9)
        assert found.reach == pytest.approx(2 * math.log2(peak / size), abs=1e-9)


def test_a_parabola_through_three_sizes_is_the_one_they_lie_on() -> None:
    check_parabola(parabola)


@pytest.mark.parametrize("share", [1.01, 0.99])
def test_a_parabola_that_is_off_by_one_per_cent_is_refused(share: float) -> None:
    """In its slope, and in its curve."""

    def steeper(*arguments: object) -> Parabola:
        found = parabola(*arguments)  # type: ignore[arg-type]
        return Parabola(found.size, share * found.slope, found.curve)

    def rounder(*arguments: object) -> Parabola:
        found = parabola(*arguments)  # type: ignore[arg-type]
        return Parabola(found.size, found.slope, share * found.curve)

    for twin in (steeper, rounder):
        with pytest.raises(AssertionError):
            check_parabola(twin)


def test_what_does_not_curve_down_reaches_for_ever() -> None:
    """On a straight line as well, where nothing is divided by nothing."""
    for levels in ({512: 0.0, 1024: 0.1, 2048: 0.2}, {512: 0.0, 1024: 0.1, 2048: 0.3}):
        assert parabola(levels, 2048, 1024, 512).reach == math.inf


# Where to.


def test_it_doubles_while_that_pays_and_nothing_says_that_it_will_not() -> None:
    """From the third size on the earlier gains speak for the next one."""
    assert after(Verdict.BETTER, 4096, {2048: 0.0, 4096: 0.5}) == 8192
    assert after(Verdict.BETTER, 4096, {1024: -0.6, 2048: 0.0, 4096: 0.5}) == 8192


@pytest.mark.parametrize(("last", "expected"), [(0.26, 16384), (0.225, 12288), (0.17, 10240)])
def test_a_doubling_that_is_expected_to_lose_is_shortened(last: float, expected: int) -> None:
    """To where the size is expected to be as good as the best, and by one size at least."""
    levels = {2048: -0.5 - last, 4096: -last, 8192: 0.0}
    assert after(Verdict.BETTER, 8192, levels) == expected


def test_after_a_gain_that_may_be_a_devices_pace_it_doubles() -> None:
    """Just above it is believed."""
    for gain, expected in ((DRIFT, 16384), (DRIFT + 1e-9, 10240)):
        levels = {2048: -0.3 - gain, 4096: -gain, 8192: 0.0}
        assert after(Verdict.BETTER, 8192, levels) == expected


def test_after_a_look_that_found_a_better_size_it_goes_as_far_again() -> None:
    """Not to twice the size at once."""
    assert after(Verdict.BETTER, 5120, {4096: 0.0, 5120: 0.05}) == 6144


def test_it_halves_while_that_pays() -> None:
    """Also where the first doubling was worse; a halving that is worse leads one size up, unless
    there is something above."""
    assert after(Verdict.WORSE, 2048, {2048: 0.0, 4096: -0.2}) == 1024
    assert after(Verdict.BETTER, 1024, {2048: 0.0, 4096: -0.2, 1024: 0.1}) == 512
    assert after(Verdict.WORSE, 4096, {4096: 0.0, 2048: -0.2}) == 5120


def test_between_two_worse_ones_it_goes_to_the_peak_that_is_expected() -> None:
    """If that is worth a trial."""
    for peak, expected in ((5000, 5120), (3400, 3584), (4096, None), (4300, None)):
        level = peaked(peak, 2.0)
        levels = {size: level(size) for size in (2048, 4096, 8192)}
        assert after(Verdict.WORSE, 4096, levels) == expected


def test_the_nearest_sizes_tell_of_the_peak() -> None:
    """Sizes further off are another shape's."""
    level = peaked(5000, 2.0)
    levels = {512: -0.5, **{size: level(size) for size in (2048, 4096, 8192)}, 16384: -9.0}
    assert after(Verdict.WORSE, 4096, levels) == 5120


@pytest.mark.parametrize("verdict", [Verdict.BETTER, Verdict.WORSE])
def test_between_sizes_that_do_not_curve_it_stays(verdict: Verdict) -> None:
    """Where two neighbours are better than the best, by noise, it goes to none."""
    assert after(verdict, 4096, {2048: 0.5, 4096: 0.0, 8192: 0.5}) in (None, 2560, 7168)
    assert after(verdict, 4096, {3584: -0.1, 4096: 0.0, 5120: -0.1}) is None


def test_where_two_sizes_are_alike_it_ends_unless_a_third_tells_of_a_peak_between() -> None:
    assert after(Verdict.ALIKE, 2048, {2048: 0.0, 4096: 0.001}) is None
    assert after(Verdict.ALIKE, 2048, {1024: -0.01, 2048: 0.0, 4096: 0.001}) is None
    assert after(Verdict.ALIKE, 2048, {1024: -0.2, 2048: 0.0, 4096: 0.001}) == 3072


def test_at_the_ends_of_what_is_allowed_it_ends() -> None:
    """And goes to the other side, where nothing was measured there."""
    rising = {1024: -0.5, 2048: 0.0}
    assert after(Verdict.BETTER, 2048, rising, (512, 1024, 2048)) is None
    assert after(Verdict.BETTER, 1024, {2048: -0.5, 1024: 0.0}, (1024, 2048)) is None
    assert after(Verdict.WORSE, 1024, {2048: -0.5, 1024: 0.0}, (1024, 2048)) is None
    assert after(Verdict.BETTER, 4096, {2048: -0.5, 4096: 0.0}, (2048, 4096, 5120)) == 5120


def check_near_the_best() -> None:
    """Whatever the peak and its width, from a doubling away or further: within two per cent of the
    best size, after no more trials than there are doublings on the way and four."""
    draw = Random(2)
    for _ in range(300):
        peak, start = 2 ** draw.uniform(10, 13), draw.choice((512, 1024, 2048, 4096, 8192))
        if abs(math.log2(peak / start)) < 1.0:
            continue
        level = peaked(peak, draw.uniform(1.5, 3.0))
        best, trials = searched(level, start)
        assert max(map(level, SIZES)) - level(best) < 0.02
        assert len(trials) <= abs(math.log2(peak / start)) + 4


def test_a_search_ends_near_the_best_size_after_few_trials() -> None:
    check_near_the_best()


def test_a_search_that_does_not_look_between_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doublings and halvings alone are up to half a doubling off."""
    monkeypatch.setattr(module, "parabola", lambda levels, size, *_: Parabola(size, 0.0, -1.0))
    with pytest.raises(AssertionError):
        check_near_the_best()


def test_a_search_from_any_measures_ends_and_measures_nothing_twice() -> None:
    """Rates without rhyme or reason, and any sizes."""
    for seed in range(300):
        draw = Random(seed)
        levels = {size: draw.gauss(0.0, 0.3) for size in SIZES}
        cut = draw.choice([size for size in SIZES if size >= 2048])
        sizes = tuple(size for size in SIZES if size <= cut)
        start = draw.choice([size for size in sizes if 2 * size in sizes])
        best, trials = searched(levels.__getitem__, start, sizes)
        assert levels[best] >= levels[start] and len(trials) < len(sizes)
