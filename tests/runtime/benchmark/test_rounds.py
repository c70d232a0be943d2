"""Interleaving and statistics, on hand-made numbers."""

import pytest
import torch

from tlora.runtime.benchmark.rounds import LeftOut, Rounds, Run, run_rounds, spread_pct
from tlora.runtime.benchmark.workload import Done

WORK = Done(tokens=100, sequences=4, steps=2)


class Clockwork:
    """Arms that take what they are told to, on a clock of their own, and the order in which they
    were called; a capital letter is a warm-up, which takes a second."""

    def __init__(self, **seconds: list[float | Exception]) -> None:
        self.left = {name: list(values) for name, values in seconds.items()}
        self.calls = ""
        self.time = 0.0

    def arms(self):
        return {name: lambda name=name: self.prepare(name) for name in self.left}

    def prepare(self, name: str):
        self.calls += name.upper()
        self.time += 1.0
        first = self.left[name][0]
        if isinstance(first, LeftOut):
            raise first
        return lambda: self.run(name)

    def run(self, name: str) -> Run:
        self.calls += name
        seconds = self.left[name].pop(0)
        if isinstance(seconds, Exception):
            raise seconds
        self.time += seconds
        return Run(seconds, WORK)


def measured(clockwork: Clockwork, repeats: int, until: float = float("inf")) -> Rounds:
    arms = clockwork.arms()
    return run_rounds(
        arms,
        repeats=repeats,
        expected=dict.fromkeys(arms, WORK),
        say=lambda text: None,
        until=until,
        clock=lambda: clockwork.time,
    )


def test_every_round_runs_all_arms_and_the_first_again() -> None:
    """A, B, C, A: the first arm's time is the mean of its two. Each is warmed up right before its
    first run."""
    clockwork = Clockwork(a=[1.0, 3.0, 2.0, 2.0], b=[5.0, 7.0], c=[4.0, 4.0])
    rounds = measured(clockwork, 2)
    assert clockwork.calls == "AaBbCca" + "abca"
    assert rounds.seconds == {"a": [2.0, 2.0], "b": [5.0, 7.0], "c": [4.0, 4.0]}
    assert rounds.drifts_pct == [pytest.approx(200.0), 0.0]
    assert rounds.drift_pct == pytest.approx(100.0)
    assert rounds.complete and rounds.notes == [] and rounds.repeats == 2


@pytest.mark.parametrize(
    ("until", "calls", "runs", "drifts"),
    [
        # The first arm has a figure whatever the time.
        (0.5, "Aa", {"a": 1}, 0),
        # The round is closed, so that b has a before and an after.
        (9.0, "AaBba", {"a": 1, "b": 1}, 1),
        # c is warm too late.
        (9.5, "AaBbCa", {"a": 1, "b": 1}, 1),
        # Round 1 ends after 15 s. In round 2 b would end after 21 s, and a after 22 s.
        (22.0, "AaBbCca" + "a", {"a": 2, "b": 1, "c": 1}, 1),
        (22.5, "AaBbCca" + "aba", {"a": 2, "b": 2, "c": 1}, 2),
        (99.0, "AaBbCca" + "abca", {"a": 2, "b": 2, "c": 2}, 2),
    ],
)
def test_rounds_end_when_the_time_is_over(until, calls, runs, drifts) -> None:
    """Nothing is begun that would end too late; what was measured stays, with its number of runs,
    and the rest is named."""
    clockwork = Clockwork(a=[1.0] * 4, b=[5.0] * 2, c=[5.0] * 2)
    rounds = measured(clockwork, 2, until)
    assert clockwork.calls == calls
    assert {name: len(samples) for name, samples in rounds.seconds.items()} == runs
    assert rounds.repeats == min(runs.values()) and rounds.drifts_pct == [0.0] * drifts
    assert rounds.complete == (until == 99.0)
    assert rounds.notes == [
        *(["time was over: 1 of 2 rounds"] if min(runs.values()) == 1 else []),
        *(f"{name}: left out, time was over" for name in "abc" if name not in runs),
    ]
    assert (rounds.noise_pct is None) == (max(runs.values()) == 1)


def test_an_arm_that_cannot_run_is_left_out_with_its_reason() -> None:
    """Or without a word; the others go on, and nothing is missing of what there was to do."""
    clockwork = Clockwork(a=[1.0] * 4, b=[LeftOut("no compiler")], c=[LeftOut()], d=[2.0] * 2)
    rounds = measured(clockwork, 2)
    assert clockwork.calls == "AaBCDda" + "ada"
    assert rounds.notes == ["b: no compiler"] and rounds.complete
    assert set(rounds.seconds) == {"a", "d"}


def test_an_arm_that_runs_out_of_memory_keeps_what_it_has() -> None:
    """It is not tried again, and the figures are not complete. Of the first arm it is an error,
    and so is whatever else goes wrong."""
    full = torch.OutOfMemoryError("CUDA out of memory")
    clockwork = Clockwork(a=[1.0] * 6, b=[2.0, full], c=[full])
    rounds = measured(clockwork, 3)
    assert clockwork.calls == "AaBbCca" + "aba" + "aa"
    assert rounds.seconds == {"a": [1.0] * 3, "b": [2.0]}
    assert rounds.notes == ["c: out of memory in round 1", "b: out of memory in round 2"]
    assert not rounds.complete
    with pytest.raises(torch.OutOfMemoryError):
        measured(Clockwork(a=[full], b=[1.0]), 1)
    with pytest.raises(ZeroDivisionError):
        measured(Clockwork(a=[1.0] * 2, b=[ZeroDivisionError()]), 1)


def test_later_rounds_bring_what_ran_out_of_memory() -> None:
    """Times of arms that had the device to themselves count, and then nothing is missing."""
    first = Rounds({"a": [1.0]}, [3.0], ["b: out of memory in round 1"], True, ["b", "c"])
    assert not first.complete
    both = first.followed_by(Rounds({"b": [2.0], "c": [4.0]}, [9.0]))
    assert both.complete and both.seconds == {"a": [1.0], "b": [2.0], "c": [4.0]}
    assert both.drifts_pct == [3.0] and both.notes == first.notes
    part = first.followed_by(Rounds({"b": [2.0]}, [], ["time was over"], False))
    assert part.out_of_memory == ["c"] and not part.on_time and not part.complete


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
            {"a": lambda: lambda: Run(1.0, other)},
            repeats=1,
            expected={"a": WORK},
            say=lambda text: None,
        )
