"""The devices of a run over several: GPUs, or one-thread processes where there are none."""

import torch

from tlora.core.errors import SpecError
from tlora.runtime.environment import usable_cores

TRIED_OUT = 8
"""Processes that a CPU of few cores may have all the same: several devices are tried at a desk."""


def device_names(device: torch.device, count: int, *, field: str = "--devices") -> list[str]:
    """One for each worker."""
    check_count(device, count, field=field)
    if device.type != "cuda":
        return [str(device)] * count
    return [f"cuda:{number}" for number in range(count)]


def check_count(
    device: torch.device, count: int, *, field: str = "--devices", share: bool = False
) -> None:
    """Refuses more than there are, before anything is planned or started. `share`: a GPU may have
    several ranks."""
    if device.type == "cuda":
        there = torch.cuda.device_count()
        if count > there and not share:
            raise SpecError(f"{count} were asked for, and this machine has {there}", field=field)
        return
    cores = usable_cores()
    if count > max(cores, TRIED_OUT):
        there = "is 1 core" if cores == 1 else f"are {cores} cores"
        more = f", or for up to {TRIED_OUT} to try things out" if cores < TRIED_OUT else ""
        raise SpecError(
            f"{count} were asked for, and there {there} to run on: without a GPU a device is a "
            f"process of one thread; ask for {cores}{more}",
            field=field,
        )
