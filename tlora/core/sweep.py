"""What a person asks for in a sweep: one task, the settings to try, and when to give one up.

As in `core/job.py` these frozen dataclasses are the one declaration of the sweep file. A trial is a
job like any other: the task with some of its fields replaced.
"""

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from tlora.core.errors import SpecError
from tlora.core.job import STRICT, BaseSpec, EngineSpec, JobSpec, RunSpec, Tracker, require

METRICS = ("eval_loss", "loss", "grad_norm", "eval_accuracy", "eval_margin")
"""What is logged of a job: held-out loss, the mean training loss since the evaluation before, the
norm of the last gradient; of preferences, the part of held-out pairs whose chosen side is
preferred, and by how much."""

OF_PAIRS = ("eval_accuracy", "eval_margin")
HELD_OUT = ("eval_loss", *OF_PAIRS)

MEASURE = {
    "train.loss": "the loss that trials are compared by would be another one for each",
    "train.max_length": "it cuts or drops held-out rows too: each would be measured on other ones",
    "train.over_length": "it cuts or drops held-out rows too: each would be measured on other ones",
}
"""Fields that change what every objective measures, and how."""

SCALES = {
    "train.beta": "it scales loss and margin, so that a small one looks better or worse by itself",
    "train.label_smoothing": "it raises the loss of the same answers",
}
"""Of preference jobs: what is measured by accuracy is the same under any of these."""

