"""Packed attention on CUDA through torch's variable-length flash attention.

Its backward adds parts of dQ by atomics, in whatever order they come: two runs give other bits. It
has a deterministic way too, which torch takes when deterministic algorithms are asked for; asking
for them everywhere would refuse other operators and fill fresh memory. So where bits count forward
and backward are operators of our own, and only the flash backward runs under that setting.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # not every CPU build of torch has it
    varlen_attn = None

# Newer versions want to be told that there are fewer key heads; older ones just take them.
_KNOWS_GROUPS = (
    varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters
)
library = torch.library.Library("tlora", "FRAGMENT")
library.define(
    "repeatable_attention(Tensor query, Tensor key, Tensor value, Tensor boundaries, "
    "SymInt longest, float scale, int left) -> (Tensor, Tensor)"
)
library.define(
    "repeatable_attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, "
    "Tensor out, Tensor logsumexp, Tensor boundaries, SymInt longest, float scale, int left) "
    "-> (Tensor, Tensor, Tensor)"
)


def supports(query: torch.Tensor, softcap: float | None, sinks: torch.Tensor | None = None) -> bool:
    """Flash attention takes half precision only, and neither soft-caps nor sinks."""
    plain = softcap is None and sinks is None
    return plain and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    longest: int,
    *,
    scale: float,
    window: int | None = None,
    repeatable: bool = False,
) -> torch.Tensor:
    """`boundaries` int32 [sequences + 1] covers every row: padding is sequences of its own.
    `longest` is at least the longest of them; blocks are launched for as many tokens of each.

    `repeatable` gives a sequence the same gradients every time and wherever it stands, as long as
    `longest` is the same and there are so many sequences, empty ones counted, that with the heads
    they outnumber the multiprocessors: with fewer the backward splits its sums by their number.
    """
    width = value.shape[2]
    if width != query.shape[2]:
        # Flash attention takes heads of one width. Zeros add nothing to a score or a sum.
        widest = max(width, query.shape[2])
        query, key, value = (F.pad(x, (0, widest - x.shape[2])) for x in (query, key, value))
        out = varlen_attention(
            query, key, value, boundaries, longest,
            scale=scale, window=window, repeatable=repeatable,
        )  # fmt: skip
        return out[..., :width]
    left = -1 if window is None else window - 1
    if repeatable:
        return RepeatableAttention.apply(query, key, value, boundaries, longest, scale, left)
    assert varlen_attn is not None
    grouped = _KNOWS_GROUPS and query.shape[1] != key.shape[1]
    options: dict[str, Any] = {"enable_gqa": True} if grouped else {}
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


class RepeatableAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, boundaries, longest, scale, left):
        out, logsumexp = torch.ops.tlora.repeatable_attention(
            query, key, value, boundaries, longest, scale, left
        )
        ctx.save_for_backward(query, key, value, out, logsumexp, boundaries)
        ctx.longest, ctx.scale, ctx.left = longest, scale, left
        return out

    @staticmethod
    def backward(ctx, *gradients):
        query, key, value, out, logsumexp, boundaries = ctx.saved_tensors
        dq, dk, dv = torch.ops.tlora.repeatable_attention_backward(
            gradients[0].contiguous(),
            query,
            key,
            value,
            out,
            logsumexp,
            boundaries,
            ctx.longest,
            ctx.scale,
            ctx.left,
        )
        return dq, dk, dv, None, None, None, None


def _forward(query, key, value, boundaries, longest, scale, left):
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        boundaries,
        boundaries,
        longest,
        longest,
        0.0,
        left < 0,
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=0,
    )
    return out, logsumexp


def _backward(
    gradient, query, key, value, out, logsumexp, boundaries, longest, scale, left
):  # fmt: skip
    # Of a dropout that is off.
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    with deterministic():
        return torch.ops.aten._flash_attention_backward(
            gradient,
            query,
            key,
            value,
            out,
            logsumexp,
            boundaries,
            boundaries,
            longest,
            longest,
            0.0,
            left < 0,
            state,
            torch.empty(0, device=query.device),
            scale=scale,
            window_size_left=left,
            window_size_right=0,
        )


library.impl("repeatable_attention", _forward, "CUDA")
library.impl("repeatable_attention_backward", _backward, "CUDA")


@torch.library.register_fake("tlora::repeatable_attention", lib=library)
def _fake_forward(query, key, value, boundaries, longest, scale, left):
    logsumexp = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    return torch.empty_like(query), logsumexp


@torch.library.register_fake("tlora::repeatable_attention_backward", lib=library)
def _fake_backward(
    gradient, query, key, value, out, logsumexp, boundaries, longest, scale, left
):  # fmt: skip
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@contextmanager
def deterministic() -> Iterator[None]:
    """The process-wide setting for a moment; what it was comes back, whatever happens."""
    memory: Any = torch.utils.deterministic
    was = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = memory.fill_uninitialized_memory
    # What the kernel leaves unwritten nobody reads.
    memory.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)
        memory.fill_uninitialized_memory = filled
