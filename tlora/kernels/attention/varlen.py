"""Packed attention on CUDA through torch's variable-length flash attention."""

import torch


def supports(query: torch.Tensor, softcap: float | None) -> bool:
    """Flash attention takes half precision only, and no soft-cap."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and softcap is None


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    longest: int,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """`boundaries` int32 [sequences + 1] covers every row: padding is a sequence of its own."""
    # CUDA only: not every CPU build of torch has the module.
    from torch.nn.attention.varlen import varlen_attn

    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
    left = -1 if window is None else window - 1
    out = varlen_attn(
        query,
        key,
        value,
        boundaries,
        boundaries,
        longest,
        longest,
        scale=scale,
        window_size=(left, 0),
    )
    # A tuple only where the log-sum-exp was asked for.
    assert isinstance(out, torch.Tensor)
    return out
