"""The opaque attention of compiled layers gives what packed attention gives."""

import pytest
import torch

from tlora.kernels.attention.grouped import grouped_attention, serves
from tlora.kernels.attention.layout import attention_layout
from tlora.kernels.attention.packed import packed_attention

LENGTHS = [3, 40, 1, 64, 57, 41, 5]
ROWS = 224


def inputs(dtype: torch.dtype, key_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(ROWS, heads, 16, generator=generator, dtype=dtype).requires_grad_()
        for heads in (4, key_heads, key_heads)
    ]


def run(attention, tensors: list[torch.Tensor], **options) -> list[torch.Tensor]:
    """Output and gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    y = attention(*leaves, scale=0.3, **options)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_equal_packed_attention(dtype, key_heads, one_by_one) -> None:
    """To rounding, with padding; another order of the lengths does not."""
    tensors = inputs(dtype, key_heads)
    layout = attention_layout(LENGTHS, ROWS, 64, one_by_one=one_by_one)
    other = attention_layout(LENGTHS[::-1], ROWS, 64, one_by_one=one_by_one)
    wanted = run(packed_attention, tensors, layout=layout)
    found = run(grouped_attention, tensors, layout=layout)
    wrong = run(grouped_attention, tensors, layout=other)
    limit = 1e-6 if dtype == torch.float32 else 1e-2
    for left, right, off in zip(found, wanted, wrong, strict=True):
        assert (left - right).norm() <= limit * right.norm()
        assert (off - right).norm() > 0.1 * right.norm()
        assert not left[sum(LENGTHS) :].any()


def test_a_nan_stays_in_its_sequence() -> None:
    tensors = inputs(torch.float32, 2)
    layout = attention_layout(LENGTHS, ROWS, 64)
    clean = run(grouped_attention, tensors, layout=layout)
    with torch.no_grad():
        tensors[1][10] = float("nan")  # in the second sequence, rows 3 to 42
    for left, right in zip(run(grouped_attention, tensors, layout=layout), clean, strict=True):
        assert left[3:43].isnan().any()
        assert torch.equal(left[:3], right[:3])
        assert torch.equal(left[43:], right[43:])


def test_windows_and_soft_caps_are_left_to_packed_attention() -> None:
    query, _, value = inputs(torch.float32, 2)
    assert serves(query, value, None, None)
    assert not serves(query, value, 8, None)
    assert not serves(query, value, None, 30.0)
    assert not serves(query, value, None, None, torch.zeros(1))
    assert not serves(query, value[..., :8], None, None)
