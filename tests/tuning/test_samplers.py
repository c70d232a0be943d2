"""Optuna's samplers, by ask and tell: against a stand-in with the parts of its interface that are
used, and against Optuna itself where it is installed."""

import sys
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
        TPESampler=lambda seed: ("tpe", seed), BaseSampler=None, QMCSampler=lambda seed: "qmc"
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
