"""A profile where nobody has measured one: from the base's shape and rough figures of a device.

Good enough to tell that small batches share a device well and large ones do not; not good enough to
believe a time it predicts. Whoever uses it says so.
"""

import math

from tlora.costs.memory import Memory
from tlora.costs.model import NanoBatchTime, StepTime
from tlora.costs.profile import Profile
from tlora.runtime.benchmark.shapes import Shape
from tlora.runtime.requests import widths
from tlora.training.compose import buckets_for
from tlora.training.engine import CPU_BUCKET_STEP

FLOPS_PER_S = {"cpu": 30e9, "cuda": 300e12}
"""Of one thread, and of one large GPU in half precision."""

BYTES_PER_S = {"cpu": 8e9, "cuda": 3e12}
LINEAR_S = {"cpu": 20e-6, "cuda": 25e-6}
"""Of launching one linear and what is around it, forward and backward."""

ADAPTED = 2.5
"""A token through an adapter, against what its products alone would take: they are thin."""

STEP_PARAMETER_BYTES = 40
"""Read and written by AdamW and clipping for every parameter."""


def assumed_profile(shape: Shape, device_type: str, *, budget: int) -> Profile:
    """On one device of this type; its memory is taken to be enough."""
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
        memory=Memory(
            weights_bytes=weights,
            device_bytes=None,
            outside_bytes=None,
            fixed_bytes=None,
            row_bytes=None,
            reserve_bytes=None,
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


def buckets(budget: int, device_type: str) -> tuple[int, ...]:
    return buckets_for(budget, step=CPU_BUCKET_STEP if device_type == "cpu" else None)
