"""How many tokens a nano-batch takes where nobody said, and between which sizes it is tuned."""

import torch

from tlora.core.errors import SpecError
from tlora.core.job import RunSpec
from tlora.data.prepare import PreparedData
from tlora.model.memory import activation_bytes
from tlora.model.super_model import SuperModel
from tlora.training.size_search import ControllerSettings, ladder

ON_CUDA = 8192
"""Past the knee on one H200 (docs/log.md)."""

ON_CPU = 1024

ON_CPU_SMALL = 2048
"""For models so small that calls, not products, take the time: with the demo base on two cores a
seventh faster than 1,024 (docs/log.md). Larger models are past their knee before, and hold more
per token."""

SMALL_PARAMETERS = 100_000_000

SMALLEST_TUNED = {"cuda": 512, "cpu": 256}
LARGEST_TUNED = {"cuda": 2 * ON_CUDA, "cpu": 2 * ON_CPU_SMALL}
"""Past every knee seen so far; larger ones only take memory."""

WARM_UPS = {"cuda": 2, "cpu": 0}
"""On a GPU a new size compiles at first, and its allocations are new to the second."""

KEPT_FREE = 0.1
"""Of the memory, for what the estimate of the activations misses."""

RECOMPUTED_SHARE = 0.2
"""Of the activations: what gradient checkpointing keeps, with a layer that is under way."""


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
    budget = chosen
    if isinstance(budget, str):
        budget = default_budget(device, parameters, exact=exact)
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


def tuning(
    spec: RunSpec, device: torch.device, *, budget: int, fits: int
) -> ControllerSettings | None:
    """How the size is to be tuned, or None where it stays: if a number was given, if bits count,
    and on a CPU, whose knee is known, unless it was asked for. `fits` tokens have room."""
    chosen = spec.engine.nano_batch_tokens
    wanted = chosen == "tuned" or (chosen == "auto" and device.type == "cuda")
    if not wanted or spec.engine.isolation == "exact" or device.type not in SMALLEST_TUNED:
        return None
    low, limit = SMALLEST_TUNED[device.type], min(fits, LARGEST_TUNED[device.type])
    if limit < 2 * low:
        return None
    sizes = ladder(low, limit)
    return ControllerSettings(
        sizes=sizes,
        # Climbing from a quarter takes little time, since small nano-batches are soon done.
        start=at_most(sizes, budget // 4),
        idle=at_most(sizes, budget),
        limit=limit,
        warm_ups=WARM_UPS[device.type],
    )


def at_most(sizes: tuple[int, ...], tokens: int) -> int:
    return max((size for size in sizes if size <= tokens), default=sizes[0])


def tokens_that_fit(model: SuperModel, free_bytes: int, *, recompute: bool) -> int:
    """Roughly; a nano-batch that does not fit after all lowers the limit."""
    widths = sum(target.in_features + target.out_features for target in model.targets.values())
    each = activation_bytes(widths, model.vocabulary, model.model.dtype.itemsize)
    if recompute:
        each *= RECOMPUTED_SHARE
    return int((1 - KEPT_FREE) * free_bytes / each)


def room_for_tokens(spec: RunSpec, model: SuperModel) -> int:
    """`tokens_that_fit` on this machine as it is now; a CPU's memory is not asked."""
    if model.device.type != "cuda":
        return LARGEST_TUNED["cpu"]
    free, _ = torch.cuda.mem_get_info(model.device)
    return tokens_that_fit(model, free, recompute=spec.engine.gradient_checkpointing)
