"""Causal attention over sequences packed one after another in a row of tokens.

Sequences are taken apart (layout.py) and attended to as a batch: no mask over the packed row, so a
NaN in one sequence cannot reach another as 0 x NaN. Rows after the last sequence are padding and
come out as zeros. It serves where neither torch's variable-length flash attention on CUDA
(varlen.py) nor C on a CPU (native.py) does, and is what both are compared with. In compiled layers
on a CPU grouped.py does the same as one operator.
"""

import torch
import torch.nn.functional as F

from tlora.kernels.attention.layout import AttentionLayout


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: AttentionLayout,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[tokens, heads, head size] from queries of that shape and keys and values of as many or fewer
    heads.

    `window` lets token i see the tokens i - window + 1 .. i; `softcap` bounds scores by softcap *
    tanh; `sinks` [heads] are the scores of one more key, whose value is zero.
    """
    if not layout.groups:
        return query.new_zeros(len(query), query.shape[1], value.shape[2])
    sizes = [count * length for count, length in layout.groups]
    split = [TakeApart.apply(x, layout).split(sizes) for x in (query, key, value)]
    pieces = []
    for (count, length), *parts in zip(layout.groups, *split, strict=True):
        q, k, v = (x.view(count, length, *x.shape[1:]).transpose(1, 2) for x in parts)
        out = attend(q, k, v, scale=scale, window=window, softcap=softcap, sinks=sinks)
        pieces.append(out.transpose(1, 2).reshape(count * length, query.shape[1], -1))
    return PutBack.apply(pieces[0] if len(pieces) == 1 else torch.cat(pieces), layout)


class TakeApart(torch.autograd.Function):
    """The rows of the groups. Repeats get no gradient from the rows before them and pass none on;
    padding gets zeros."""

    @staticmethod
    def forward(ctx, x, layout):
        ctx.layout = layout
        return x.index_select(0, layout.sources)

    @staticmethod
    def backward(ctx, *gradients):
        (gradient,) = gradients
        return _select_then_zeros(gradient, ctx.layout.places, ctx.layout.num_rows), None


class PutBack(torch.autograd.Function):
    """The packed rows of what was computed for the groups."""

    @staticmethod
    def forward(ctx, x, layout):
        ctx.layout = layout
        return _select_then_zeros(x, layout.places, layout.num_rows)

    @staticmethod
    def backward(ctx, *gradients):
        (gradient,) = gradients
        rows = gradient.index_select(0, ctx.layout.sources)
        return rows.index_fill_(0, ctx.layout.repeats, 0.0), None


def _select_then_zeros(x: torch.Tensor, index: torch.Tensor, num_rows: int) -> torch.Tensor:
    out = x.new_empty(num_rows, *x.shape[1:])
    torch.index_select(x, 0, index, out=out[: len(index)])
    out[len(index) :] = 0.0
    return out


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of whole sequences of one length: [sequences, heads, length, head size]."""
    length = query.shape[2]
    if window is not None and window >= length:
        window = None
    if softcap is not None or sinks is not None:
        return attend_by_scores(query, key, value, scale, window, softcap, sinks)
    gqa = query.shape[1] != key.shape[1]
    if window is None:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=gqa
        )
    mask = visible(length, window, query.device)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=gqa
    )


def visible(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [length, length]: which keys (columns) each query (row) of one sequence may see."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def attend_by_scores(query, key, value, scale, window, softcap, sinks):
    repeats = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(repeats, dim=1)
    value = value.repeat_interleave(repeats, dim=1)
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(query.shape[2], window, query.device), float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    at_least_float32 = torch.promote_types(query.dtype, torch.float32)
    weights = scores.softmax(dim=-1, dtype=at_least_float32)[..., : key.shape[2]]
    return weights.to(query.dtype) @ value
