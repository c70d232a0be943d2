"""The same command again: what is done, what goes on from a checkpoint, and what must not have
changed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlora.config import changed_fields, load_spec
from tlora.core.errors import SpecError
from tlora.core.job import EngineSpec, JobSpec, RunSpec
from tlora.model.peft_format import WEIGHTS
from tlora.runtime.directory import JobResult, RunDirectory
from tlora.training.checkpoint import (
    Checkpoint,
    CheckpointDamaged,
    checkpoints,
    find_newest,
    read_progress,
)

FINISHED = ("completed", "stopped_early", "cancelled")
TROUBLED = ("failed", "paused")


@dataclass(frozen=True, slots=True, eq=False)
class Resumption:
    """Where one job of a run stands."""

    result: JobResult | None = None
    """Set if the job is over."""

    checkpoint: Checkpoint | None = None
    """Set if it goes on from here."""

    damaged: tuple[str, ...] = ()
    """Newer checkpoints that were passed over."""


def check_unchanged(directory: RunDirectory, spec: RunSpec) -> tuple[JobSpec, ...]:
    """A started job's settings are fixed. New jobs may be added, and the engine's settings may
    change where no bits depend on them. Returns the jobs of the run that `spec` leaves out."""
    path = directory.root / "resolved.yaml"
    try:
        old = load_spec(path)
    except SpecError as error:
        raise SpecError(
            f"--output: {path} cannot be read ({error}); add --fresh to start over"
        ) from error
    if old.base != spec.base:
        raise SpecError(
            f"{directory.root} was started with base {old.base}; name another "
            "--output, or add --fresh to start over",
            field="base",
        )
    for field in engine_changes(old.engine, spec.engine):
        raise SpecError(
            f"has changed since {directory.root} was started, and the bits of its jobs depend on "
            "it; change it back, name another --output, or add --fresh to start over",
            field=field,
        )
    before = {job.name: job for job in old.jobs}
    for job in spec.jobs:
        if job.name in before:
            _check_job(before[job.name], job, directory.root)
    named = {job.name for job in spec.jobs}
    return tuple(job for job in old.jobs if job.name not in named)


def engine_changes(old: EngineSpec, new: EngineSpec) -> list[str]:
    """Settings that decide the bits of exact isolation; without it none matters to a job."""
    if "exact" not in (old.isolation, new.isolation):
        return []
    names = ("isolation", "nano_batch_tokens", "gradient_checkpointing", "compile")
    return [f"engine.{name}" for name in names if getattr(old, name) != getattr(new, name)]


def check_same_bits(root: Path, now: dict[str, Any]) -> None:
    """An exact run goes on only where its bits are still the same: on the same device and build,
    with the same products in tiles. What a run without a whole `run.json` was, nobody knows."""
    try:
        old = json.loads((root / "run.json").read_text())
        before, after = (_decides_bits(about) for about in (old, now))
    except (OSError, ValueError, KeyError, TypeError):
        return
    for what, value in after.items():
        if before[what] != value:
            raise SpecError(
                f"{root} was started with {what} {before[what]} and would go on with {value}, "
                "which may give other bits; go back to that, name another --output, or add "
                "--fresh",
                field="engine.isolation",
            )


def _decides_bits(about: dict[str, Any]) -> dict[str, object]:
    exact = about["exact"]
    return {
        "device": about["device"],
        "torch": about["versions"]["torch"],
        "nano-batches of": exact["num_rows"],
        "products in tiles:": ", ".join(exact["tiled"]) or "none",
        # Records from before there was a choice do not name it.
        "adapters computed by": exact.get("adapters", "torch"),
        "frozen products computed by": exact.get("frozen", "torch"),
        "attention computed by": exact.get("attention", "torch"),
    }


def _check_job(old: JobSpec, new: JobSpec, root: Path) -> None:
    changed = changed_fields(old, new)
    if changed:
        raise SpecError(
            f"has changed since {root} was started; give the job another name, name another "
            "--output, or add --fresh to start over",
            job=new.name,
            field=changed[0],
        )


def resumption(directory: RunDirectory, job: JobSpec) -> Resumption:
    """Where the job stands on disk; failed and paused jobs are tried again."""
    result = finished(directory, job)
    if result is not None:
        return Resumption(result=result)
    found = find_newest(directory.root / job.name / "checkpoints")
    return Resumption(checkpoint=found.checkpoint, damaged=tuple(found.damaged))


def finished(directory: RunDirectory, job: JobSpec) -> JobResult | None:
    """What came of the job, if it is over."""
    folder = directory.root / job.name
    result = read_result(folder / "result.json")
    adapter = folder / "adapter" / WEIGHTS
    over = result is not None and result.status in FINISHED
    # One that was cancelled before it began has none.
    shown = result is not None and (result.adapter is None or adapter.is_file())
    return result if over and shown else None


def tried(directory: RunDirectory, job: JobSpec) -> JobResult | None:
    """What came of the job, if it is over or did not get through."""
    result = read_result(directory.root / job.name / "result.json")
    if result is not None and result.status in TROUBLED:
        return result
    return finished(directory, job)


def read_result(path: Path) -> JobResult | None:
    try:
        fields = json.loads(path.read_text())
        fields.pop("v")
        return JobResult(**fields)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_saved_with(directory: RunDirectory, job: str, evaluated: int) -> bool:
    """A checkpoint knows of the evaluation after this step: so the best adapter of that time is on
    disk, for it was written before."""
    found = checkpoints(directory.root / job / "checkpoints")
    if saved_steps(directory, job) != evaluated or not found:
        return saved_steps(directory, job) >= evaluated
    try:
        return not read_progress(found[-1])["evaluation_due"]
    except CheckpointDamaged:
        return False


def saved_steps(directory: RunDirectory, job: str) -> int:
    """Of the newest checkpoint, by its name; 0 without one."""
    found = checkpoints(directory.root / job / "checkpoints")
    return int(found[-1].name.removeprefix("step-")) if found else 0
