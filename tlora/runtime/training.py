"""`tlora train`: a job file to adapters on disk, in this process."""

import platform
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

import tlora
from tlora.core.job import EngineSpec, JobSpec, RunSpec
from tlora.data.prepare import PreparedData
from tlora.model.loading import context_length, load_base, load_shape, resolve_device
from tlora.model.super_model import SuperModel
from tlora.model.targets import find_targets
from tlora.runtime.budget import nano_batch_tokens, room_for_tokens, tuning
from tlora.runtime.checking import check_targets, new_preparer, prepare_jobs
from tlora.runtime.data_lines import start_lines
from tlora.runtime.directory import JobResult, RunDirectory
from tlora.runtime.elastic.desk import Desk
from tlora.runtime.elastic.one_device import OneDevice
from tlora.runtime.elastic.places import Places
from tlora.runtime.elastic.roll import Again
from tlora.runtime.entering import adapter_start, enter_jobs
from tlora.runtime.environment import quieten_libraries
from tlora.runtime.giving_way import giving_way
from tlora.runtime.interrupts import interruptible
from tlora.runtime.live import choose_progress
from tlora.runtime.opening import Opening, open_run
from tlora.runtime.progress import MANY_JOBS, Progress
from tlora.runtime.recording import Recorder
from tlora.runtime.report import write_report
from tlora.runtime.resuming import check_same_bits, finished, saved_steps
from tlora.runtime.room import adapter_bytes, room_bytes
from tlora.runtime.sinks import Sinks, check_trackers
from tlora.runtime.threads import using_threads
from tlora.training.controller import Controller
from tlora.training.driver import JobDriver
from tlora.training.engine import Engine
from tlora.training.exactness import Exactness, prove_exact

ON_ONE_DEVICE = Again()

FAIR_TOKENS = 4096
"""Of a nano-batch that jobs must leave room for: past the knee of an 8B model on an H200
(docs/h200.md). More jobs than fit beside larger ones gain more than those would."""


@dataclass(frozen=True, slots=True)
class RunResult:
    output: Path
    jobs: dict[str, JobResult] = field(default_factory=dict[str, JobResult])
    interrupted: bool = False
    """A person asked to stop: what was not over is saved and goes on with the same command."""

    @property
    def failed(self) -> list[str]:
        """Jobs that did not get through: failed or paused."""
        return [name for name, job in self.jobs.items() if job.status in ("failed", "paused")]


def train(
    spec: RunSpec,
    *,
    output: Path | str,
    fresh: bool = False,
    progress: Progress | None = None,
    again: Again = ON_ONE_DEVICE,
) -> RunResult:
    """Train every job of the spec, going on where an earlier run in `output` stopped. Raises for
    what is wrong before training starts; afterwards a job that fails is a result, and the others
    go on. `again`: what the command that goes on with the run is to say."""
    quieten_libraries()
    check_trackers(spec.report_to)
    progress = progress or choose_progress()
    device = resolve_device(spec.engine.device)
    opening = open_run(spec, RunDirectory(Path(output)), fresh=fresh, again=again)
    try:
        with using_threads(None):
            return _train(opening, device, progress)
    finally:
        opening.directory.close()


def _train(opening: Opening, device: torch.device, progress: Progress) -> RunResult:
    spec, directory = opening.spec, opening.directory
    shape = load_shape(spec.base)
    targets = find_targets(shape)
    check_targets(spec, targets)
    preparer = new_preparer(spec.base)
    data = prepare_jobs(spec, limit=context_length(shape.config), preparer=preparer)
    budget = nano_batch_tokens(spec, device, data, shape.num_parameters())
    progress.say(*start_lines(spec.jobs, data, directory.root / "data.txt"))
    progress.say(*compiling_lines(spec.engine, device))
    places = Places(
        lambda job: adapter_bytes(job, targets),
        room_bytes=room_beside(spec, shape, device, data, budget),
        most=spec.engine.max_parallel,
    )
    for job in in_turn(opening):
        places.wait(job, data[job.name])
    here = [each.job for each in places.call([])]
    # Where all are over, room for one that may be submitted.
    rows = sum(job.lora.r for job in here) or max(job.lora.r for job in spec.jobs)
    model = load_super_model(spec, device, reserve_rows=rows)
    proof = None
    if spec.engine.isolation == "exact":
        with giving_way(device):
            proof = show_exact(model, spec, data, budget)
        if opening.goes_on:
            check_same_bits(directory.root, describe_run(spec, device, proof))
        progress.say(proof.line)
    starts = {job.name: adapter_start(job, model) for job in here}
    for each in places.waiting:
        # What is wrong with a job is told now.
        if each.job.init_from is None:
            model.check_reach(each.job)
        else:
            adapter_start(each.job, model)

    tuned = tuning(spec, device, budget=budget, fits=room_for_tokens(spec, model))
    engine = Engine(
        model,
        budget_tokens=tuned.start if tuned else budget,
        exact=spec.engine.isolation == "exact",
        controller=Controller(tuned) if tuned else None,
    )
    sinks = Sinks(spec.report_to, directory.root, progress.say)
    recorder = Recorder(directory, spec.base, engine, progress, sinks)
    recorder.data_keys = {name: prepared.key for name, prepared in data.items()}
    desk: Desk | None = None
    try:
        opening.create()
        opening.write(data, describe_run(spec, device, proof))
        drivers = enter_jobs(spec, data, starts, recorder, places)
        waiting = [
            JobDriver(each.job, each.data.train, each.data.evaluation) for each in places.waiting
        ]
        recorder.start(drivers, tuned, waiting=waiting)
        floor = OneDevice(recorder, drivers, places)
        desk = opening.desk(floor.names, shape, device, progress, preparer=preparer, in_turns=True)
        recorder.on_result = desk.ended
        with giving_way(device), interruptible(on_first=progress.on_interrupt) as interrupt:
            try:
                unfinished = floor.run(desk, interrupt)
            except Exception:
                recorder.rescue(list(floor.drivers.values()))
                raise
        recorder.save(unfinished)
        left_lines = _left_lines(floor, desk)
        progress.say(*left_lines)
    finally:
        recorder.close()
        if desk is not None:
            desk.close()
    leave_report(directory.root, progress)
    progress.finish(recorder.results, directory.root)
    results = {result.job: result for result in recorder.results}
    return RunResult(directory.root, results, interrupted=bool(unfinished or left_lines))


