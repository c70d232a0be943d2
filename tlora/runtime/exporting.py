"""Adapters out: written, read back, and compared before anybody is told of them.

The logits of the trained job are compared with those of its matrices, put in place the plain way;
the files with the matrices, bit for bit. The first needs the model and is launched between
nano-batches; the second is done by whoever writes the files.

Logits are compared in float32 whatever the base's format: in bfloat16 a forward's rounding is
larger than what a scale off by one per cent changes.
"""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from tlora.core.errors import AdapterError, JobFailed
from tlora.core.job import BaseSpec, JobSpec
from tlora.core.sequence import TokenSequence
from tlora.model.adapters import AdapterWeights
from tlora.model.job_rows import adapter_of
from tlora.model.packing import Share, pack
from tlora.model.peft_format import export_adapter, read_adapter
from tlora.model.plain import plain_adapter
from tlora.model.precision import in_float32
from tlora.model.probe import TOLERANCE
from tlora.model.snapshot import Snapshot
from tlora.model.super_model import SuperModel
from tlora.model.targets import Target
from tlora.runtime.directory import replace_directory

PROBE_TOKENS = 32
LOGITS_TOLERANCE = TOLERANCE[torch.float32]
SCALE_ROUNDING = 1e-12
"""A file's scale is computed from its alpha: the last bits of a float64 may differ."""


def begin_export(
    weights: Snapshot[AdapterWeights],
    job: JobSpec,
    base: BaseSpec,
    model: SuperModel,
    probe: TokenSequence | None,
) -> Callable[[Path], None]:
    """Look at the logits of an attached job, whose matrices `weights` are, with the model in hand;
    without a probe that is left to whoever chooses among many adapters. What comes back needs no
    model and no device: it puts the adapter at a directory, verified, and a previous one stays
    until the new one is whole."""
    difference = look(model, job, probe) if probe is not None else None
    targets = model.targets

    def check_logits() -> None:
        error = difference.result() if difference is not None else 0.0
        if not error <= LOGITS_TOLERANCE:
            raise AdapterError(
                f"job '{job.name}': the exported matrices give other logits than the trained "
                f"adapter (by {error:.1e} of the largest; {LOGITS_TOLERANCE:.0e} may be rounding)"
            )

    def export(directory: Path) -> None:
        export_matrices(directory, weights.result(), job, base, targets, check_logits)

    return export


def export_matrices(
    directory: Path,
    trained: AdapterWeights,
    job: JobSpec,
    base: BaseSpec,
    targets: dict[str, Target],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Matrices that lie in host memory, read back and compared; `check` has the last word."""

    def fill(staged: Path) -> None:
        export_adapter(
            staged,
            trained,
            job.lora,
            base_model=base.model,
            revision=base.revision,
            targets=targets,
        )
        back = read_adapter(staged, targets)
        same_scale = math.isclose(back.scale, job.lora.scale, rel_tol=SCALE_ROUNDING)
        if not same_scale or not same_matrices(back.weights, trained):
            raise AdapterError(
                f"job '{job.name}': the exported files hold another adapter than was trained"
            )
        check()

    replace_directory(directory, fill)


def look(model: SuperModel, job: JobSpec, probe: TokenSequence) -> Snapshot[float]:
    """How far the logits of an attached job are from those that its matrices give by hooks. The
    matrices are read where they lie, and nobody waits for the result."""
    matrices = adapter_of(model.rows(job.name).matrices("value"))
    trained = _logits(model, job.name, probe)
    return model.figure(
        difference_of(plain_logits(model, matrices, job.lora.scale, probe), trained)
    )


def same_matrices(found: AdapterWeights, expected: AdapterWeights) -> bool:
    """To the bit, but for the sign of a zero."""
    return found.keys() == expected.keys() and all(
        torch.equal(pair.a, expected[path].a) and torch.equal(pair.b, expected[path].b)
        for path, pair in found.items()
    )


def copy(source: Path, directory: Path) -> None:
    """Put a copy of an exported adapter at `directory`, whole or not at all."""

    def fill(staged: Path) -> None:
        shutil.copytree(source, staged, dirs_exist_ok=True)

    replace_directory(directory, fill)


def logits_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest logit."""
    return float(difference_of(logits, expected))


def difference_of(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (logits - expected).abs().max() / expected.abs().max()


def adapter_logits(
    model: SuperModel, weights: AdapterWeights, scale: float, probe: TokenSequence
) -> torch.Tensor:
    """Logits of the probe through the pool and the kernels, under a name no job can have."""
    try:
        model.attach("(probe)", weights, scale=scale)
    except JobFailed as error:
        raise AdapterError(f"the adapter cannot be looked at: {error.message}") from error
    try:
        return _logits(model, "(probe)", probe)
    finally:
        model.detach("(probe)")


def plain_logits(
    model: SuperModel, weights: AdapterWeights, scale: float, probe: TokenSequence
) -> torch.Tensor:
    """The same by hooks on the frozen linears."""
    with plain_adapter(model.model, weights, scale):
        return _logits(model, "(nobody)", probe)


def base_logits(model: SuperModel, probe: TokenSequence) -> torch.Tensor:
    return _logits(model, "(nobody)", probe)


def _logits(model: SuperModel, job: str, probe: TokenSequence) -> torch.Tensor:
    ids = probe.input_ids[:PROBE_TOKENS]
    share = Share(job, [TokenSequence(ids, ids)], [0], [1.0])
    batch = pack([share], len(ids), model.device)
    with torch.no_grad(), in_float32(model.model), model.routed(batch, train=False):
        return model.logits(batch)
