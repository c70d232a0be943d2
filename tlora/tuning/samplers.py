"""Where trials come from: a grid, chance, or one of Optuna's samplers by ask and tell."""

from collections.abc import Sequence
from importlib import import_module
from random import Random
from typing import Any

from tlora.core.errors import SpecError
from tlora.core.sweep import AxisSpec, Params, SearchSpec
from tlora.tuning.space import grid, ordered, sample, takes_part

TRIES = 50
"""Draws of a trial that has been drawn before until a space counts as used up."""


def is_known_before(search: SearchSpec) -> bool:
    """All trials can be listed before the first one runs."""
    return search.sampler in ("grid", "random")


def planned(search: SearchSpec) -> list[Params]:
    """All trials of a grid, or all that are drawn; each one once."""
    if search.sampler == "grid":
        return grid(search.space, search.trials)
    assert search.sampler == "random" and search.trials is not None
    found: list[Params] = []
    for number in range(search.trials):
        # Its own generator: a trial does not depend on how many there are.
        draw = Random(f"{search.seed}:{number}")
        for _ in range(TRIES):
            params = sample(search.space, draw)
            if params not in found:
                found.append(params)
                break
    return found


class OptunaSampler:
    """Optuna's study, asked for parameters and told of values. What was told before is told again
    when a sweep goes on; the sampler's own random state is not kept."""

    def __init__(self, search: SearchSpec, *, asked: int = 0) -> None:
        self._search = search
        self._optuna = _optuna()
        self._axes = ordered(search.space)
        mode = "minimize" if search.objective.mode == "min" else "maximize"
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        # A sweep that goes on must not be given the points of its first trials again.
        sampler = _sampler_class(search.sampler, self._optuna)(seed=search.seed + asked)
        self._study = self._optuna.create_study(direction=mode, sampler=sampler)
        self._open: dict[str, Any] = {}

    def ask(self, name: str) -> Params:
        trial = self._study.ask()
        chosen: Params = {}
        for axis in self._axes:
            if takes_part(axis, chosen):
                chosen[axis.field] = _suggested(trial, axis)
        self._open[name] = trial
        return {
            each.field: chosen[each.field] for each in self._search.space if each.field in chosen
        }

    def tell(self, name: str, value: float | None) -> None:
        """None: it failed."""
        trial = self._open.pop(name, None)
        if trial is None:
            return
        if value is None:
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, value)

    def remember(self, params: Params, value: float) -> None:
        """A trial of before the sweep was stopped."""
        distributions = {
            axis.field: self._distribution(axis) for axis in self._axes if axis.field in params
        }
        self._study.add_trial(
            self._optuna.trial.create_trial(
                params={name: _coded(self._axes, name, value) for name, value in params.items()},
                distributions=distributions,
                value=value,
            )
        )

    def _distribution(self, axis: AxisSpec) -> Any:
        kinds = self._optuna.distributions
        if axis.kind == "values":
            return kinds.CategoricalDistribution(list(range(len(axis.values))))
        if axis.kind == "integer":
            return kinds.IntDistribution(int(axis.low), int(axis.high), step=axis.step)
        return kinds.FloatDistribution(axis.low, axis.high, log=axis.kind == "log")


def _suggested(trial: Any, axis: AxisSpec) -> Any:
    if axis.kind == "values":
        # By place: Optuna keeps categories as texts and numbers only.
        return axis.values[trial.suggest_categorical(axis.field, list(range(len(axis.values))))]
    if axis.kind == "integer":
        return trial.suggest_int(axis.field, int(axis.low), int(axis.high), step=axis.step)
    return trial.suggest_float(axis.field, axis.low, axis.high, log=axis.kind == "log")


def _coded(axes: Sequence[AxisSpec], name: str, value: Any) -> Any:
    axis = next(each for each in axes if each.field == name)
    if axis.kind != "values":
        return value
    # A log has lists where the space has tuples.
    return axis.values.index(tuple(value) if isinstance(value, list) else value)


def check_sampler(name: str) -> None:
    """Raises SpecError for a sampler that nobody has."""
    if name not in ("grid", "random"):
        _sampler_class(name, _optuna())


def _sampler_class(name: str, optuna: Any) -> Any:
    samplers = optuna.samplers
    known = [each for each in dir(samplers) if each.endswith("Sampler") and each != "BaseSampler"]
    by_name = {each.lower(): each for each in known}
    by_name |= {each.lower().removesuffix("sampler"): each for each in known}
    if name.lower() not in by_name:
        raise SpecError(
            f"there is no '{name}'; grid, random, or one of Optuna's: {', '.join(known)}",
            field="search.sampler",
        )
    return getattr(samplers, by_name[name.lower()])


def _optuna() -> Any:
    # A heavy optional library: the command line must answer without it.
    try:
        return import_module("optuna")
    except ImportError:
        raise SpecError(
            "grid and random come with tlora; any other sampler is Optuna's: pip install "
            "'tlora[tune]'",
            field="search.sampler",
        ) from None
