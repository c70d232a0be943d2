"""Rules of early exit on recorded curves, with answers computed by hand."""

import math
from dataclasses import replace

import pytest

from tlora.core.sweep import EarlyExitSpec, ObjectiveSpec
from tlora.tuning.exits import (
    Verdict,
    diverging,
    overfitting,
    rule_of,
    underperforming,
)
from tlora.tuning.history import Evaluation, History, slope, smoothed

ALTO = EarlyExitSpec()
LESS = ObjectiveSpec()


def history(train: list[float], held_out: list[float], *, every: int = 5, total: int = 100):
    """Evaluated every so many steps."""
    found = History(total)
    for at, (loss, eval_loss) in enumerate(zip(train, held_out, strict=True), 1):
        metrics = {"loss": loss, "eval_loss": eval_loss}
        found = found.then(Evaluation(step=every * at, tokens=100 * at, metrics=metrics))
    return found


def test_smoothing_starts_at_the_first_value() -> None:
    """By hand: 4, 0.3 x 2 + 0.7 x 4 = 3.4, 0.3 x 1 + 0.7 x 3.4 = 2.68."""
    assert smoothed([4.0, 2.0, 1.0], 0.3) == pytest.approx([4.0, 3.4, 2.68], abs=1e-12)
    assert smoothed([4.0, 2.0, 1.0], 0.31) != pytest.approx([4.0, 3.4, 2.68], abs=1e-3)


def test_the_slope_of_two_values_is_their_difference() -> None:
    """And of more the least squares line: of 0, 1, 5 it is 2.5."""
    assert slope([2.0, 1.25]) == -0.75
    assert slope([0.0, 1.0, 5.0]) == pytest.approx(2.5)


# Training loss 2, 2, 3, 4: smoothed 2, 2, 2.3, 2.81. Held-out 2, 2.1, 2.3, 2.9.
RISING = history([2.0, 2.0, 3.0, 4.0], [2.0, 2.1, 2.3, 2.9])


def test_a_trial_diverges_when_both_losses_rise_twice_in_a_row() -> None:
    """Slopes of the smoothed training loss 0, 0.3, 0.51, of the held-out loss 0.1, 0.2, 0.6: the
    second and third time both are above the threshold; one evaluation earlier only once."""
    verdict = diverging("t", RISING, ALTO)
    assert verdict is not None and verdict.step == 20
    assert verdict.numbers["train_slope"] == pytest.approx(0.51)
    assert verdict.numbers["eval_slope"] == pytest.approx(0.6)
    assert diverging("t", History(100, RISING.evaluations[:3]), ALTO) is None
    assert "rose by 0.51" in str(verdict) and "diverging at step 20" in str(verdict)


def test_one_loss_that_falls_is_no_divergence() -> None:
    """Nor one that rises by less than the threshold."""
    assert diverging("t", history([2, 2, 3, 4], [2.0, 2.1, 2.3, 2.2]), ALTO) is None
    assert diverging("t", history([4, 3, 2, 1], [2.0, 2.1, 2.3, 2.9]), ALTO) is None
    flat = history([2.0, 2.01, 2.02, 2.03], [2.0, 2.0009, 2.0018, 2.0027])
    assert diverging("t", flat, ALTO) is None
    assert diverging("t", flat, EarlyExitSpec(diverging_slope=0.0008)) is not None


def test_divergence_listens_to_its_settings() -> None:
    """Three times in a row is asked of four evaluations, and the first slope is none."""
    assert diverging("t", RISING, EarlyExitSpec(diverging_patience=3)) is None
    # Over three evaluations: smoothed 2, 2.3, 2.81 rises by 0.405, and 2, 2, 2.3 by 0.15.
    wide = diverging("t", RISING, EarlyExitSpec(diverging_window=3))
    assert wide is not None and wide.numbers["train_slope"] == pytest.approx(0.405)


