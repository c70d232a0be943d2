"""Repeatable flash attention, as far as it can be seen without a GPU."""

import pytest
import torch

from tlora.kernels.attention import varlen
from tlora.kernels.attention.layout import attention_layout
from tlora.kernels.attention.packed import packed_attention

HEADS, SIZE, ROWS = 4, 64, 96


def settings() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


@pytest.mark.parametrize("warn_only", [False, True])
@pytest.mark.parametrize("mode", [False, True])
def test_the_setting_is_strict_inside_and_as_before_outside(mode, warn_only) -> None:
    """Also after an error; flash attention ignores the setting where it only warns."""
    before = settings()
    try:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        expected = settings()
        with varlen.deterministic():
            assert settings() == (True, False, False)
        assert settings() == expected
        with pytest.raises(RuntimeError, match="out of memory"), varlen.deterministic():
            raise RuntimeError("out of memory")
        assert settings() == expected
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.mark.parametrize("left", [-1, 7])
def test_the_operators_fit_torchs_own(left) -> None:
    """Arguments are taken and shapes agree with what compiled code is told."""
    q, k, v = (torch.empty(ROWS, HEADS, SIZE, dtype=torch.bfloat16, device="meta") for _ in "qkv")
    boundaries = torch.empty(65, dtype=torch.int32, device="meta")
    out, logsumexp = varlen._forward(q, k, v, boundaries, ROWS, 0.125, left)
    told = torch.ops.tlora.repeatable_attention(q, k, v, boundaries, ROWS, 0.125, left)
    assert [(x.shape, x.dtype) for x in (out, logsumexp)] == [(x.shape, x.dtype) for x in told]
    rest = (boundaries, ROWS, 0.125, left)
    gradients = varlen._backward(out, q, k, v, out, logsumexp, *rest)
    told = torch.ops.tlora.repeatable_attention_backward(out, q, k, v, out, logsumexp, *rest)
    assert [x.shape for x in gradients] == [x.shape for x in told] == [q.shape] * 3


@pytest.mark.parametrize("widths", [(12, 8), (8, 12), (8, 8)])
def test_values_may_be_of_another_width_than_keys(monkeypatch, widths) -> None:
    """Deepseek's and MiMo's are; flash attention takes one width."""
    torch.manual_seed(0)
    lengths = [3, 17, 1, 9]

    def flash(q, k, v, boundaries, _, longest, __, *, scale, window_size, **options):
        assert q.shape[2] == k.shape[2] == v.shape[2], "v must have shape"
        layout = attention_layout(lengths, len(q), q.shape[1] * q.shape[2], "cpu")
        return packed_attention(q, k, v, layout, scale=scale, window=window_size[0] + 1)

    monkeypatch.setattr(varlen, "varlen_attn", flash)
    rows, (keys, values) = sum(lengths), widths
    shapes = [(rows, 4, keys), (rows, 2, keys), (rows, 2, values)]
    own = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    even = [x.detach().clone().requires_grad_() for x in own]
    boundaries = torch.tensor([0, 3, 20, 21, 30], dtype=torch.int32)
    out = varlen.varlen_attention(*even, boundaries, 17, scale=0.3, window=5)
    layout = attention_layout(lengths, rows, 4 * keys, "cpu")
    expected = packed_attention(*own, layout, scale=0.3, window=5)
    upstream = torch.randn_like(expected)
    (out * upstream).sum().backward()
    (expected * upstream).sum().backward()
    torch.testing.assert_close(out, expected)
    for got, wanted in zip(even, own, strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)
