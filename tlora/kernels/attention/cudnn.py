"""Packed attention on CUDA through cuDNN, by torch's own operators for sequences of many lengths.

On a Hopper chip cuDNN takes about half the time of the flash kernels behind `varlen_attn`. The
operators are not documented, so whoever uses them first looks whether they work here (`works`).
Two opaque operators of our own, so that layers compile around them.
"""

import functools

import torch

library = torch.library.Library("tlora", "FRAGMENT")
library.define(
    "cudnn_attention_forward(Tensor q, Tensor k, Tensor v, Tensor boundaries, SymInt longest, "
    "float scale) -> (Tensor, Tensor)"
)
library.define(
    "cudnn_attention_backward(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, "
    "Tensor boundaries, SymInt longest, float scale) -> (Tensor, Tensor, Tensor)"
)


def _forward(q, k, v, boundaries, longest, scale):
    found = torch.ops.aten._cudnn_attention_forward(
        q, k, v, None, boundaries, boundaries, longest, longest, True, 0.0, True, False, scale=scale
    )
    return found[0], found[1]


def _backward(dy, q, k, v, y, lse, boundaries, longest, scale):
    none, no_dropout = torch.Tensor(), _no_dropout(q.device)
    return torch.ops.aten._cudnn_attention_backward(
        dy, q, k, v, y, lse, no_dropout, no_dropout, none, boundaries, boundaries, longest, longest,
        0.0, True, scale=scale,
    )  # fmt: skip


@functools.cache
def _no_dropout(device: torch.device) -> torch.Tensor:
    """Stands for the state of a generator that is never asked."""
    return torch.zeros((), dtype=torch.int64, device=device)


library.impl("cudnn_attention_forward", _forward, "CUDA")
library.impl("cudnn_attention_backward", _backward, "CUDA")


@torch.library.register_fake("tlora::cudnn_attention_forward", lib=library)
def _fake_forward(q, k, v, boundaries, longest, scale):
    sequences = boundaries.shape[0] - 1
    lse = q.new_empty(sequences, q.shape[1], longest, 1, dtype=torch.float32)
    return torch.empty_like(q), lse


@torch.library.register_fake("tlora::cudnn_attention_backward", lib=library)
def _fake_backward(dy, q, k, v, y, lse, boundaries, longest, scale):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class CudnnAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, boundaries, longest, scale):
        y, lse = torch.ops.tlora.cudnn_attention_forward(q, k, v, boundaries, longest, scale)
        ctx.save_for_backward(q, k, v, y, lse, boundaries)
        ctx.longest, ctx.scale = longest, scale
        return y

    @staticmethod
    def backward(ctx, *gradients):
        q, k, v, y, lse, boundaries = ctx.saved_tensors
        dq, dk, dv = torch.ops.tlora.cudnn_attention_backward(
            gradients[0].contiguous(), q, k, v, y, lse, boundaries, ctx.longest, ctx.scale
        )
        return dq, dk, dv, None, None, None


def cudnn_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    longest: int,
    *,
    scale: float,
) -> torch.Tensor:
    """Causal, over [T, heads, size]; `boundaries` and `longest` as in varlen.py."""
    q, k, v = query.contiguous(), key.contiguous(), value.contiguous()
    return CudnnAttention.apply(q, k, v, boundaries, longest, scale)
