"""`tlora check`: all that can be known to be wrong before training, without loading the weights."""

from tlora.core.errors import SpecError
from tlora.core.job import RunSpec
from tlora.data.prepare import PreparedData, prepare
from tlora.model.loading import load_shape, load_tokenizer
from tlora.model.peft_format import read_adapter
from tlora.model.targets import Target, choose_targets, find_targets
from tlora.runtime.environment import cache_directory, quieten_libraries


def check_run(spec: RunSpec) -> list[str]:
    """Lines that say what the jobs would train on. Raises what `train` would raise."""
    quieten_libraries()
    shape = load_shape(spec.base)
    targets = find_targets(shape)
    limit = context_length(shape.config)
    lines = []
    prepared = prepare_jobs(spec, limit=limit)
    for job in spec.jobs:
        chosen = choose_targets(job, targets)
        check_start(job, targets)
        parameters = sum(job.lora.r * (t.in_features + t.out_features) for t in chosen)
        lines.append(f"{job.name}: {len(chosen)} linears, {parameters:,} trained parameters")
        lines += [f"  {line}" for line in prepared[job.name].report.lines()]
    return lines


def check_targets(spec: RunSpec, targets: dict[str, Target]) -> None:
    for job in spec.jobs:
        choose_targets(job, targets)
        check_start(job, targets)


def check_start(job, targets: dict[str, Target]) -> None:
    """`init_from` must fit the job."""
    if job.init_from is None:
        return
    adapter = start_of(job, targets)
    if adapter.r != job.lora.r:
        raise SpecError(
            f"{job.init_from} has rank {adapter.r}, the job asks for {job.lora.r}",
            job=job.name,
            field="init_from",
        )
    wanted = {target.path for target in choose_targets(job, targets)}
    if set(adapter.weights) != wanted:
        odd = sorted(set(adapter.weights) ^ wanted)[0]
        raise SpecError(
            f"{job.init_from} adapts other modules than lora.target_modules: they differ in {odd}",
            job=job.name,
            field="init_from",
        )


def start_of(job, targets: dict[str, Target]):
    """The adapter a job starts from."""
    from pathlib import Path

    return read_adapter(Path(job.init_from), targets)


def context_length(config) -> int | None:
    return getattr(config, "max_position_embeddings", None)


def prepare_jobs(spec: RunSpec, *, limit: int | None) -> dict[str, PreparedData]:
    """Every job's data, tokenised once per dataset."""
    tokenizer = load_tokenizer(spec.base)
    prepared = {}
    for job in spec.jobs:
        data = prepare(job, tokenizer, cache_dir=cache_directory())
        longest = int(data.train.lengths.max())
        if limit is not None and longest > limit:
            raise SpecError(
                f"rows of up to {longest} tokens, but the base model takes {limit}; "
                f"set max_length to at most {limit}",
                job=job.name,
                field="train.max_length",
            )
        prepared[job.name] = data
    return prepared
