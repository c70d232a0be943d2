"""`tlora train`: a job file to adapters on disk, in this process."""

import platform
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

import tlora
from tlora.config import dump_spec
from tlora.core.job import JobSpec, RunSpec
from tlora.data.prepare import PreparedData
from tlora.model.adapters import AdapterWeights
from tlora.model.loading import load_base, load_config, resolve_device
from tlora.model.super_model import SuperModel
from tlora.runtime.checking import check_start, context_length, prepare_jobs, start_of
from tlora.runtime.directory import JobResult, RunDirectory, replace_text
from tlora.runtime.environment import quieten_libraries
from tlora.runtime.progress import Progress, ProgressLines
from tlora.runtime.recording import Recorder
from tlora.training.driver import JobDriver
from tlora.training.engine import Engine
from tlora.training.loop import run_jobs

DEFAULT_BUDGET = {"cpu": 1024, "cuda": 8192}
"""Tokens of a nano-batch: past the knee on two CPU cores and on one H200 (docs/log.md)."""


@dataclass(frozen=True, slots=True)
class RunResult:
    output: Path
    jobs: dict[str, JobResult] = field(default_factory=dict[str, JobResult])

    @property
    def failed(self) -> list[str]:
        return [name for name, result in self.jobs.items() if result.status == "failed"]


def train(
    spec: RunSpec, *, output: Path, fresh: bool = False, progress: Progress | None = None
) -> RunResult:
    """Train every job of the spec. Raises for what is wrong before training starts; afterwards a
    job that fails is a result, and the others go on."""
    quieten_libraries()
    progress = progress or ProgressLines()
    device = resolve_device(spec.engine.device)
    limit = context_length(load_config(spec.base))
    data = prepare_jobs(spec, limit=limit)
    for name, prepared in data.items():
        progress.say(*(f"{name}: {line}" for line in prepared.report.lines()))
    model = load_super_model(spec, device)
    starts = {job.name: adapter_start(job, model) for job in spec.jobs}

    directory = RunDirectory(Path(output))
    directory.create(fresh=fresh)
    replace_text(directory.root / "resolved.yaml", dump_spec(spec))
    directory.write_json(directory.root / "run.json", describe_run(spec, device))

    budget = nano_batch_tokens(spec, device, data)
    engine = Engine(
        model,
        budget_tokens=budget,
        bucket_step=64 if device.type == "cpu" else None,
        exact=spec.engine.isolation == "exact",
    )
    drivers = []
    for job in spec.jobs:
        driver = JobDriver(job, data[job.name].train, data[job.name].evaluation)
        driver.attach(engine, starts[job.name])
        drivers.append(driver)
    recorder = Recorder(directory, spec.base, engine, progress)
    recorder.start(drivers, budget)
    try:
        run_jobs(engine, drivers, recorder)
    finally:
        directory.close()
    progress.finish(recorder.results, directory.root)
    return RunResult(directory.root, {result.job: result for result in recorder.results})


def load_super_model(spec: RunSpec, device: torch.device) -> SuperModel:
    return SuperModel(
        load_base(spec.base, device),
        reserve_rows=sum(job.lora.r for job in spec.jobs),
        per_sequence=spec.engine.isolation == "exact",
        gradient_checkpointing=spec.engine.gradient_checkpointing,
    )


def adapter_start(job: JobSpec, model: SuperModel) -> AdapterWeights:
    if job.init_from is None:
        return model.new_adapter(job)
    check_start(job, model.targets)
    return start_of(job, model.targets).weights


def nano_batch_tokens(spec: RunSpec, device: torch.device, data: dict[str, PreparedData]) -> int:
    """The token budget: what the spec says, or the device's default, but at least the longest
    sequence where every nano-batch must have one size."""
    chosen = spec.engine.nano_batch_tokens
    budget = DEFAULT_BUDGET[device.type] if chosen == "auto" else chosen
    if spec.engine.isolation != "exact":
        return budget
    return max(budget, *(int(prepared.train.lengths.max()) for prepared in data.values()))


def describe_run(spec: RunSpec, device: torch.device) -> dict[str, object]:
    return {
        "v": 1,
        "base": spec.base.model,
        "jobs": [job.name for job in spec.jobs],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "isolation": spec.engine.isolation,
        "versions": {
            "tlora": tlora.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "started": time.time(),
    }