# Training loss 2, 1, 0.5, 0.2: smoothed 2, 1.7, 1.34, 0.998. Held-out 1.9, 1.5, 1.5, 1.6:
# gaps -0.05, -0.1176, 0.1194, 0.6032.
PARTING = history([2.0, 1.0, 0.5, 0.2], [1.9, 1.5, 1.5, 1.6])


def test_a_trial_overfits_when_the_gap_is_too_wide_twice_in_a_row() -> None:
    """The third and fourth evaluation are above 0.1; the best one, the second, is kept."""
    verdict = overfitting("t", PARTING, ALTO)
    assert verdict is not None and verdict.step == 20
    assert verdict.numbers["gap"] == pytest.approx(0.6032, abs=1e-4)
    assert (verdict.numbers["best_eval_loss"], verdict.numbers["best_step"]) == (1.5, 10)
    assert overfitting("t", History(100, PARTING.evaluations[:3]), ALTO) is None


def test_overfitting_listens_to_its_settings() -> None:
    """A gap of 0.12 lets the third evaluation pass; of 0.119 it does not."""
    assert overfitting("t", PARTING, EarlyExitSpec(overfitting_gap=0.12)) is None
    assert overfitting("t", PARTING, EarlyExitSpec(overfitting_gap=0.119)) is not None
    assert overfitting("t", PARTING, EarlyExitSpec(overfitting_patience=3)) is None


def test_a_trial_that_still_gets_better_may_be_spared() -> None:
    """The published rule gives up a held-out loss that falls beside a training loss that falls
    faster; with `overfitting_past_best` it goes on."""
    falling = history([2.0, 1.0, 0.5, 0.2], [1.9, 1.8, 1.7, 1.6])
    spared = EarlyExitSpec(overfitting_past_best=True)
    assert overfitting("t", falling, ALTO) is not None
    assert overfitting("t", falling, spared) is None
    assert overfitting("t", PARTING, spared) is not None


def pairs(train: list[float], held_out: list[float], accuracy: list[float]) -> History:
    """The history of a preference job."""
    found = history(train, held_out)
    told = zip(found.evaluations, accuracy, strict=True)
    return History(
        found.total_steps,
        tuple(replace(one, metrics={**one.metrics, "eval_accuracy": part}) for one, part in told),
    )


# DPO from log 2: a trial that learns. Training loss 0.69, 0.4, 0.2, 0.1, smoothed 0.69, 0.603,
# 0.482, 0.367; held-out 0.69, 0.6, 0.56, 0.55: gaps to it 0, -0.005, 0.16, 0.50.
LEARNING = pairs([0.69, 0.4, 0.2, 0.1], [0.69, 0.6, 0.56, 0.55], [0.5, 0.7, 0.75, 0.8])


def judged(found: History, spec: EarlyExitSpec = ALTO) -> Verdict | None:
    return rule_of(spec, LESS).judge("t", {"t": found})


def test_pairs_that_are_still_learnt_are_not_overfitted() -> None:
    """By the losses alone the trial would go at the fourth evaluation, of the gaps 0.16 and 0.50;
    its held-out loss has never been lower, and its accuracy never higher."""
    assert judged(LEARNING) is None
    by_losses = judged(LEARNING, EarlyExitSpec(watch_accuracy=False))
    assert by_losses is not None and by_losses.rule == "overfitting"
    assert by_losses.numbers["gap"] == pytest.approx(0.55 / 0.3674 - 1, abs=1e-3)


def test_pairs_are_overfitted_when_loss_has_left_its_lowest_and_accuracy_has_not_grown() -> None:
    """Lowest 0.5 at step 10; then 0.56 and 0.6, 12 and 20 % above it, with accuracies of 0.7 and
    0.65 against 0.7 there. With 0.71 once, or 0.549 (9.8 %) once, it goes on."""
    train = [0.6, 0.3, 0.1, 0.05]
    verdict = judged(pairs(train, [0.65, 0.5, 0.56, 0.6], [0.6, 0.7, 0.7, 0.65]))
    assert verdict is not None and (verdict.rule, verdict.step) == ("overfitting", 20)
    assert verdict.numbers["gap"] == pytest.approx(0.2)
    assert (verdict.numbers["best_step"], verdict.numbers["best_accuracy"]) == (10, 0.7)
    assert "accuracy is 65%, no better than 70% there" in str(verdict)
    assert judged(pairs(train, [0.65, 0.5, 0.56, 0.6], [0.6, 0.7, 0.71, 0.65])) is None
    assert judged(pairs(train, [0.65, 0.5, 0.549, 0.6], [0.6, 0.7, 0.7, 0.65])) is None
    assert judged(pairs(train[:3], [0.65, 0.5, 0.56], [0.6, 0.7, 0.7])) is None


