"""Samplers that decide as a sweep goes."""

from random import Random
from typing import Any, ClassVar

import pytest
from support.sweeps import StopAfter, lines, sweep_file

import tlora
from tlora.runtime.sweeps import tune as tune_module
from tlora.tuning.space import sample


class Chance:
    """Stands in for Optuna's samplers: draws, and notes what it is told."""

    told: ClassVar[dict[str, float | None]] = {}

    def __init__(self, search, *, asked: int = 0) -> None:
        self.search, self.asked = search, asked

    def ask(self, name: str) -> dict[str, Any]:
        self.asked += 1
        return sample(self.search.space, Random(self.asked))

    def tell(self, name: str, value: float | None) -> None:
        self.told[name] = value

    def expect(self, name: str, params: dict[str, Any]) -> None:
        pass

    def remember(self, params: dict[str, Any], value: float) -> None:
        pass


def test_a_sampler_that_decides_as_it_goes_is_asked_when_there_is_room(
    base, rows, tmp_path, monkeypatch
):
    """Two at a time: all five are asked for one by one, warmed up, and told of."""
    monkeypatch.setattr(tune_module, "OptunaSampler", Chance)
    monkeypatch.setattr(tune_module, "check_sampler", lambda name: None)
    file = sweep_file(base, rows, exact=False, search={"sampler": "tpe", "trials": 5})
    file["search"]["space"]["train.learning_rate"] = {"log": [1e-4, 1e-1]}
    spec = tlora.load_sweep(file)
    assert tlora.tune(spec, output=tmp_path / "run", view=StopAfter(9)).interrupted
    study = tlora.tune(spec, output=tmp_path / "run", view=lines())
    assert [trial.name for trial in study.trials] == [f"t-{at:02}" for at in range(5)]
    assert sorted(trial.status for trial in study.trials) == ["completed"] * 2 + ["exited"] * 3
    assert study.best is not None and Chance.told[study.best.name] == study.best.value


def test_a_sampler_hears_of_warm_ups_before_it_is_asked_for_the_rest(
    base, rows, tmp_path, monkeypatch
):
    """With room for all: eight are asked for, the next ones as values come in, none after all."""
    course: list[str] = []

    class Noted(Chance):
        def ask(self, name: str) -> dict[str, Any]:
            course.append("ask")
            return super().ask(name)

        def tell(self, name: str, value: float | None) -> None:
            course.append("tell")

    monkeypatch.setattr(tune_module, "OptunaSampler", Noted)
    monkeypatch.setattr(tune_module, "check_sampler", lambda name: None)
    search = {"sampler": "tpe", "trials": 11, "max_parallel": None}
    file = sweep_file(base, rows, exact=False, search=search)
    file["search"]["space"] = {"train.learning_rate": {"log": [1e-4, 1e-1]}}
    study = tlora.tune(tlora.load_sweep(file), output=tmp_path / "run", view=lines())
    assert len(study.trials) == 11 and study.over
    assert course[:9] == ["ask"] * 8 + ["tell"]
    unheard = [course[:at].count("ask") - course[:at].count("tell") for at in range(len(course))]
    assert max(unheard[: len(course) - course[::-1].index("ask")]) <= 8


def test_optuna_tunes(base, rows, tmp_path):
    """Optuna itself, stopped once: every trial is asked for once, and there is a winner."""
    pytest.importorskip("optuna", reason="an extra: pip install 'tlora[tune]'")
    search = {"sampler": "tpe", "trials": 10, "max_parallel": None}
    file = sweep_file(base, rows, exact=False, search=search)
    file["search"]["space"] = {"lora.r": [2, 4], "train.learning_rate": {"log": [1e-4, 1e-1]}}
    spec = tlora.load_sweep(file)
    assert tlora.tune(spec, output=tmp_path / "run", view=StopAfter(6)).interrupted
    study = tlora.tune(spec, output=tmp_path / "run", view=lines())
    assert [trial.name for trial in study.trials] == [f"t-{at:02}" for at in range(10)]
    assert len({str(trial.params) for trial in study.trials}) == 10
    assert study.winner is not None
