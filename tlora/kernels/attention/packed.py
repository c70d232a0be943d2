"""Causal attention over sequences packed one after another in a row of tokens.

On the CPU every sequence (or group of sequences of equal length) is attended to by itself: no mask
over the packed row, so a NaN in one sequence cannot reach another as 0 x NaN. On CUDA it is torch's
variable-length flash attention. Rows after the last sequence are padding and come out as zeros.
"""

import torch
import torch.nn.functional as F


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    one_by_one: bool = False,
) -> torch.Tensor:
    """[tokens, heads, head size] from queries of that shape and keys and values of as many or fewer
    heads.

    `window` lets token i see the tokens i - window + 1 .. i; `softcap` bounds scores by softcap *
    tanh. `one_by_one` computes every sequence apart even where several have the same length.
    """
    places: dict[object, list[tuple[int, int]]] = {}
    start = 0
    for i, length in enumerate(lengths):
        group = i if one_by_one else length
        places.setdefault(group, []).append((i, start))
        start += length
    pieces: list[torch.Tensor] = [query] * len(lengths)
    for members in places.values():
        length = lengths[members[0][0]]
        q, k, v = (
            torch.stack([x[first : first + length] for _, first in members]).transpose(1, 2)
            for x in (query, key, value)
        )
        out = attend(q, k, v, scale=scale, window=window, softcap=softcap).transpose(1, 2)
        for (i, _), piece in zip(members, out, strict=True):
            pieces[i] = piece
    tail = len(query) - start
    if tail:
        pieces.append(query.new_zeros(tail, query.shape[1], value.shape[2]))
    return torch.cat(pieces)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of whole sequences of one length: [sequences, heads, length, head size]."""
    length = query.shape[2]
    if window is not None and window >= length:
        window = None
    if softcap is not None:
        return _attend_softcapped(query, key, value, scale, window, softcap)
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


def _attend_softcapped(query, key, value, scale, window, softcap):
    repeats = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(repeats, dim=1)
    value = value.repeat_interleave(repeats, dim=1)
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * (scale / softcap))
    seen = visible(query.shape[2], window, query.device)
    at_least_float32 = torch.promote_types(query.dtype, torch.float32)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1, dtype=at_least_float32)
    return weights.to(query.dtype) @ value
