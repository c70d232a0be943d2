"""A job's figures as it trains: the lines of its metrics.jsonl."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from tlora.runtime.directory import RunDirectory
from tlora.training.driver import JobDriver
from tlora.training.preference import FIGURES

FIELDS = ("loss", "lr", "grad_norm", "target_tokens")


def metrics_path(directory: RunDirectory, job: str) -> Path:
    return directory.job(job) / "metrics.jsonl"


def metrics_bytes(directory: RunDirectory, job: str) -> int:
    """So much of it is there."""
    path = metrics_path(directory, job)
    return path.stat().st_size if path.exists() else 0


def cut_back(directory: RunDirectory, job: str, size: int) -> None:
    """To this many bytes, if there are more."""
    if metrics_bytes(directory, job) > size:
        # Not taken away: it may be open, and lines would go to a file that has no name.
        os.truncate(metrics_path(directory, job), size)


def metrics_line(driver: JobDriver, kind: str, values: Mapping[str, object]) -> dict[str, object]:
    """Of the job as it stands now."""
    return {
        "v": 1,
        "kind": kind,
        "job": driver.name,
        "step": driver.step,
        "total_steps": driver.total_steps,
        "epoch": round(driver.epoch, 4),
        **{name: values.get(name) for name in FIELDS},
        "tokens_seen": driver.tokens_seen,
        "sequences_seen": driver.sequences_seen,
        "nano_batches": values.get("nano_batches"),
        "tokens_per_s": values.get("tokens_per_s"),
        **{name: values[name] for name in FIGURES if name in values},
        "time": time.time(),
    }
