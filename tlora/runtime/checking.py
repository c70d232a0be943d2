"""`tlora check`: all that can be known to be wrong before training, without loading the weights."""

import math
from pathlib import Path

from tlora.core.errors import AdapterError, DataError, SpecError, SpecErrors, TloraError
from tlora.core.job import BaseSpec, JobSpec, RunSpec
from tlora.data.prepare import PreparedData, Preparer
from tlora.model.loading import context_length, load_shape, load_tokenizer, resolve_device
from tlora.model.peft_format import AdapterFile, read_adapter
from tlora.model.quantising import check_quantisable
from tlora.model.targets import Target, choose_targets, find_targets
from tlora.runtime.budget import nano_batch_tokens
from tlora.runtime.data_lines import idle_settings
from tlora.runtime.environment import cache_directory, quieten_libraries
from tlora.runtime.sinks import check_trackers


def check_run(spec: RunSpec) -> list[str]:
    """Lines that say what the jobs would train on. Raises what `train` would raise before it has
    seen the model run."""
    quieten_libraries()
    check_trackers(spec.report_to)
    device = resolve_device(spec.engine.device)
    shape = load_shape(spec.base)
    targets = find_targets(shape)
    # Before the data: a wrong name should not wait for a tokenizer.
    check_targets(spec, targets)
    lines = []
    prepared = prepare_jobs(spec, limit=context_length(shape.config))
    nano_batch_tokens(spec, device, prepared, shape.num_parameters())
    for job in spec.jobs:
        chosen = choose_targets(job, targets)
        parameters = sum(job.lora.r * (t.in_features + t.out_features) for t in chosen)
        lines.append(f"{job.name}: {len(chosen)} linears, {parameters:,} trained parameters")
        if job.train.on_pairs:
            lines.append(f"  {preference_line(job)}")
        lines += [f"  {line}" for line in prepared[job.name].report.lines()]
    return [*lines, *idle_settings(spec.jobs)]


def preference_line(job: JobSpec) -> str:
    smoothing = job.train.label_smoothing
    smoothed = f", label smoothing {smoothing:g}" if smoothing else ""
    return f"dpo on preference pairs: beta {job.train.beta:g}{smoothed}, the base as the reference"


def check_targets(spec: RunSpec, targets: dict[str, Target]) -> None:
    check_quantisable(spec.base, targets)
    for job in spec.jobs:
        choose_targets(job, targets)
        check_start(job, targets)


def check_start(job: JobSpec, targets: dict[str, Target]) -> None:
    """`init_from` must fit the job."""
    if job.init_from is None:
        return
    adapter = start_of(job, targets)
    wanted = {target.path for target in choose_targets(job, targets)}
    problem = None
    if adapter.r != job.lora.r:
        problem = f"has rank {adapter.r}, the job asks for {job.lora.r}"
    elif set(adapter.weights) != wanted:
        odd = sorted(set(adapter.weights) ^ wanted)[0]
        problem = f"adapts other modules than lora.target_modules: they differ in {odd}"
    elif not math.isclose(adapter.scale, job.lora.scale, rel_tol=1e-6):
        # The same matrices under another scale are another model than the one that was saved.
        problem = (
            f"was scaled by {adapter.scale:g}, the job scales by {job.lora.scale:g}; set "
            f"lora_alpha to {job.lora.lora_alpha * adapter.scale / job.lora.scale:g}"
        )
    if problem is not None:
        raise SpecError(f"{job.init_from} {problem}", job=job.name, field="init_from")


def start_of(job: JobSpec, targets: dict[str, Target]) -> AdapterFile:
    """The adapter a job starts from."""
    assert job.init_from is not None
    try:
        return read_adapter(Path(job.init_from), targets)
    except AdapterError as error:
        raise SpecError(str(error), job=job.name, field="init_from") from error


def new_preparer(base: BaseSpec) -> Preparer:
    return Preparer(load_tokenizer(base), cache_dir=cache_directory())


def prepare_jobs(
    spec: RunSpec, *, limit: int | None, preparer: Preparer | None = None
) -> dict[str, PreparedData]:
    """Every job's data, tokenised once per dataset. What is wrong is told of all jobs at once."""
    preparer = preparer or new_preparer(spec.base)
    prepared: dict[str, PreparedData] = {}
    problems: list[TloraError] = []
    for job in spec.jobs:
        try:
            prepared[job.name] = preparer.prepare(job)
            _check_lengths(job, prepared[job.name], limit)
        except (DataError, SpecError) as error:
            problems.append(error)
    if problems:
        raise problems[0] if len(problems) == 1 else SpecErrors(problems)
    return prepared


def _check_lengths(job: JobSpec, data: PreparedData, limit: int | None) -> None:
    views = [view for view in (data.train, data.evaluation) if view is not None and len(view)]
    longest = max(int(view.sequence_lengths.max()) for view in views)
    if limit is not None and longest > limit:
        raise SpecError(
            f"rows of up to {longest} tokens, but the base model takes {limit}; set max_length to "
            f"at most {limit}",
            job=job.name,
            field="train.max_length",
        )
