"""Interleaving and statistics, on hand-made numbers."""

import pytest

from tlora.runtime.benchmark.rounds import Rounds, Run, run_rounds, spread_pct
from tlora.runtime.benchmark.workload import Done

WORK = Done(tokens=100, sequences=4, steps=2)


class Clockwork:
    """Arms that take what they are told to, and the order in which they were called."""

    def __init__(self, **seconds: list[float]) -> None:
        self.left = {name: list(values) for name, values in seconds.items()}
        self.calls: list[str] = []

    def arms(self):
        return {name: lambda name=name: self.run(name) for name in self.left}

    def run(self, name: str) -> Run:
        self.calls.append(name)
        return Run(self.left[name].pop(0), WORK)


def measured(clockwork: Clockwork, repeats: int) -> Rounds:
    arms = clockwork.arms()
    return run_rounds(
        arms, repeats=repeats, expected=dict.fromkeys(arms, WORK), say=lambda text: None
    )


def test_every_round_runs_all_arms_and_the_first_again() -> None:
    """A, B, C, A: the first arm's time is the mean of its two."""
    clockwork = Clockwork(a=[1.0, 3.0, 2.0, 2.0], b=[5.0, 7.0], c=[4.0, 4.0])
    rounds = measured(clockwork, 2)
    assert clockwork.calls == [*"abca", *"abca"]
    assert rounds.seconds == {"a": [2.0, 2.0], "b": [5.0, 7.0], "c": [4.0, 4.0]}
    assert rounds.drifts_pct == [pytest.approx(200.0), 0.0]
    assert rounds.drift_pct == pytest.approx(100.0)


def test_medians_and_spreads_are_exact() -> None:
    """One slow round moves the spread, not the median."""
    rounds = Rounds({"a": [2.0, 4.0, 2.0, 2.0, 3.0], "b": [10.0] * 5}, [0.0] * 5)
    assert rounds.median("a") == 2.0 and rounds.median("b") == 10.0
    assert rounds.spread_pct("a") == 100.0 and rounds.spread_pct("b") == 0.0
    assert rounds.noise_pct == 100.0
    assert spread_pct([9.0, 10.0, 12.0]) == pytest.approx(30.0)


def test_a_single_round_shows_no_noise() -> None:
    """None, not zero."""
    assert Rounds({"a": [2.0]}, [0.0]).noise_pct is None


@pytest.mark.parametrize("other", [Done(99, 4, 2), Done(100, 3, 2), Done(100, 4, 1)])
def test_an_arm_that_does_other_work_is_refused(other: Done) -> None:
    """One token, sequence or step off."""
    with pytest.raises(AssertionError, match="no comparison"):
        run_rounds(
            {"a": lambda: Run(1.0, other)}, repeats=1, expected={"a": WORK}, say=lambda text: None
        )
