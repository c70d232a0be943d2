"""Where trials come from: a grid, chance, or one of Optuna's samplers by ask and tell."""

import warnings
from collections.abc import Sequence
from importlib import import_module
from inspect import signature
from random import Random
from typing import Any

from tlora.core.errors import SpecError
from tlora.core.sweep import AxisSpec, Params, SearchSpec
from tlora.tuning.space import MOST_TRIALS, grid, ordered, sample, takes_part

TRIES = 50
"""Draws of a trial that has been drawn before until a space counts as used up."""

TRIED = 3
"""Trials that a sampler is asked for and told of before it is relied on."""


def is_known_before(search: SearchSpec) -> bool:
    """All trials can be listed before the first one runs."""
    return search.sampler in ("grid", "random")


def planned(search: SearchSpec) -> list[Params]:
    """All trials of a grid, or all that are drawn; each one once."""
    if search.sampler == "grid":
        return grid(search.space, search.trials)
    assert search.sampler == "random" and search.trials is not None
    if search.trials > MOST_TRIALS:
        raise SpecError(
            f"is {search.trials:,}; a sweep draws at most {MOST_TRIALS:,}", field="search.trials"
        )
    found: list[Params] = []
    seen: set[str] = set()
    for number in range(search.trials):
        # Its own generator: a trial does not depend on how many there are.
        draw = Random(f"{search.seed}:{number}")
        for _ in range(TRIES):
            params = sample(search.space, draw)
            if (key := repr(params)) not in seen:
                seen.add(key)
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
        # A sweep that goes on must not be given the points of its first trials again.
        self._study = _study(self._optuna, search.sampler, seed=search.seed + asked, mode=mode)
        self._open: dict[str, Any] = {}
        self._expected: dict[str, Params] = {}
        """Asked for before the sweep was stopped, and not told of yet."""

    def ask(self, name: str) -> Params:
        """Raises SpecError where the space is not for this sampler."""
        trial = self._study.ask()
        chosen: Params = {}
        for axis in self._axes:
            if takes_part(axis, chosen):
                try:
                    chosen[axis.field] = _suggested(trial, axis)
                except (ValueError, TypeError, ImportError) as error:
                    message = f"{self._search.sampler} cannot try {axis.field}: {error}"
                    raise SpecError(message, field="search.sampler") from None
        self._open[name] = trial
        return {
            each.field: chosen[each.field] for each in self._search.space if each.field in chosen
        }

    def tell(self, name: str, value: float | None) -> None:
        """None: it failed. The first value of a trial counts: all are told at the same part of
        their steps, or as far as they came."""
        trial, expected = self._open.pop(name, None), self._expected.pop(name, None)
        if expected is not None and value is not None:
            self.remember(expected, value)
        if trial is None:
            return
        if value is None:
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, value)

    def expect(self, name: str, params: Params) -> None:
        """A trial of before the sweep was stopped that has not been told of yet."""
        self._expected[name] = params

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
    return axis.values.index(tuple(value) if isinstance(value, list) else value)  # pyright: ignore[reportUnknownArgumentType]


def check_sampler(name: str) -> None:
    """Raises SpecError for a sampler that nobody has, that needs more than a seed, or that misses a
    library of its own."""
    if name in ("grid", "random"):
        return
    optuna = _optuna()
    study = _study(optuna, name, seed=0, mode="minimize")
    # Some look for their libraries when they have heard of a value or two.
    for number in range(TRIED):
        trial = study.ask()
        try:
            for field in ("x", "y"):
                trial.suggest_int(field, 0, TRIED, step=1)
        except ImportError as error:
            message = f"{name} needs a library that is not installed: pip install {error.name}"
            raise SpecError(message, field="search.sampler") from None
        study.tell(trial, float(number))


def _study(optuna: Any, name: str, *, seed: int, mode: str) -> Any:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        # Several are experimental to Optuna, which says so at every turn.
        warnings.simplefilter("ignore")
        sampler = _sampler_class(name, optuna)(seed=seed)
    return optuna.create_study(direction=mode, sampler=sampler)


def _sampler_class(name: str, optuna: Any) -> Any:
    samplers = optuna.samplers
    every = [each for each in dir(samplers) if each.endswith("Sampler") and "Base" not in each]
    by_name = {each.lower(): each for each in every}
    by_name |= {each.lower().removesuffix("sampler"): each for each in every}
    known = [each for each in every if _needs_a_seed_alone(getattr(samplers, each))]
    chosen = by_name.get(name.lower())
    if chosen not in known:
        what = f"there is no '{name}'"
        if chosen is not None:
            what = f"{chosen} needs more than a sweep file says"
        raise SpecError(
            f"{what}; grid, random, or one of Optuna's: {', '.join(known)}",
            field="search.sampler",
        )
    return getattr(samplers, chosen)


def _needs_a_seed_alone(sampler: Any) -> bool:
    taken = signature(sampler).parameters
    needed = [each.name for each in taken.values() if each.default is each.empty]
    return "seed" in taken and set(needed) <= {"seed"}


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
