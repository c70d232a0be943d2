"""How long steps take whose speed depends on what the machine did before."""

from collections.abc import Callable

import pytest
import torch

from tlora.runtime.benchmark import machine
from tlora.runtime.benchmark.machine import seconds_in_turn

CPU = torch.device("cpu")


class Machine:
    """Its own time, and the steps that it was asked for."""

    def __init__(self, seconds: Callable[[list[str], str], float]) -> None:
        self.seconds, self.time, self.done = seconds, 0.0, list[str]()

    def step(self, name: str) -> Callable[[], None]:
        def take() -> None:
            self.time += self.seconds(self.done, name)
            self.done.append(name)

        return take

    def measured(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        monkeypatch.setattr(machine, "now", lambda _: self.time)
        return seconds_in_turn([self.step("one"), self.step("other")], CPU)


def test_what_comes_first_after_a_rest_is_not_faster_for_it(monkeypatch) -> None:
    """Five calls at a higher clock, and then no more: equal steps take equally long."""
    rested = Machine(lambda done, name: 1.0 if len(done) < 5 else 1.2)
    assert rested.measured(monkeypatch) == pytest.approx([1.2, 1.2])


def test_a_step_is_timed_behind_its_own_like(monkeypatch) -> None:
    """Behind the other one it takes another time."""

    def seconds(done: list[str], name: str) -> float:
        usual = {"one": 1.0, "other": 2.0}[name]
        return usual if done and done[-1] == name else 0.5 * usual

    assert Machine(seconds).measured(monkeypatch) == pytest.approx([1.0, 2.0])


def test_each_is_as_often_the_first_as_the_last(monkeypatch) -> None:
    """But for one round."""
    tried = Machine(lambda done, name: 1.0)
    tried.measured(monkeypatch)
    rounds = [tried.done[i : i + 4] for i in range(0, len(tried.done), 4)]
    assert {tuple(each) for each in rounds} == {
        ("one", "one", "other", "other"),
        ("other", "other", "one", "one"),
    }
    assert abs(sum(1 if each[0] == "one" else -1 for each in rounds)) <= 1
