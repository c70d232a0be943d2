"""Optuna's samplers, by ask and tell: against a stand-in with the parts of its interface that are
used, and against Optuna itself where it is installed."""

import math
import sys
from statistics import mean
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tlora.core.errors import SpecError
from tlora.core.sweep import AxisSpec, SearchSpec, When
from tlora.tuning.samplers import OptunaSampler, check_sampler

SPACE = (
    AxisSpec(field="train.learning_rate", kind="log", low=1e-4, high=1e-1),
    AxisSpec(field="lora.r", kind="integer", low=2, high=8, step=2),
    AxisSpec(field="lora.target_modules", kind="values", values=("all-linear", ("q_proj",))),
    AxisSpec(
        field="lora.lora_dropout",
        kind="uniform",
        low=0.0,
        high=0.5,
        when=(When(field="lora.target_modules", values=("all-linear",)),),
    ),
)


def search(sampler: str = "tpe") -> SearchSpec:
    return SearchSpec(space=SPACE, sampler=sampler, trials=5)


class FakeTrial:
    def __init__(self, number: int) -> None:
        self.number = number
        self.params: dict[str, Any] = {}

    def suggest_categorical(self, name: str, choices: list[int]) -> int:
        self.params[name] = choices[self.number % len(choices)]
        return self.params[name]

    def suggest_int(self, name: str, low: int, high: int, *, step: int) -> int:
        self.params[name] = low + step
        return self.params[name]

    def suggest_float(self, name: str, low: float, high: float, *, log: bool) -> float:
        self.params[name] = low if log else high
        return self.params[name]


class FakeStudy:
    def __init__(self, direction: str, sampler: Any) -> None:
        self.direction, self.sampler = direction, sampler
        self.asked = 0
        self.told: list[tuple[int, Any]] = []
        self.added: list[Any] = []

    def ask(self) -> FakeTrial:
        self.asked += 1
        return FakeTrial(self.asked - 1)

    def tell(self, trial: FakeTrial, value: Any = None, *, state: Any = None) -> None:
        self.told.append((trial.number, value if state is None else state))

    def add_trial(self, trial: Any) -> None:
        self.added.append(trial)


