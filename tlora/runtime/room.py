"""How much memory of a device there is for adapters, and what one takes: before anything is loaded.
What the estimates miss is found out by trying."""

from collections.abc import Mapping

import torch
from transformers.modeling_utils import PreTrainedModel

from tlora.core.job import BaseSpec, JobSpec
from tlora.costs.memory import BYTES_PER_ADAPTER_PARAMETER
from tlora.model.memory import activation_bytes
from tlora.model.quantising import saved_bytes
from tlora.model.targets import Target, find_targets
from tlora.runtime.budget import KEPT_FREE, RECOMPUTED_SHARE
from tlora.runtime.requests import widths


def room_bytes(
    base: BaseSpec,
    shape: PreTrainedModel,
    device: torch.device,
    *,
    budget_tokens: int,
    recompute: bool,
) -> float | None:
    """Beside the base and a nano-batch of this size. A CPU's memory is not asked: None."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    itemsize = shape.dtype.itemsize
    targets = find_targets(shape).values()
    weights = shape.num_parameters() * itemsize
    if base.quantization != "none":
        weights -= saved_bytes(targets, base.quantization, itemsize)
    vocabulary = int(getattr(shape.config.get_text_config(), "vocab_size", 0))
    each = activation_bytes(widths(targets), vocabulary, itemsize)
    activations = budget_tokens * each * (RECOMPUTED_SHARE if recompute else 1.0)
    return max(0.0, (1 - KEPT_FREE) * free - weights - activations)


def adapter_bytes(job: JobSpec, targets: Mapping[str, Target]) -> float:
    """With its gradients and its optimiser's state. A pool has rows for it on every linear,
    whichever it adapts."""
    return float(BYTES_PER_ADAPTER_PARAMETER * job.lora.r * widths(targets.values()))