Kind = Literal["values", "uniform", "log", "integer"]
Method = Literal["alto", "asha", "median", "none"]
Params = dict[str, Any]
"""Canonical dotted field -> value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class When:
    """A field of the space takes part only where another one has one of these values."""

    field: str
    values: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisSpec:
    """One field of the search space."""

    field: str
    """Its canonical dotted name."""

    kind: Kind
    values: tuple[Any, ...] = ()
    """Where it is a list of values."""

    low: float = 0.0
    high: float = 0.0
    """Both ends of a range, included."""

    step: int = 1
    """Of a range of whole numbers."""

    points: int | None = None
    """Of a range in a grid; null: as many as search.trials leaves room for."""

    when: tuple[When, ...] = ()

    def __post_init__(self) -> None:
        name = f"search.space.{self.field}"
        if self.kind == "values":
            require(bool(self.values), name, "lists no values")
            twice = [each for at, each in enumerate(self.values) if each in self.values[:at]]
            require(not twice, name, f"lists {twice[0] if twice else ''} twice")
            return
        require(self.low < self.high, name, f"must rise, got [{self.low:g}, {self.high:g}]")
        require(self.kind != "log" or self.low > 0, name, f"must be above 0, got {self.low:g}")
        require(self.step >= 1, name, f"step must be at least 1, got {self.step}")
        require(self.points is None or self.points >= 2, name, f"points must be at least 2: {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveSpec:
    """What the best trial is the best in."""

    __pydantic_config__ = STRICT

    metric: str = "eval_loss"
    """eval_loss (the lowest of a trial's evaluations), or the last value of loss or grad_norm."""

    mode: Literal["min", "max"] = "min"
    """Whether less or more of it is better."""

    def __post_init__(self) -> None:
        require(
            self.metric in METRICS,
            "search.objective.metric",
            f"'{self.metric}' is never logged; there are {', '.join(METRICS)}",
        )
        require(
            self.metric not in OF_PAIRS or self.mode == "max",
            "search.objective.mode",
            f"must be max: more {self.metric.removeprefix('eval_')} is better",
        )

    @property
    def keeps_best(self) -> bool:
        """A trial is worth its best evaluation, whose adapter is kept, not its last."""
        return (self.metric, self.mode) == ("eval_loss", "min")

    def key(self, value: float) -> float:
        """Less is better."""
        return value if self.mode == "min" else -value


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpec:
    """Which settings are tried, and for how long."""

    __pydantic_config__ = STRICT

    space: tuple[AxisSpec, ...]
    """The fields that trials differ in: a list of values, or {log: [low, high]}, {uniform: [low,
    high]}, {integer: [low, high], step: 1}; `points` of a range in a grid; `when: {field: values}`
    for a field that is only tried beside certain values of another one."""

    sampler: str = "grid"
    """grid, random, or one of Optuna's samplers, such as tpe."""

    trials: int | None = None
    """How many at most; null for a grid means all of it."""

    seed: int = 0
    """Of the sampler; trials take train.seed from the task."""

    objective: ObjectiveSpec = field(default_factory=ObjectiveSpec)
    """What the best trial is the best in."""

    max_tokens: int | None = None
    """End the sweep after so many trained tokens of all trials together."""

    max_seconds: float | None = None
    """End the sweep after so much time of running."""

    max_parallel: int | None = None
    """At most so many trials at once; null: as many as have room."""

    def __post_init__(self) -> None:
        require(bool(self.space), "search.space", "is empty: name the fields to be tried")
        for name in ("trials", "max_parallel", "max_tokens"):
            value = getattr(self, name)
            require(
                value is None or value >= 1, f"search.{name}", f"must be at least 1, got {value}"
            )
        require(
            self.max_seconds is None or self.max_seconds > 0,
            "search.max_seconds",
            f"must be positive, got {self.max_seconds}",
        )
        require(
            self.trials is not None or self.sampler == "grid",
            "search.trials",
            f"is required with sampler {self.sampler}: how many are to be tried",
        )
        for axis in self.space:
            require(
                axis.points is None or self.sampler == "grid",
                f"search.space.{axis.field}",
                f"points lays out a grid and does nothing with sampler {self.sampler}; take it out",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyExitSpec:
    """When a trial is given up. The defaults are those that ALTO was published with."""

    __pydantic_config__ = STRICT

    method: Method = "alto"
    """alto, asha (successive halving), median (stopping), or none."""

    warmup: float = 0.05
    """alto: every trial gets this part of its steps, up to the evaluation that follows."""

    min_warmup_steps: int = 2
    """alto: and at least so many steps, if it has as many: after a single one the highest learning
    rates look best, whether they hold or not. 1 is the published rule, made for longer trials."""

    keep: float = 0.25
    """alto: this part of all trials goes on after the warm-up, rounded up."""

    smoothing: float = 0.3
    """alto: weight of the newest evaluation in the smoothed training loss."""

    diverging_slope: float = 0.001
    """alto: training and held-out loss both rise by so much per evaluation, or more."""

    diverging_window: int = 2
    """alto: evaluations that a slope is taken over."""

    diverging_patience: int = 2
    """alto: so many times in a row."""

    overfitting_gap: float = 0.1
    """alto: held-out loss is above the training loss by more than this part of it."""

    overfitting_patience: int = 2
    """alto: so many times in a row."""

    overfitting_past_best: bool = False
    """alto: only once the held-out loss has been lower before. Not in the published rule, which
    may give up a trial that still gets better."""

    watch_accuracy: bool = True
    """alto, of preference jobs: a trial whose accuracy on held-out pairs still gets better is
    neither diverging nor overfitting, and the gap is taken to its own lowest held-out loss; false:
    by the losses alone, as published."""

    reduction: int = 4
    """asha: of the trials that reach a rung, one in so many goes on."""

    first_rung: float = 0.05
    """asha: the first rung, as a part of a trial's steps; each next one is `reduction` times as
    far."""

    grace: float = 0.1
    """median: no trial is given up in this first part of its steps."""

    min_trials: int = 4
    """median: so many others must have come as far."""

    def __post_init__(self) -> None:
        for name in ("warmup", "keep", "smoothing", "first_rung"):
            value = getattr(self, name)
            require(0 < value <= 1, f"early_exit.{name}", f"must be in (0, 1], got {value:g}")
        for name in (
            "min_warmup_steps",
            "diverging_patience",
            "overfitting_patience",
            "min_trials",
        ):
            value = getattr(self, name)
            require(value >= 1, f"early_exit.{name}", f"must be at least 1, got {value}")
        for name in ("diverging_window", "reduction"):
            value = getattr(self, name)
            require(value >= 2, f"early_exit.{name}", f"must be at least 2, got {value}")
        require(0 <= self.grace < 1, "early_exit.grace", f"must be in [0, 1), got {self.grace:g}")
        require(
            self.overfitting_gap >= 0,
            "early_exit.overfitting_gap",
            f"must not be negative, got {self.overfitting_gap:g}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepSpec:
    """A whole sweep file, resolved."""

    __pydantic_config__ = STRICT

    base: BaseSpec
    """The frozen model that all trials share."""

    task: JobSpec
    """What every trial is, but for the fields of the space."""

    search: SearchSpec
    """Which settings are tried, and for how long."""

    early_exit: EarlyExitSpec = field(default_factory=EarlyExitSpec)
    """When a trial is given up."""

    engine: EngineSpec = field(default_factory=EngineSpec)
    """How the trials are run together."""

    report_to: tuple[Tracker, ...] = ()
    """Trackers to write to besides the run directory."""

    def __post_init__(self) -> None:
        objective, exits = self.search.objective, self.early_exit.method != "none"
        if objective.metric in OF_PAIRS and self.task.train.loss != "dpo":
            raise SpecError(
                f"'{objective.metric}' is logged of preference jobs only (train.loss: dpo)",
                job=self.task.name,
                field="search.objective.metric",
            )
        held_out = objective.metric in HELD_OUT
        if not self.task.holds_out and (held_out or exits):
            what = "search.objective.metric" if held_out else "early_exit"
            raise SpecError(
                f"{what} looks at held-out rows, and the task has none: set eval.split or "
                "data.eval_path",
                job=self.task.name,
                field="eval.split",
            )

        for axis in self.search.space:
            self.check_comparable(axis.field, at=f"search.space.{axis.field}")

    def check_comparable(self, name: str, *, at: str) -> None:
        """Raises SpecError, naming `at`, for a field of a job in which trials may not differ, for
        their values of the objective would say nothing about which one is the better."""
        if name in MEASURE:
            raise SpecError(f"cannot be tried: {MEASURE[name]}; set it in the task", field=at)
        if name in SCALES and self.search.objective.metric != "eval_accuracy":
            raise SpecError(
                f"cannot be tried by {self.search.objective.metric}: {SCALES[name]}; set it in the "
                "task, or search.objective to {metric: eval_accuracy, mode: max}",
                field=at,
            )
        if name == "train.seed" and self.task.data.eval_path is None:
            raise SpecError(
                "the seed also chooses which rows eval.split holds out, so that trials could not "
                "be compared; name held-out rows in data.eval_path",
                field=at,
            )

    def run(self, jobs: tuple[JobSpec, ...]) -> RunSpec:
        """These trials as a job file."""
        return RunSpec(base=self.base, jobs=jobs, engine=self.engine, report_to=self.report_to)


def trial_of(task: JobSpec, name: str, params: Params) -> JobSpec:
    """The task with these fields replaced. Raises SpecError, naming trial and field, where the
    values do not go together."""
    params = {key: _frozen(value) for key, value in params.items()}
    try:
        return replace(_replaced(task, params), name=name)
    except SpecError as error:
        raise SpecError(error.message, job=name, field=error.field) from None


def _replaced(spec: Any, params: Params, prefix: str = "") -> Any:
    changes: Params = {}
    for each in fields(spec):
        path, old = prefix + each.name, getattr(spec, each.name)
        if path in params:
            changes[each.name] = params[path]
        elif is_dataclass(old) and any(name.startswith(f"{path}.") for name in params):
            changes[each.name] = _replaced(old, params, f"{path}.")
    return replace(spec, **changes)


def _frozen(value: Any) -> Any:
    """A list of values that was stored comes back as a list."""
    return tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
