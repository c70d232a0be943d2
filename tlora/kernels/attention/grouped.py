"""Packed causal attention on the CPU as one operator, for layers that are compiled.

The same products as packed.py's, in the same groups (layout.py), with the backward written out: a
compiled layer sees two opaque operators whose shapes follow from their arguments' shapes.
"""

import torch

from tlora.kernels.attention.layout import AttentionLayout

library = torch.library.Library("tlora", "FRAGMENT")
library.define(
    "grouped_attention(Tensor q, Tensor k, Tensor v, Tensor sources, Tensor places, Tensor sizes, "
    "float scale) -> Tensor[]"
)
library.define(
    "grouped_attention_backward(Tensor dy, Tensor[] saved, Tensor sources, Tensor places, "
    "Tensor repeated, Tensor sizes, float scale) -> Tensor[]"
)


def serves(
    query: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> bool:
    """Plain causal attention in host memory."""
    plain = window is None and softcap is None and sinks is None
    return plain and value.shape[2] == query.shape[2] and query.device.type == "cpu"


def _forward(q, k, v, sources, places, sizes, scale):
    """The packed rows; and queries, keys, values, outputs and log-sum-exps by groups."""
    groups = _groups(sizes)
    rows = [x.index_select(0, sources) for x in (q, k, v)]
    out, sums = torch.empty_like(rows[0]), q.new_empty(len(sources), q.shape[1], dtype=_wide(q))
    for place, count, length in groups:
        query, key, value = (_by_heads(x[place], count, length) for x in rows)
        key, value = (_repeated(x, query) for x in (key, value))
        y, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, True, scale=scale
        )
        _by_heads(out[place], count, length).copy_(y)
        sums[place].view(count, length, -1).transpose(1, 2).copy_(logsumexp)
    return [_packed(out, places, len(q)), *rows, out, sums]


def _backward(dy, saved, sources, places, repeated, sizes, scale):
    groups, rows, (out, sums) = _groups(sizes), saved[:3], saved[3:]
    # Repeats of a sequence's last row were never part of the output.
    upstream = dy.index_select(0, sources).masked_fill_(repeated[:, None, None], 0.0)
    found = [torch.empty_like(x) for x in rows]
    for place, count, length in groups:
        query, key, value, y, d_y = (
            _by_heads(x[place], count, length) for x in (*rows, out, upstream)
        )
        logsumexp = sums[place].view(count, length, -1).transpose(1, 2).contiguous()
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_y, query, _repeated(key, query), _repeated(value, query), y, logsumexp, 0.0, True,
            scale=scale,
        )  # fmt: skip
        for into, gradient in zip(found, gradients, strict=True):
            into = _by_heads(into[place], count, length)
            if into.shape[1] != gradient.shape[1]:
                gradient = gradient.view(count, into.shape[1], -1, length, into.shape[3]).sum(2)
            into.copy_(gradient)
    return [_packed(x, places, len(dy)) for x in found]


def _groups(sizes: torch.Tensor) -> list[tuple[slice, int, int]]:
    groups, first = [], 0
    for count, length in sizes.tolist():
        if count:
            groups.append((slice(first, first + count * length), count, length))
            first += count * length
    return groups


def _by_heads(rows: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """[sequences, heads, length, head size]."""
    return rows.view(count, length, *rows.shape[1:]).transpose(1, 2)


def _repeated(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    repeats = query.shape[1] // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)


def _packed(rows: torch.Tensor, places: torch.Tensor, num_rows: int) -> torch.Tensor:
    out = rows.new_empty(num_rows, *rows.shape[1:])
    torch.index_select(rows, 0, places, out=out[: len(places)])
    out[len(places) :] = 0.0
    return out


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


library.impl("grouped_attention", _forward, "CPU")
library.impl("grouped_attention_backward", _backward, "CPU")


@torch.library.register_fake("tlora::grouped_attention", lib=library)
def _fake_forward(q, k, v, sources, places, sizes, scale):
    rows = [x.new_empty(sources.shape[0], *x.shape[1:]) for x in (q, k, v)]
    sums = q.new_empty(sources.shape[0], q.shape[1], dtype=_wide(q))
    return [q.new_empty(q.shape), *rows, q.new_empty(rows[0].shape), sums]


@torch.library.register_fake("tlora::grouped_attention_backward", lib=library)
def _fake_backward(dy, saved, sources, places, repeated, sizes, scale):
    return [dy.new_empty(dy.shape[0], *x.shape[1:]) for x in saved[:3]]


class GroupedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sources, places, repeated, sizes, scale):
        y, *saved = torch.ops.tlora.grouped_attention(q, k, v, sources, places, sizes, scale)
        ctx.save_for_backward(sources, places, repeated, sizes, *saved)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, *gradients):
        sources, places, repeated, sizes, *saved = ctx.saved_tensors
        dq, dk, dv = torch.ops.tlora.grouped_attention_backward(
            gradients[0].contiguous(), saved, sources, places, repeated, sizes, ctx.scale
        )
        return dq, dk, dv, *[None] * 5


def grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: AttentionLayout,
    *,
    scale: float,
) -> torch.Tensor:
    """[tokens, heads, head size], as `packed_attention`."""
    return GroupedAttention.apply(
        query, key, value, layout.sources, layout.places, layout.repeated, layout.sizes, scale
    )
