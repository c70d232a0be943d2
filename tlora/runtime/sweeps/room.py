"""How much memory there is for the adapters of trials."""

import torch
from transformers.modeling_utils import PreTrainedModel

from tlora.model.memory import activation_bytes
from tlora.model.targets import find_targets
from tlora.runtime.budget import KEPT_FREE, RECOMPUTED_SHARE
from tlora.runtime.requests import widths


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
