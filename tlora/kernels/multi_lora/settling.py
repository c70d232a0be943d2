"""A CUDA device tunes itself, once, before anything is compiled or captured.

TLORA_TUNE_KERNELS=1 asks for it; else the usual settings serve, as far as they fit the device.
"""

import os
from collections.abc import Iterable

import torch

from tlora.kernels import cache
from tlora.kernels.multi_lora import choices, devices, tuner
from tlora.kernels.multi_lora.routes import kernels_serve, operand_dtype
from tlora.kernels.multi_lora.tuner import GroupShape


def settle_kernels(device: torch.device, dtype: torch.dtype, groups: Iterable[GroupShape]) -> None:
    """Fix the settings for a model whose linears have this format and, group by group, these
    (in, out) features. What is settled stays."""
    if os.environ.get("TLORA_TUNE_KERNELS") != "1" or device.type != "cuda":
        return
    served = [group for group in groups if kernels_serve(device, len(group[1]))]
    if not served:
        return
    # Imported where it runs: a machine without a GPU need not have Triton.
    from tlora.kernels.multi_lora import trials

    index = torch.cuda.current_device() if device.index is None else device.index
    device = torch.device("cuda", index)
    # The widest stands for all: most bytes, most time.
    widest = max(served, key=lambda group: (group[0] + sum(group[1]), group))
    operands = operand_dtype(device, dtype, len(widest[1]))
    names = set(trials.names(widest, dtype, operands)) - devices.settled(device)
    if not names:
        return
    with torch.cuda.device(device):
        found = tuner.known_or_tuned(
            cache.directory(),
            key_of(device),
            names,
            lambda: trials.trials(device, widest, dtype, operands),
            trials.milliseconds,
            devices.limits(device),
        )
        torch.cuda.empty_cache()
    devices.settle(device, {name: found.get(name) for name in names})


def key_of(device: torch.device) -> dict[str, str]:
    """What choices are good for."""
    import triton

    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "source": choices.source_hash(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
