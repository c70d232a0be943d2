"""Packed attention on CUDA through torch's variable-length flash attention."""

import inspect
from typing import Any

import torch

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # not every CPU build of torch has it
    varlen_attn = None

# Newer versions want to be told that there are fewer key heads; older ones just take them.
_KNOWS_GROUPS = (
    varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters
)


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
    """`boundaries` int32 [sequences + 1] covers every row: padding is sequences of its own.
    `longest` is at least the longest of them; blocks are launched for as many tokens of each."""
    assert varlen_attn is not None
    grouped = _KNOWS_GROUPS and query.shape[1] != key.shape[1]
    options: dict[str, Any] = {"enable_gqa": True} if grouped else {}
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
        **options,
    )
    # A tuple only where the log-sum-exp was asked for.
    assert isinstance(out, torch.Tensor)
    return out
