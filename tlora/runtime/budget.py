"""How many tokens a nano-batch takes where nobody said."""

import torch

from tlora.core.errors import SpecError
from tlora.core.job import RunSpec
from tlora.data.prepare import PreparedData

ON_CUDA = 8192
"""Past the knee on one H200 (docs/log.md)."""

ON_CPU = 1024

ON_CPU_SMALL = 2048
"""For models so small that calls, not products, take the time: with the demo base on two cores a
seventh faster than 1,024 (docs/log.md). Larger models are past their knee before, and hold more
per token."""

SMALL_PARAMETERS = 100_000_000


def default_budget(device: torch.device, parameters: int, *, exact: bool = False) -> int:
    """Where bits count every nano-batch is filled up to it, so it is no larger than it must be."""
    if device.type == "cuda":
        return ON_CUDA
    return ON_CPU_SMALL if parameters < SMALL_PARAMETERS and not exact else ON_CPU


def nano_batch_tokens(
    spec: RunSpec, device: torch.device, data: dict[str, PreparedData], parameters: int
) -> int:
    """The token budget. Where bits count every nano-batch has this size, so it must hold every row:
    a size that followed the rows would follow the neighbours'."""
    chosen = spec.engine.nano_batch_tokens
    exact = spec.engine.isolation == "exact"
    budget = default_budget(device, parameters, exact=exact) if chosen == "auto" else chosen
    if exact:
        for name, prepared in data.items():
            views = [view for view in (prepared.train, prepared.evaluation) if view is not None]
            longest = max(int(view.lengths.max()) for view in views)
            if longest > budget:
                raise SpecError(
                    f"rows of up to {longest} tokens, but exact isolation runs nano-batches of "
                    f"{budget}; set engine.nano_batch_tokens to at least {longest}",
                    job=name,
                    field="train.max_length",
                )
    return budget