def test_pairs_diverge_when_losses_rise_and_accuracy_does_not() -> None:
    """The losses of RISING, over whose last three evaluations accuracy goes from 0.6 to 0.55; if it
    goes to 0.65, the adapter learns, and is only surer of what it gets wrong."""
    train = [each.train_loss for each in RISING.evaluations]
    held_out = [each.eval_loss for each in RISING.evaluations]
    verdict = judged(pairs(train, held_out, [0.7, 0.6, 0.6, 0.55]))
    assert verdict is not None and verdict.rule == "diverging"
    assert (verdict.numbers["accuracy_before"], verdict.numbers["accuracy"]) == (0.6, 0.55)
    wide = EarlyExitSpec(overfitting_gap=9.0)
    assert judged(pairs(train, held_out, [0.7, 0.6, 0.6, 0.65]), wide) is None


def test_a_training_loss_of_zero_is_overfitted() -> None:
    """Nothing is divided by it."""
    verdict = overfitting("t", history([0.0, 0.0], [0.5, 0.5]), ALTO)
    assert verdict is not None and verdict.numbers["gap"] == math.inf


def warm(value: float) -> History:
    return history([value], [value])


def test_a_quarter_goes_on_after_the_warm_up() -> None:
    """Of eight the best two; of nine the best three, for it is rounded up; of equals the first."""
    held = {f"t{at}": warm(1.0 + at) for at in range(8)}
    gone = underperforming(held, 8, ALTO, LESS)
    assert [each.trial for each in gone] == [f"t{at}" for at in range(2, 8)]
    assert gone[0].numbers == {"value": 3.0, "cut": 2.0, "place": 3, "kept": 2, "trials": 8}
    assert len(underperforming(held | {"t8": warm(9.0)}, 9, ALTO, LESS)) == 6
    same = {name: warm(1.0) for name in "abcd"}
    assert [each.trial for each in underperforming(same, 4, ALTO, LESS)] == ["b", "c", "d"]


def test_those_that_went_before_count_among_all() -> None:
    """Of eight of which five have gone, two are kept of the three that are left."""
    held = {f"t{at}": warm(1.0 + at) for at in range(3)}
    assert [each.trial for each in underperforming(held, 8, ALTO, LESS)] == ["t2"]
    assert underperforming({"t0": warm(1.0)}, 8, ALTO, LESS) == []


def test_more_may_be_better() -> None:
    """With mode max the best are those with the most."""
    held = {f"t{at}": warm(1.0 + at) for at in range(4)}
    most = ObjectiveSpec(metric="eval_loss", mode="max")
    gone = underperforming(held, 4, ALTO, most)
    assert [each.trial for each in gone] == ["t2", "t1", "t0"]


def test_asha_keeps_one_in_four_of_those_that_have_come_as_far() -> None:
    """The first at a rung goes on. A later one must be the best, until eight have come: then the
    second best may go on too. Between rungs nobody is looked at."""
    rule = rule_of(EarlyExitSpec(method="asha"), LESS)
    histories = {"a": warm(2.0)}
    assert rule.judge("a", histories) is None
    histories["b"] = warm(3.0)
    verdict = rule.judge("b", histories)
    assert verdict is not None
    assert verdict.numbers == {"rung": 0.05, "value": 3.0, "cut": 2.0, "place": 2, "reached": 2}
    histories["c"] = warm(1.0)
    assert rule.judge("c", histories) is None
    histories |= {name: warm(4.0) for name in "defg"}
    histories["h"] = warm(1.5)
    assert rule.judge("h", histories) is None
    del histories["g"]
    assert rule.judge("h", histories) is not None
    histories["b"] = history([3, 3], [3, 3])
    assert rule.judge("b", histories) is None, "10 % is no rung: 5, 20 and 80 are"


