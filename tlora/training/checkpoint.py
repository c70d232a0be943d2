"""A job on disk: all that its later steps depend on, whole or not at all.

Every save is a new directory, written beside its place, synced, then renamed, so a crash at any
moment leaves the ones before it untouched. A manifest holds the size and sha256 of every file; the
loader takes the newest checkpoint whose files match. No pickles: tensors are safetensors, the rest
is JSON.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

from tlora.core.errors import TloraError
from tlora.model.adapters import LoraPair
from tlora.model.tensor_file import Written, write_tensors
from tlora.training.engine_job import JobState

VERSION = 1
ADAPTER = "adapter.safetensors"
OPTIMIZER = "optimizer.safetensors"
CURSOR = "cursor.json"
MANIFEST = "manifest.json"
FILES = (ADAPTER, OPTIMIZER, CURSOR)


class CheckpointDamaged(TloraError):
    """A checkpoint's files are not what its manifest says."""


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    state: JobState
    progress: dict[str, object]
    """What the job's driver keeps: cursor, counts, best evaluation."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    checkpoint: Checkpoint | None
    """The newest whole one, or None if there is none."""

    path: Path | None
    damaged: list[str]
    """What newer ones were passed over for."""


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def save_checkpoint(parent: Path, job: str, checkpoint: Checkpoint) -> Path:
    """Write a new checkpoint under `parent`. Raises OSError, leaving what was there."""
    name = checkpoint_name(checkpoint.state.step)
    parent.mkdir(parents=True, exist_ok=True)
    staged = parent / f".{name}.{os.getpid()}"
    shutil.rmtree(staged, ignore_errors=True)
    try:
        staged.mkdir()
        _fill(staged, job, checkpoint)
        sync_directory(staged)
        target = parent / name
        if target.exists():
            # The same step again, after a resume: the old one stays until the new one is there.
            os.rename(target, parent / f".{name}.old")
        os.rename(staged, target)
        shutil.rmtree(parent / f".{name}.old", ignore_errors=True)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    sync_directory(parent)
    return target


def _fill(staged: Path, job: str, checkpoint: Checkpoint) -> None:
    state = checkpoint.state
    cursor = json.dumps({"v": VERSION, **checkpoint.progress}).encode()
    _write_synced(staged / CURSOR, cursor)
    written = {
        ADAPTER: write_tensors(staged / ADAPTER, _adapter_tensors(state)),
        OPTIMIZER: write_tensors(staged / OPTIMIZER, _optimizer_tensors(state)),
        CURSOR: Written(len(cursor), hashlib.sha256(cursor).hexdigest()),
    }
    manifest = {
        "v": VERSION,
        "job": job,
        "step": state.step,
        "files": {
            file: {"bytes": each.num_bytes, "sha256": each.sha256} for file, each in written.items()
        },
    }
    signed = {**manifest, "sha256": _manifest_digest(manifest)}
    _write_synced(staged / MANIFEST, json.dumps(signed, indent=2).encode())


def prune(parent: Path, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints, and what crashed saves left."""
    for rubbish in parent.glob(".step-*"):
        shutil.rmtree(rubbish, ignore_errors=True)
    if keep is not None:
        for old in checkpoints(parent)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)


def checkpoints(parent: Path) -> list[Path]:
    """Oldest first."""
    return sorted(path for path in parent.glob("step-*") if path.is_dir())


def find_newest(parent: Path) -> Found:
    """The newest checkpoint that is whole."""
    damaged: list[str] = []
    for path in reversed(checkpoints(parent)):
        try:
            return Found(load_checkpoint(path), path, damaged)
        except CheckpointDamaged as error:
            damaged.append(str(error))
    return Found(None, None, damaged)


def read_progress(path: Path) -> dict[str, Any]:
    """Without a look at the rest. Raises CheckpointDamaged."""
    try:
        return json.loads((path / CURSOR).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointDamaged(f"{path}: cannot be read: {error}") from None


def load_checkpoint(path: Path) -> Checkpoint:
    """Read and check every byte. Raises CheckpointDamaged."""
    manifest = _read_manifest(path)
    contents = {file: _read_checked(path / file, manifest["files"][file]) for file in FILES}
    try:
        progress = json.loads(contents[CURSOR])
        adapter = load(contents[ADAPTER])
        moments = load(contents[OPTIMIZER])
    except Exception as error:
        raise CheckpointDamaged(f"{path}: cannot be read: {error}") from None
    weights = {
        key.removesuffix(".lora_A"): LoraPair(a=tensor, b=adapter[f"{key[:-1]}B"])
        for key, tensor in adapter.items()
        if key.endswith(".lora_A")
    }
    state = JobState(
        step=manifest["step"],
        weights=weights,
        exp_avg=_with_suffix(moments, ".exp_avg"),
        exp_avg_sq=_with_suffix(moments, ".exp_avg_sq"),
    )
    return Checkpoint(state, progress)


def _adapter_tensors(state: JobState) -> dict[str, torch.Tensor]:
    tensors = {}
    for path, pair in state.weights.items():
        tensors[f"{path}.lora_A"] = pair.a
        tensors[f"{path}.lora_B"] = pair.b
    return tensors


def _optimizer_tensors(state: JobState) -> dict[str, torch.Tensor]:
    return {f"{key}.exp_avg": tensor for key, tensor in state.exp_avg.items()} | {
        f"{key}.exp_avg_sq": tensor for key, tensor in state.exp_avg_sq.items()
    }


def _with_suffix(tensors: dict[str, torch.Tensor], suffix: str) -> dict[str, torch.Tensor]:
    return {
        key.removesuffix(suffix): tensor for key, tensor in tensors.items() if key.endswith(suffix)
    }


def _manifest_digest(manifest: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _read_manifest(path: Path):
    """The manifest vouches for the files, and its own digest for the manifest."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        digest = manifest.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointDamaged(f"{path}: its manifest cannot be read: {error}") from None
    if digest != _manifest_digest(manifest):
        raise CheckpointDamaged(f"{path}: its manifest is not what was saved")
    if manifest["v"] != VERSION:
        raise CheckpointDamaged(f"{path}: was written by another version")
    return manifest


def _read_checked(path: Path, expected: dict[str, object]) -> bytes:
    try:
        if path.stat().st_size != expected["bytes"]:
            raise CheckpointDamaged(
                f"{path}: {path.stat().st_size} bytes instead of {expected['bytes']}"
            )
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointDamaged(f"{path}: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise CheckpointDamaged(f"{path}: its contents are not what was saved")
    return data


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make names in a directory survive a power loss."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
