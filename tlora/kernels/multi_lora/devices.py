"""Which settings the kernels run with on a device: what settings.py says for its shared memory."""

import functools

import torch

from tlora.kernels.multi_lora import settings
from tlora.kernels.multi_lora.settings import Device, Shape, Tuning

USUAL_SHARED_BYTES = 49_152
"""What every CUDA device gives without being asked for more."""


def tuning_of(kernel: str, shape: Shape, device: torch.device) -> Tuning:
    return settings.tuning(kernel, shape, limits(device))


@functools.cache
def limits(device: torch.device) -> Device:
    """Read once. The interpreter takes the settings of the device that they were measured on."""
    if device.type != "cuda":
        return settings.MEASURED
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", USUAL_SHARED_BYTES)
    return Device(shared_bytes=shared, capability=10 * properties.major + properties.minor)
