"""Comparisons in which a tolerance has a reason."""

import torch

TOLERANCES = {torch.float64: 4e-15, torch.float32: 2e-6, torch.bfloat16: 6e-3}
"""By the number format of the result, for the relative error in the norm.

Measured as the largest error of right results against float64, over the pieces of some cases:
    float64   9.6e-16  attention, against another order of its sums
    float32   5.7e-7   grad_a of one token (outputs 2.4e-7, attention 3.1e-7)
    bfloat16  3.9e-3   nine outputs of one token (dx 3.5e-3)
A scale off by 1 % gives about 1e-2. Tests of the kernels measure the noise again.
"""


def relative_error(
    found: torch.Tensor, expected: torch.Tensor, size_of: torch.Tensor | None = None
) -> float:
    """|found - expected| / |expected| in the Euclidean norm: inf where only `expected` is zero, nan
    where a value is. `size_of` stands in for `expected` below the line."""
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape, f"{list(found.shape)} against {list(expected.shape)}"
    difference = (found - expected).norm().item()
    size = (expected if size_of is None else size_of).double().norm().item()
    if size == 0.0:
        return difference and float("inf")
    return difference / size


def agrees(found: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> bool:
    """Whether they differ by no more than the noise of the number format that `found` is in."""
    limit = TOLERANCES[found.dtype] if tolerance is None else tolerance
    return relative_error(found, expected) <= limit


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal in every bit, NaNs too."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    as_integers = integers[left.element_size()]
    return left.dtype == right.dtype and torch.equal(
        left.detach().contiguous().view(as_integers), right.detach().contiguous().view(as_integers)
    )