def _left_lines(floor: OneDevice, desk: Desk) -> list[str]:
    """What a run that was stopped says of jobs that did not get in."""
    cancelled = floor.arrivals.dismissed
    lines = [
        f"{name}: {'is cancelled' if name in cancelled else 'comes in'} when the run goes on"
        for name in floor.arrivals.names
    ]
    names = floor.places.names
    if len(names) < MANY_JOBS:
        lines += [f"{name}: has its turn when the run goes on" for name in names]
    else:
        lines.append(f"{len(names)} jobs have their turns when the run goes on")
    if desk.is_preparing:
        lines.append("what was asked last is done when the run goes on")
    return lines


def leave_report(root: Path, progress: Progress) -> None:
    """The adapters are safe by now: a disk too full for the report does not fail the run."""
    try:
        write_report(root)
    except OSError as error:
        progress.say(f"the report could not be written: {error}")


def in_turn(opening: Opening) -> list[JobSpec]:
    """The jobs that are not over, as they are to have a place: those that had begun first, then in
    the order of the file."""
    if not opening.goes_on:
        return list(opening.spec.jobs)
    directory = opening.directory
    left = [job for job in opening.spec.jobs if finished(directory, job) is None]
    return sorted(left, key=lambda job: not saved_steps(directory, job.name))


def room_beside(
    spec: RunSpec,
    shape: PreTrainedModel,
    device: torch.device,
    data: Mapping[str, PreparedData],
    budget: int,
) -> float | None:
    """For adapters, in bytes, where nano-batches of a fair size and every row have room too."""
    given = spec.engine.nano_batch_tokens
    tokens = given if isinstance(given, int) else min(budget, FAIR_TOKENS)
    for prepared in data.values():
        views = [view for view in (prepared.train, prepared.evaluation) if view is not None]
        tokens = max(tokens, *(int(view.lengths.max()) for view in views))
    recompute = spec.engine.gradient_checkpointing
    return room_bytes(spec.base, shape, device, budget_tokens=tokens, recompute=recompute)


def load_super_model(
    spec: RunSpec, device: torch.device, *, reserve_rows: int | None = None
) -> SuperModel:
    """With rows for all jobs of the run, unless another number is known to do."""
    return SuperModel(
        load_base(spec.base, device),
        reserve_rows=reserve_rows or sum(job.lora.r for job in spec.jobs),
        per_sequence=spec.engine.isolation == "exact",
        gradient_checkpointing=spec.engine.gradient_checkpointing,
        compiled=compiles(spec.engine, device),
    )


def compiles(engine: EngineSpec, device: torch.device) -> bool:
    return device.type == "cuda" if engine.compile == "auto" else engine.compile


def compiling_lines(engine: EngineSpec, device: torch.device) -> list[str]:
    """For whoever wonders what becomes of the first minute."""
    if not compiles(engine, device):
        return []
    return [
        "layers are compiled in the first nano-batches, which may take a minute or two; "
        "engine.compile: false trains without, more slowly"
    ]


def show_exact(
    model: SuperModel,
    spec: RunSpec,
    data: dict[str, PreparedData],
    budget: int,
    *,
    ranks: Collection[int] = (),
) -> Exactness:
    """On the jobs' own ranks and these, and lengths from their shortest row to their longest."""
    lengths = np.concatenate([prepared.train.sequence_lengths for prepared in data.values()])
    return prove_exact(
        model,
        budget,
        ranks={*ranks, *(job.lora.r for job in spec.jobs)},
        lengths=[int(length) for length in np.quantile(lengths, (0.0, 0.5, 1.0), method="nearest")],
    )


def describe_run(spec: RunSpec, device: torch.device, proof: Exactness | None) -> dict[str, object]:
    return {
        "v": 1,
        "base": spec.base.model,
        "quantization": spec.base.quantization,
        "jobs": [job.name for job in spec.jobs],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "isolation": spec.engine.isolation,
        "exact": asdict(proof) if proof else None,
        "versions": {
            "tlora": tlora.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "started": time.time(),
    }