def test_asha_looks_at_every_trial_at_its_own_rung() -> None:
    """At 20 %: a trial evaluated at 20 of 100 steps against one of 200 at 40; what came later in
    the other's history is not looked at."""
    rule = rule_of(EarlyExitSpec(method="asha"), LESS)
    other = history([5, 4, 0.1], [5, 4, 0.1], every=20, total=200)
    mine = history([5, 5, 5, 3], [5, 5, 5, 3.0])
    assert rule.judge("mine", {"other": other, "mine": mine}) is None
    better = history([5, 2.9, 0.1], [5, 2.9, 0.1], every=20, total=200)
    verdict = rule.judge("mine", {"other": better, "mine": mine})
    assert verdict is not None and verdict.numbers["cut"] == 2.9


def test_median_stopping_by_hand() -> None:
    """Others' means by 10 % are 2.5, 3.5, 4.5, 5.5: their median is 4; a best of 4.1 goes, one of
    3.9 stays, and with three others nobody goes."""
    rule = rule_of(EarlyExitSpec(method="median"), LESS)
    others = {
        name: history([value + 1, value, 0], [value + 1, value, 0.0])
        for name, value in zip("abcd", (2.0, 3.0, 4.0, 5.0), strict=True)
    }
    verdict = rule.judge("t", others | {"t": history([6, 4.1], [6, 4.1])})
    assert verdict is not None and verdict.numbers["median"] == 4.0
    assert rule.judge("t", others | {"t": history([3.9, 6], [3.9, 6.0])}) is None
    few = {name: others[name] for name in "abc"}
    assert rule.judge("t", few | {"t": history([6, 9], [6, 9.0])}) is None
    assert rule.judge("t", others | {"t": history([9], [9.0])}) is None, "within its grace"


def test_the_same_part_of_the_steps_is_the_same_however_it_is_rounded() -> None:
    """1 / 49 x 49 is a little less than 1, 0.14 x 50 and 3 x 0.1 are a little more than 7 and 0.3:
    others' evaluations at the very step count for the median, and no rung is passed over."""
    rule = rule_of(EarlyExitSpec(method="median", grace=0.0), LESS)
    others = {name: history([2], [2.0], every=1, total=49) for name in "abcd"}
    verdict = rule.judge("t", others | {"t": history([3], [3.0], every=1, total=49)})
    assert verdict is not None and verdict.numbers["others"] == 4
    for first, reduction, every, total in ((0.07, 2, 7, 50), (0.1, 3, 3, 10)):
        rule = rule_of(EarlyExitSpec(method="asha", first_rung=first, reduction=reduction), LESS)
        both = {
            "best": history([1], [1.0], every=every, total=total),
            "mine": history([2], [2.0], every=every, total=total),
        }
        verdict = rule.judge("mine", both)
        assert verdict is not None and math.isclose(verdict.numbers["rung"], first * reduction)


def test_none_gives_nobody_up() -> None:
    """Whatever the curves."""
    rule = rule_of(EarlyExitSpec(method="none"), LESS)
    assert rule.warmup is None and rule.judge("t", {"t": RISING}) is None


def test_a_verdict_can_be_read_by_a_person() -> None:
    """Rule, step and numbers are in the sentence."""
    gone = underperforming({"a": warm(1.0), "b": warm(2.0)}, 2, EarlyExitSpec(keep=0.5), LESS)[0]
    assert isinstance(gone, Verdict)
    assert str(gone) == (
        "underperforming at step 5: eval_loss 2.0000 after the warm-up is place 2 of 2; the best 1 "
        "go on, the last of them with 1.0000"
    )
