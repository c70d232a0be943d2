"""Packed attention on CUDA through cuDNN, by torch's own operators for sequences of many lengths.

On a Hopper chip cuDNN takes about half the time of the flash kernels behind `varlen_attn`. The
operators are not documented, so whoever uses them first looks whether they work here (`works`).
Two opaque operators of our own, so that layers compile around them.
"""

import functools

import torch
import torch.nn.functional as F

library = torch.library.Library("tlora", "FRAGMENT")
library.define(
    "cudnn_attention_forward(Tensor q, Tensor k, Tensor v, Tensor boundaries, SymInt longest, "
    "float scale) -> (Tensor, Tensor)"
)
library.define(
    "cudnn_attention_backward(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, "
    "Tensor boundaries, SymInt longest, float scale) -> (Tensor, Tensor, Tensor)"
)


_per_token = [True]
"""Whether log-sum-exps are [tokens, heads, 1] or padded to the longest: `works` has a look."""


def _forward(q, k, v, boundaries, longest, scale):
    found = torch.ops.aten._cudnn_attention_forward(
        q, k, v, None, boundaries, boundaries, longest, longest, True, 0.0, True, False, scale=scale
    )
    return found[0], found[1]


def _backward(dy, q, k, v, y, lse, boundaries, longest, scale):
    no_dropout = _no_dropout(q.device)
    return torch.ops.aten._cudnn_attention_backward(
        dy, q, k, v, y, lse, no_dropout, no_dropout, None, boundaries, boundaries, longest, longest,
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
    if _per_token[0]:
        shape = (q.shape[0], q.shape[1], 1)
    else:
        shape = (boundaries.shape[0] - 1, q.shape[1], longest, 1)
    return torch.empty_like(q), q.new_empty(shape, dtype=torch.float32)


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


@functools.cache
def works(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, size: int) -> bool:
    """Whether outputs and gradients of this shape are right here, with sequences of one token, of
    none, and of more than a tile."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    lengths = [200, 1, 77, 0, 130, 0, 0, 0]
    longest, total = 256, sum(lengths)
    generator = torch.Generator(device).manual_seed(0)

    def random(count: int) -> torch.Tensor:
        return torch.randn(total, count, size, generator=generator, device=device, dtype=dtype)

    inputs, upstream = (random(heads), random(key_heads), random(key_heads)), random(heads)
    boundaries = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
    try:
        _, lse = _forward(*inputs, boundaries, longest, 0.5)
        _per_token[0] = lse.dim() == 3
        found = _with_gradients(
            lambda q, k, v: cudnn_attention(q, k, v, boundaries, longest, scale=0.5),
            inputs,
            upstream,
        )
    except RuntimeError:
        return False
    wanted = _with_gradients(
        lambda q, k, v: _apart(q, k, v, lengths), [x.float() for x in inputs], upstream.float()
    )
    return all(
        (left.float() - right).norm() < 0.02 * right.norm()
        for left, right in zip(found, wanted, strict=True)
    )


def _with_gradients(function, inputs, upstream) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_(True) for x in inputs]
    with torch.enable_grad():
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]


def _apart(q, k, v, lengths: list[int]) -> torch.Tensor:
    """Each sequence by itself."""
    outputs = []
    for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        heads_first = [x.transpose(0, 1)[None] for x in parts]
        repeats = heads_first[0].shape[1] // heads_first[1].shape[1]
        heads_first[1:] = [x.repeat_interleave(repeats, dim=1) for x in heads_first[1:]]
        y = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=0.5)
        outputs.append(y[0].transpose(0, 1))
    return torch.cat(outputs)
