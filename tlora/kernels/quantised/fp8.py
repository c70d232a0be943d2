"""Eight bits a value, and products of such values. This is the definition; on a GPU that multiplies
in FP8 rows are quantised by triton_fp8.py and multiplied by cuBLAS.

A matrix has a scale for each row, so that its largest value is the largest of the format. In
bfloat16 the other operand, X or dY, is quantised likewise, token by token: no token's numbers
depend on another's. In float32 and float16 only the weight is.
"""

import functools

import torch
import torch.nn.functional as F

from tlora.kernels.quantised.devices import device_rounds, has_products

FORMAT = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_SCALE = 2.0**-126
"""The smallest number in full precision. The scale of a row that is nearly nothing would round to
zero, and zeros over that are no numbers."""

SCALES_AT_ONCE = 256
"""A product on a GPU reads the scales of so many rows at a time, also where fewer are left
(pytorch/pytorch#133334): the memory behind them has to be there."""

ALIGNMENT = 16
"""Of both widths of a weight, where cuBLAS is to multiply it."""


def quantise_rows(
    parts: list[torch.Tensor], factors: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices of the same rows side by side, their columns multiplied by `factors` if there are
    any: FP8 [rows, columns of all], and float32 [rows]."""
    if device_rounds(parts[0].device):
        from tlora.kernels.quantised import triton_fp8

        return triton_fp8.quantise_rows(parts, factors)
    return quantise_rows_plainly(parts, factors)


def quantise_rows_plainly(
    parts: list[torch.Tensor], factors: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.cat([part.detach().float() for part in parts], 1)
    if factors is not None:
        values = values * factors
    largest = values.abs().amax(1)
    # A tensor below the line: by a number of Python's a GPU multiplies with its inverse, which has
    # other last bits. A row with a NaN in it stays one.
    scales = (largest / torch.full_like(largest, LARGEST)).clamp(min=SMALLEST_SCALE)
    return (values / scales[:, None]).clamp(-LARGEST, LARGEST).to(FORMAT), scales


def dense(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.float().mul_(scales[:, None]).to(dtype)


def turned(weights: list[torch.Tensor]) -> torch.Tensor:
    """Weights of one input [out_l, in] as [in, out of all], which products for dX read."""
    # As bytes: not every operation knows the format.
    return torch.cat([weight.view(torch.uint8).t() for weight in weights], 1).view(FORMAT)


def reads_turned(device: torch.device) -> bool:
    """Whether products for dX there need a copy of the weights that is kept for them."""
    return device.type == "cuda"


def multiplies(x: torch.Tensor, weights: list[torch.Tensor]) -> bool:
    """Whether the product of these is one of FP8 values. A CPU computes what a GPU would."""
    if weights[0].dtype != FORMAT or x.dtype != torch.bfloat16:
        return False
    aligned = all(size % ALIGNMENT == 0 for weight in weights for size in weight.shape)
    return aligned and has_products(x.device)


def linears(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    scales: list[torch.Tensor],
    biases: list[torch.Tensor | None],
) -> list[torch.Tensor]:
    """X W_l^T + bias_l."""
    values, of_rows = quantise_rows([x])
    y = [
        product(values, weight, of_rows, scale, x.dtype)
        for weight, scale in zip(weights, scales, strict=True)
    ]
    for y_l, bias in zip(y, biases, strict=True):
        if bias is not None:
            y_l += bias
    return y


def input_gradient(
    dy: list[torch.Tensor], scales: list[torch.Tensor], turned: torch.Tensor
) -> torch.Tensor:
    """The sum of dY_l W_l, as one product. A weight's scales are those of the columns of dY, so
    these are multiplied by them before they are quantised."""
    values, of_rows = quantise_rows(dy, torch.cat(scales))
    return product(values, turned, of_rows, _ones(len(turned), turned.device), dy[0].dtype)


def product(
    left: torch.Tensor,
    right: torch.Tensor,
    of_left: torch.Tensor,
    of_right: torch.Tensor,
    dtype: torch.dtype,
    *,
    fast_sums: bool = False,
) -> torch.Tensor:
    """left [rows, inner] right [columns, inner]^T, both quantised by row. Hopper's fast sums drop
    bits of long ones: where the values have one sign, a tenth of 14,336 of them."""
    if left.device.type != "cuda":
        return (left.float() @ right.float().t() * of_left[:, None] * of_right).to(dtype)
    return torch._scaled_mm(
        left,
        right.t(),
        scale_a=in_room(of_left)[:, None],
        scale_b=in_room(of_right)[None],
        out_dtype=dtype,
        use_fast_accum=fast_sums,
    )


def room(count: int) -> int:
    return -(-count // SCALES_AT_ONCE) * SCALES_AT_ONCE


def in_room(scales: torch.Tensor) -> torch.Tensor:
    """As they are where there is room behind them, else a copy."""
    held = scales.untyped_storage().nbytes() // scales.itemsize - scales.storage_offset()
    if held >= room(len(scales)):
        return scales
    return F.pad(scales, (0, room(len(scales)) - len(scales)))[: len(scales)]


@functools.cache
def _ones(count: int, device: torch.device) -> torch.Tensor:
    return torch.ones(room(count), device=device)[:count]
