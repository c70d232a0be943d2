"""What serves on a device: the Triton kernels and cuBLAS's products of FP8, unless they were seen
to be wrong there (proving.py). Otherwise torch computes the same."""

from importlib.util import find_spec

import torch

PRODUCTS_FROM = (8, 9)
"""The compute capability from which tensor cores multiply in FP8."""

ROUNDS_FROM = (9, 0)
"""The one from which Triton rounds to FP8 at once: before it does so by way of float16."""

_without_kernels: set[torch.device] = set()
_without_products: set[torch.device] = set()


def refuse_kernels(device: torch.device) -> None:
    _without_kernels.add(device)


def refuse_products(device: torch.device) -> None:
    """Weights in FP8 are unpacked there from here on, and nothing else is rounded to it."""
    _without_products.add(device)


def device_serves(device: torch.device) -> bool:
    on_gpu = device.type == "cuda" and find_spec("triton") is not None
    return on_gpu and device not in _without_kernels


def device_rounds(device: torch.device) -> bool:
    """Whether the kernel that quantises to FP8 serves there."""
    return device_serves(device) and torch.cuda.get_device_capability(device) >= ROUNDS_FROM


def has_products(device: torch.device) -> bool:
    if device in _without_products:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= PRODUCTS_FROM