@pytest.fixture
def optuna(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What was made through it is in `.studies`."""
    found: list[FakeStudy] = []

    def create_study(*, direction: str, sampler: Any) -> FakeStudy:
        found.append(FakeStudy(direction, sampler))
        return found[-1]

    fake: Any = ModuleType("optuna")
    fake.create_study = create_study
    fake.logging = SimpleNamespace(set_verbosity=lambda level: None, WARNING=30)
    fake.samplers = SimpleNamespace(
        TPESampler=lambda seed: ("tpe", seed),
        BaseSampler=None,
        QMCSampler=lambda seed: "qmc",
        GridSampler=lambda search_space, seed=None: "grid",
        PartialFixedSampler=lambda fixed_params, base_sampler: "fixed",
    )
    fake.trial = SimpleNamespace(
        TrialState=SimpleNamespace(FAIL="fail"), create_trial=lambda **options: options
    )
    fake.distributions = SimpleNamespace(
        CategoricalDistribution=lambda choices: ("one of", choices),
        IntDistribution=lambda low, high, step: ("whole", low, high, step),
        FloatDistribution=lambda low, high, log: ("number", low, high, log),
    )
    monkeypatch.setitem(sys.modules, "optuna", fake)
    return SimpleNamespace(studies=found)


def test_parameters_are_asked_for_with_their_conditions(optuna) -> None:
    """The dropout only beside all-linear; values of a list by their place."""
    sampler = OptunaSampler(search())
    assert sampler.ask("a") == {
        "train.learning_rate": 1e-4,
        "lora.r": 4,
        "lora.target_modules": "all-linear",
        "lora.lora_dropout": 0.5,
    }
    assert "lora.lora_dropout" not in sampler.ask("b")
    assert optuna.studies[0].direction == "minimize"
    assert optuna.studies[0].sampler == ("tpe", 0)


def test_values_and_failures_are_told_once(optuna) -> None:
    """A trial that nobody asked for is nobody's."""
    sampler = OptunaSampler(search())
    for name in "ab":
        sampler.ask(name)
    sampler.tell("b", 1.5)
    sampler.tell("a", None)
    sampler.tell("a", 3.0)
    sampler.tell("clone", 2.0)
    assert optuna.studies[0].told == [(1, 1.5), (0, "fail")]


def test_a_sweep_that_goes_on_tells_what_it_knows(optuna) -> None:
    """With the distributions that the values came from, and another seed than at first."""
    sampler = OptunaSampler(search(), asked=3)
    sampler.remember({"lora.r": 4, "lora.target_modules": ("q_proj",)}, 2.5)
    assert optuna.studies[0].sampler == ("tpe", 3)
    assert optuna.studies[0].added == [
        {
            "params": {"lora.r": 4, "lora.target_modules": 1},
            "distributions": {
                "lora.r": ("whole", 2, 8, 2),
                "lora.target_modules": ("one of", [0, 1]),
            },
            "value": 2.5,
        }
    ]


def test_an_unknown_sampler_is_named(optuna) -> None:
    """With those that there are."""
    with pytest.raises(SpecError, match="TPESampler") as caught:
        check_sampler("tpee")
    assert caught.value.field == "search.sampler"
    check_sampler("TPESampler")
    check_sampler("qmc")


@pytest.mark.parametrize("name", ["GridSampler", "partialfixed"])
def test_a_sampler_that_needs_more_than_a_seed_is_refused(optuna, name: str) -> None:
    """Not by a TypeError from inside it; those that can be used are named, and it is not."""
    with pytest.raises(SpecError, match="needs more than a sweep file says") as caught:
        check_sampler(name)
    listed = str(caught.value).rpartition("Optuna's: ")[2]
    assert "TPESampler" in listed and "GridSampler" not in listed


def test_a_trial_of_before_a_stop_is_told_of_when_its_value_is_known(optuna) -> None:
    """It was asked of another process's study: this one gets it as a trial that was, once."""
    sampler = OptunaSampler(search(), asked=2)
    sampler.expect("a", {"lora.r": 4})
    sampler.expect("b", {"lora.r": 6})
    sampler.tell("a", 1.5)
    sampler.tell("a", 1.0)
    sampler.tell("b", None)
    (added,) = optuna.studies[0].added
    assert (added["params"], added["value"]) == ({"lora.r": 4}, 1.5)
    assert optuna.studies[0].told == []


def test_without_optuna_the_message_says_what_to_install(monkeypatch) -> None:
    """grid and random need nothing."""
    monkeypatch.setitem(sys.modules, "optuna", None)
    check_sampler("random")
    with pytest.raises(SpecError, match=r"tlora\[tune\]"):
        check_sampler("tpe")


def test_optuna_itself() -> None:
    """Points of the space, told and remembered."""
    pytest.importorskip("optuna", reason="an extra: pip install 'tlora[tune]'")
    sampler = OptunaSampler(search())
    for number in range(12):
        params = sampler.ask(str(number))
        assert 1e-4 <= params["train.learning_rate"] <= 1e-1 and params["lora.r"] in (2, 4, 6, 8)
        sampler.tell(str(number), params["train.learning_rate"])
        sampler.remember(params, 1.0)


def test_optuna_learns_from_what_it_is_told() -> None:
    """Thirty trials whose value is the distance to one point: the last ten are much nearer to it
    than those of a sampler that is told the opposite (0.20 to 0.45 of their distance with twelve
    seeds)."""
    pytest.importorskip("optuna", reason="an extra: pip install 'tlora[tune]'")

    def distances(sign: float) -> list[float]:
        sampler, found = OptunaSampler(search()), list[float]()
        for number in range(30):
            params = sampler.ask(str(number))
            found.append(abs(math.log10(params["train.learning_rate"]) + 3.0))
            sampler.tell(str(number), sign * found[-1])
        return found

    told, misled = distances(1.0), distances(-1.0)
    assert mean(told[-10:]) < 0.6 * mean(misled[-10:])


def test_samplers_of_optuna_that_cannot_be_used_are_refused() -> None:
    """Those with settings of their own; and one whose space must be finite says which field."""
    pytest.importorskip("optuna", reason="an extra: pip install 'tlora[tune]'")
    for name in ("tpe", "qmc", "NSGAIISampler", "bruteforce"):
        check_sampler(name)
    for name in ("GridSampler", "PartialFixedSampler", "BaseGASampler"):
        with pytest.raises(SpecError) as caught:
            check_sampler(name)
        assert caught.value.field == "search.sampler"
    with pytest.raises(SpecError, match=r"bruteforce cannot try train\.learning_rate"):
        OptunaSampler(search("bruteforce")).ask("a")
