"""A profile where nobody has measured one: from the base's shape and rough figures of a device.

Good enough to tell that small batches share a device well and large ones do not; not good enough to
believe a time it predicts. Whoever uses it says so.
"""

import math

from tlora.costs.memory import Memory
from tlora.costs.model import NanoBatchTime, StepTime
from tlora.costs.profile import Profile
from tlora.runtime.benchmark.shapes import Shape
from tlora.runtime.budget import RECOMPUTED_SHARE
from tlora.runtime.requests import widths
from tlora.training.compose import buckets_for
from tlora.training.sizing import CPU_BUCKET_STEP

FLOPS_PER_S = {"cpu": 30e9, "cuda": 300e12}
"""Of one thread, and of one large GPU in half precision."""

BYTES_PER_S = {"cpu": 8e9, "cuda": 3e12}
LINEAR_S = {"cpu": 20e-6, "cuda": 25e-6}
"""Of launching one linear and what is around it, forward and backward."""

ADAPTED = 2.5
"""A token through an adapter, against what its products alone would take: they are thin."""

ROW_COPIES = 0.91
"""What a token keeps, in widths of all linears. From the measured profiles of an H200: 0.88 with
8B, 0.91 with 1B."""

FIXED_BYTES = 1.7e9
"""Workspaces and a logits' chunk, with what peaks were above the fit; from the same profiles."""

OUTSIDE_BYTES = 10**9
"""Of a GPU, taken by its context."""

STEP_PARAMETER_BYTES = 40
"""Read and written by AdamW and clipping for every parameter."""


def assumed_profile(
    shape: Shape,
    device_type: str,
    *,
    budget: int,
    device_bytes: int | None = None,
    recomputed: bool = False,
) -> Profile:
    """On one device of this type; memory that nobody names is taken to be enough. `recomputed`:
    under gradient checkpointing."""
    flops, bandwidth = FLOPS_PER_S[device_type], BYTES_PER_S[device_type]
    weights = shape.parameters * shape.dtype.itemsize
    per_rank = widths(shape.targets)
    launches = LINEAR_S[device_type] * len(shape.targets)
    return Profile(
        device=f"{device_type}, assumed",
        dtype=str(shape.dtype).removeprefix("torch."),
        shape=shape.name,
        versions={},
        points=(),
        time=NanoBatchTime(
            fixed_s=1e-4,
            segment_s=launches / 20,
            # Forward and backward stream the weights once each.
            flat_s=launches + 2 * weights / bandwidth,
            # Forward, and backward to the inputs: the base's own gradients are not taken.
            row_s=4 * shape.matmul_parameters / flops,
            square_s=0.0,
            lora_s=0.1 * 4 * shape.matmul_parameters / flops,
            rank_s=ADAPTED * 6 * per_rank / flops,
            sharpness=2.0,
        ),
        steps=StepTime(pass_s=launches, job_s=1e-4, parameter_s=STEP_PARAMETER_BYTES / bandwidth),
        memory=assumed_memory(
            weights,
            ROW_COPIES * per_rank * shape.dtype.itemsize * (RECOMPUTED_SHARE if recomputed else 1),
            device_bytes,
        ),
        heldout_error_pct=math.nan,
        parameters_per_rank=per_rank,
        budget_tokens=budget,
        buckets=buckets(budget, device_type),
        attach_s=0.05,
        detach_s=0.05,
        warmup_s=10.0 if device_type == "cuda" else 0.5,
        load_s=1.0 + weights / 1e9,
        notes=("assumed from the base's shape, not measured",),
    )


def assumed_memory(weights: int, row_bytes: float, device_bytes: int | None) -> Memory:
    known = device_bytes is not None
    return Memory(
        weights_bytes=weights,
        device_bytes=device_bytes,
        outside_bytes=OUTSIDE_BYTES if known else None,
        fixed_bytes=FIXED_BYTES if known else None,
        row_bytes=row_bytes if known else None,
        reserve_bytes=0.0 if known else None,
    )


def buckets(budget: int, device_type: str) -> tuple[int, ...]:
    return buckets_for(budget, step=CPU_BUCKET_STEP if device_type == "cpu" else None)
