"""Which settings the kernels run with on a device: what settings.py says for its shared memory, and
the warps, stages and programs that tuner.py found, if it did.

What is settled stays: compiled code and captured graphs never see a change.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from tlora.kernels.multi_lora import settings
from tlora.kernels.multi_lora.settings import Device, Shape, Tuning

USUAL_SHARED_BYTES = 49_152
"""What every CUDA device gives without being asked for more."""


@dataclass(frozen=True)
class Choice:
    """What may differ from the settings without changing a bit."""

    warps: int
    stages: int
    programs: int


_settled: dict[tuple[torch.device, str], Choice | None] = {}
"""By device and name; None: the usual settings."""


@functools.lru_cache(maxsize=4096)
def tuning_of(kernel: str, shape: Shape, device: torch.device) -> Tuning:
    device_limits = limits(device)
    usual = settings.tuning(kernel, shape, device_limits)
    choice = _settled.get((device, choice_name(kernel, shape)))
    return usual if choice is None else apply(choice, kernel, shape, usual, device_limits)


def choice_name(kernel: str, shape: Shape) -> str:
    """Shapes with one name share a choice."""
    return f"{settings.case_of(kernel, shape)}, {shape.itemsize} and {shape.pool_itemsize} bytes"


def apply(choice: Choice, kernel: str, shape: Shape, usual: Tuning, device: Device) -> Tuning:
    """The choice, which was made for one rank, unless it does not fit with this one."""
    tuning = replace(usual, warps=choice.warps, stages=choice.stages, programs=choice.programs)
    needed = settings.shared_bytes(kernel, shape, tuning, device.capability)
    return tuning if needed <= device.shared_bytes else usual


def settled(device: torch.device) -> frozenset[str]:
    """The names of what can no longer change."""
    return frozenset(name for known, name in _settled if known == device)


def settle(device: torch.device, choices: Mapping[str, Choice | None]) -> None:
    """From now on; names that are settled stay as they are."""
    for name, choice in choices.items():
        _settled.setdefault((device, name), choice)
    tuning_of.cache_clear()


@functools.cache
def limits(device: torch.device) -> Device:
    """Read once. The interpreter takes the settings of the device that they were measured on."""
    if device.type != "cuda":
        return settings.MEASURED
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", USUAL_SHARED_BYTES)
    return Device(shared_bytes=shared, capability=10 * properties.major + properties.minor)
