"""Adapters out: written, read back, and compared by their logits before anybody is told of them.

Logits are compared in float32 whatever the base's format: in bfloat16 a forward's rounding is
larger than what a scale off by one per cent changes.
"""

import shutil
from pathlib import Path

import torch

from tlora.core.errors import AdapterError
from tlora.core.job import BaseSpec, JobSpec
from tlora.core.sequence import TokenSequence
from tlora.model.adapters import AdapterWeights
from tlora.model.packing import Share, pack
from tlora.model.peft_format import export_adapter, read_adapter
from tlora.model.plain import plain_adapter
from tlora.model.precision import in_float32
from tlora.model.probe import TOLERANCE
from tlora.model.super_model import SuperModel
from tlora.runtime.directory import replace_directory

PROBE_TOKENS = 32
LOGITS_TOLERANCE = TOLERANCE[torch.float32]


def export(
    directory: Path,
    weights: AdapterWeights,
    job: JobSpec,
    base: BaseSpec,
    model: SuperModel,
    probe: TokenSequence,
) -> None:
    """Put a job's adapter at `directory`, verified; a previous one stays until the new one is
    whole."""
    expected = adapter_logits(model, weights, job.lora.scale, probe)

    def fill(staged: Path) -> None:
        export_adapter(
            staged,
            weights,
            job.lora,
            base_model=base.model,
            revision=base.revision,
            targets=model.targets,
        )
        back = read_adapter(staged, model.targets)
        error = logits_error(plain_logits(model, back.weights, back.scale, probe), expected)
        if not error <= LOGITS_TOLERANCE:
            raise AdapterError(
                f"job '{job.name}': the exported files give other logits than the trained adapter "
                f"(by {error:.1%})"
            )

    replace_directory(directory, fill)


def copy(source: Path, directory: Path) -> None:
    """Put a copy of an exported adapter at `directory`, whole or not at all."""

    def fill(staged: Path) -> None:
        shutil.copytree(source, staged, dirs_exist_ok=True)

    replace_directory(directory, fill)


def logits_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest logit."""
    return float((logits - expected).abs().max() / expected.abs().max())


def adapter_logits(
    model: SuperModel, weights: AdapterWeights, scale: float, probe: TokenSequence
) -> torch.Tensor:
    """Logits of the probe through the pool and the kernels, under a name no job can have."""
    model.attach("(probe)", weights, scale=scale)
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
