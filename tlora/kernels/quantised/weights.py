"""A frozen weight [out, in] in fewer bits: what is kept, and the values that it stands for."""

from typing import Literal, NamedTuple

import torch

from tlora.kernels.quantised import fp8, nf4
from tlora.kernels.quantised.devices import device_serves

Format = Literal["fp8", "nf4"]
FORMATS: tuple[Format, ...] = ("fp8", "nf4")


class QuantisedWeight(NamedTuple):
    """The format shows in the type of the values."""

    values: torch.Tensor
    """fp8: [out, in] of float8_e4m3fn; nf4: uint8, two values a byte."""

    scales: torch.Tensor
    """float32; fp8: one for each row; nf4: one for 64 values."""


def quantise(weight: torch.Tensor, how: Format) -> QuantisedWeight:
    if how == "fp8":
        return QuantisedWeight(*fp8.quantise_rows([weight]))
    return QuantisedWeight(*nf4.quantise(weight))


def quantised_bytes(out_features: int, in_features: int, how: Format) -> int:
    """Of what is kept on a GPU. In FP8 that is two copies, one of them turned: a product that reads
    the weight in the other order is not there."""
    count = out_features * in_features
    if how == "fp8":
        return 2 * count + 4 * out_features
    blocks = -(-count // nf4.BLOCK)
    return blocks * (nf4.BLOCK // 2 + 4)


def dense(
    values: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The weight in full."""
    if values.dtype == fp8.FORMAT:
        return fp8.dense(values, scales, dtype)
    if device_serves(values.device):
        from tlora.kernels.quantised import triton_nf4

        return triton_nf4.dense(values, scales, shape, dtype)
    return nf4.dense(values, scales, shape, dtype)
