"""Repeatable flash attention, as far as it can be seen without a GPU."""

import pytest
import torch

from tlora.kernels.attention import varlen

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
