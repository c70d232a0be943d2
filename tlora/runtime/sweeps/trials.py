"""Trials of a sweep as jobs: their settings, their data, and what they take."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

from transformers.modeling_utils import PreTrainedModel

from tlora.core.errors import DataError, SpecError, SpecErrors, TloraError
from tlora.core.job import JobSpec
from tlora.core.sweep import Params, SweepSpec, trial_of
from tlora.data.cursor import steps_per_epoch, total_steps
from tlora.data.prepare import PreparedData
from tlora.model.loading import context_length
from tlora.model.targets import find_targets
from tlora.runtime.checking import check_targets, prepare_jobs
from tlora.runtime.room import adapter_bytes
from tlora.tuning.events import TrialPlan
from tlora.tuning.samplers import is_known_before, planned
from tlora.tuning.space import every_value, sample

EVALUATIONS = 20
"""Of a trial whose task does not say how often it is evaluated."""

REPRESENTATIVES = 8
"""Trials that stand for those of a sampler that decides as it goes."""


@dataclass(frozen=True, slots=True, eq=False)
class MadeTrial:
    job: JobSpec
    data: PreparedData
    plan: TrialPlan


class TrialMaker:
    """Makes trials of parameters. Those that share data share its tokens: they are made once."""

    def __init__(self, spec: SweepSpec, shape: PreTrainedModel) -> None:
        self.spec = spec
        self._targets = find_targets(shape)
        self._limit = context_length(shape.config)

    def make(
        self, named: Mapping[str, Params], *, parent: str | None = None
    ) -> dict[str, MadeTrial]:
        """Raises SpecError for settings that do not go together, all of them at once."""
        if not named:
            return {}
        try:
            jobs = _jobs(self.spec, named)
            run = self.spec.run(tuple(jobs.values()))
            check_targets(run, self._targets)
            data = prepare_jobs(run, limit=self._limit)
        except SpecErrors as error:
            raise told_once(error, self.spec.task.name) from None
        return {
            name: self._made(evaluated_often(job, data[name]), data[name], named[name], parent)
            for name, job in jobs.items()
        }

    def _made(
        self, job: JobSpec, data: PreparedData, params: Params, parent: str | None
    ) -> MadeTrial:
        plan = TrialPlan(
            name=job.name,
            params=params,
            total_steps=steps_of(job, data),
            total_tokens=tokens_of(job, data),
            batch_size=job.train.batch_size,
            adapter_bytes=adapter_bytes(job, self._targets),
            parent=parent,
        )
        return MadeTrial(job, data, plan)


def told_once(error: SpecErrors, task: str) -> TloraError:
    """What is wrong with several trials in the same words is told of their task."""
    told: dict[tuple[object, ...], list[TloraError]] = {}
    for problem in error.problems:
        match problem:
            case SpecError(message=message, field=field):
                key = (message, field)
            case DataError(message=message, path=path, line=line):
                key = (message, path, line)
            case _:
                key = (str(problem),)
        told.setdefault(key, []).append(problem)
    problems = [each[0] if len(each) == 1 else _of_task(each[0], task) for each in told.values()]
    return problems[0] if len(problems) == 1 else SpecErrors(problems)


def _of_task(problem: TloraError, task: str) -> TloraError:
    match problem:
        case SpecError(message=message, field=field):
            return SpecError(message, job=task, field=field)
        case DataError(message=message, path=path, line=line):
            return DataError(message, job=task, path=path, line=line)
        case _:
            return problem


def _jobs(spec: SweepSpec, named: Mapping[str, Params]) -> dict[str, JobSpec]:
    jobs: dict[str, JobSpec] = {}
    problems: list[TloraError] = []
    for name, params in named.items():
        try:
            jobs[name] = trial_of(spec.task, name, params)
        except SpecError as error:
            problems.append(error)
    if problems:
        raise problems[0] if len(problems) == 1 else SpecErrors(problems)
    return jobs


def first_trials(spec: SweepSpec) -> dict[str, Params]:
    """Those that are known before the first one runs, by name."""
    if not is_known_before(spec.search):
        return {}
    found = planned(spec.search)
    width = max(2, len(str(len(found) - 1)))
    return {trial_name(spec, at, width): params for at, params in enumerate(found)}


def trial_name(spec: SweepSpec, number: int, width: int = 2) -> str:
    return f"{spec.task.name}-{number:0{width}}"


def representatives(spec: SweepSpec) -> dict[str, Params]:
    """Where no trial is known yet: some that could be, to size the engine by."""
    draws = (Random(f"representative {at}") for at in range(REPRESENTATIVES))
    return {f"r{at}": sample(spec.search.space, draw) for at, draw in enumerate(draws)}


def ranks_to_come(spec: SweepSpec) -> set[int]:
    """That a sampler which decides as it goes may ask for: they are shown to be exact before."""
    if is_known_before(spec.search):
        return set()
    return {
        int(value)
        for axis in spec.search.space
        if axis.field == "lora.r"
        for value in every_value(axis)
    }


def evaluated_often(job: JobSpec, data: PreparedData) -> JobSpec:
    """A sweep decides by evaluations: a task that does not say when gets some for every trial, at
    the same parts of its steps whatever its batch size. The job trained alone has them too."""
    if job.eval.steps is not None or data.evaluation is None:
        return job
    steps = max(1, steps_of(job, data) // EVALUATIONS)
    return replace(job, eval=replace(job.eval, steps=steps))


def steps_of(job: JobSpec, data: PreparedData) -> int:
    train = job.train
    return total_steps(len(data.train), train.batch_size, train.num_train_epochs, train.max_steps)


def tokens_of(job: JobSpec, data: PreparedData) -> int:
    """What the job trains on from start to end."""
    rows, batch = len(data.train), job.train.batch_size
    epochs, steps = divmod(steps_of(job, data), steps_per_epoch(rows, batch))
    sequences = epochs * rows + min(rows, steps * batch)
    return round(sequences * float(data.train.lengths.mean()))
