"""How much memory there is for the adapters of trials, and for which of them a pool is made."""

from collections.abc import Mapping

import torch
from transformers.modeling_utils import PreTrainedModel

from tlora.core.job import JobSpec
from tlora.core.sweep import SweepSpec
from tlora.model.memory import activation_bytes
from tlora.model.targets import find_targets
from tlora.runtime.budget import KEPT_FREE, RECOMPUTED_SHARE
from tlora.runtime.requests import widths
from tlora.runtime.sweeps.trials import MadeTrial


def room_bytes(
    shape: PreTrainedModel, device: torch.device, *, budget_tokens: int, recompute: bool
) -> float | None:
    """Beside the base and a nano-batch of this size, before the base is loaded. A CPU's memory is
    not asked: None. What the estimate misses is found out by trying."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    itemsize = shape.dtype.itemsize
    weights = shape.num_parameters() * itemsize
    vocabulary = int(getattr(shape.config.get_text_config(), "vocab_size", 0))
    each = activation_bytes(widths(find_targets(shape).values()), vocabulary, itemsize)
    activations = budget_tokens * each * (RECOMPUTED_SHARE if recompute else 1.0)
    return max(0.0, (1 - KEPT_FREE) * free - weights - activations)


def at_once(
    made: Mapping[str, MadeTrial], room: float | None, spec: SweepSpec, *, devices: int = 1
) -> tuple[JobSpec, ...]:
    """The trials that a pool is made for: as many of the largest as may be attached together, dealt
    over so many devices."""
    largest = sorted(made.values(), key=lambda each: -each.plan.adapter_bytes)
    most, used = -(-len(largest) // devices), 0.0
    if spec.search.max_parallel is not None:
        most = min(most, spec.search.max_parallel)
    taken: list[JobSpec] = []
    for each in largest:
        used += each.plan.adapter_bytes
        if taken and ((room is not None and used > room) or len(taken) == most):
            break
        taken.append(each.job)
    return tuple(taken)


def worker_rows(
    made: Mapping[str, Mapping[str, MadeTrial]],
    room: float | None,
    specs: Mapping[str, SweepSpec],
    *,
    devices: int,
) -> int:
    """Rank rows of a worker's pool. A device has the trials of one task at a time; of several
    tasks, one may have a single device for all of its own. Where more come the pool grows."""
    share = devices if len(specs) == 1 else 1
    return max(
        sum(job.lora.r for job in at_once(made[task], room, spec, devices=share))
        for task, spec in specs.items()
    )
