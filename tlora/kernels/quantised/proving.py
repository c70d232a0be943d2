"""A CUDA device shows that it computes what the definitions say, before a model's weights are
quantised there. What shows itself wrong is not used: torch does the same, slower."""

import functools
import logging

import torch

from tlora.kernels.quantised import devices, fp8, nf4
from tlora.kernels.quantised.weights import Format

logger = logging.getLogger(__name__)

ROWS, WIDTHS = 37, (272, 48, 5008)
"""Blocks of 64 across rows, rows of more than a tile, three matrices side by side."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

PRODUCT = (300, 4096, 272)
PRODUCT_LIMIT = 5e-3
"""Of a product of the same FP8 values, rounded to bfloat16: half of its last place is 2e-3."""


def prove(device: torch.device, how: Format) -> None:
    """For the rest of this process."""
    if device.type != "cuda":
        return
    # Tensors are on a device with a number: what is refused is looked up by that.
    index = torch.cuda.current_device() if device.index is None else device.index
    _prove(torch.device("cuda", index), how)


@functools.cache
def _prove(device: torch.device, how: Format) -> None:
    kernels = devices.device_rounds if how == "fp8" else devices.device_serves
    if kernels(device) and (fault := _told(kernel_fault, device, how)):
        logger.warning(
            "the kernels of %s are wrong on this device and are not used, which makes training "
            "slower: %s",
            how,
            fault,
        )
        devices.refuse_kernels(device)
    if how == "fp8" and devices.has_products(device) and (fault := _told(product_fault, device)):
        logger.warning(
            "products in FP8 are wrong on this device: weights are held in it, and multiplied in "
            "bfloat16: %s",
            fault,
        )
        devices.refuse_products(device)


def _told(find, *case) -> str | None:
    try:
        return find(*case)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Does not compile, is not there.
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def kernel_fault(device: torch.device, how: Format) -> str | None:
    """All results have to be the same to the bit, in every format: a model in half precision is
    looked at in float32, too."""
    find = _unpacking_fault if how == "nf4" else _rounding_fault
    for dtype in DTYPES:
        parts = [_random(device, ROWS, width).to(dtype) for width in WIDTHS]
        if fault := find(parts):
            return f"{fault} in {str(dtype).removeprefix('torch.')}"
    return None


def _unpacking_fault(parts: list[torch.Tensor]) -> str | None:
    from tlora.kernels.quantised import triton_nf4

    # Whole blocks and a part of one.
    for part in (parts[1], parts[2][:, :-1]):
        packed, scales = nf4.quantise(part)
        case = (packed, scales, (part.shape[0], part.shape[1]), part.dtype)
        if not torch.equal(triton_nf4.dense(*case), nf4.dense(*case)):
            return "unpacked values differ"
    return None


def _rounding_fault(parts: list[torch.Tensor]) -> str | None:
    from tlora.kernels.quantised import triton_fp8

    parts[0][1] = 0.0
    parts[1][2] = 1e-3
    for factors in (None, _random(parts[0].device, sum(WIDTHS))):
        found = triton_fp8.quantise_rows(parts, factors)
        right = fp8.quantise_rows_plainly(parts, factors)
        if not all(
            torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            for one, other in zip(found, right, strict=True)
        ):
            return "quantised rows differ"
    return None


def product_fault(device: torch.device) -> str | None:
    """Of values of both signs, and of one: a long sum of these loses what it drops."""
    rows, into, out = PRODUCT
    given = _random(device, rows, into), _random(device, out, into)
    for kind, (x, w) in {"product": given, "long sum": [each.abs() for each in given]}.items():
        left, of_left = fp8.quantise_rows([x])
        right, of_right = fp8.quantise_rows([w])
        found = fp8.product(left, right, of_left, of_right, torch.bfloat16).double()
        wanted = fp8.dense(left, of_left, torch.float32).double()
        wanted = wanted @ fp8.dense(right, of_right, torch.float32).double().t()
        error = ((found - wanted).norm() / wanted.norm()).item()
        if error >= PRODUCT_LIMIT:
            return f"a {kind} is off by {error:.3g}"
    return None


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(*shape, generator=generator, device=device)
