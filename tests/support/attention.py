"""Sequences packed with padding, attention to each of them token by token, and how results are
compared with it."""

import itertools
import math
from collections.abc import Callable

import torch

from support.comparing import TOLERANCES, relative_error, same_bits

LENGTHS = [7, 1, 12, 7, 63, 2, 7]
"""Three of one length, a single token, an odd one."""

PADDING = 5
HEADS, KEY_HEADS, HEAD_SIZE = 6, 2, 8
SCALE = 0.31

Attention = Callable[..., torch.Tensor]

# Both signs, in a format that holds them exactly.
SINKS = torch.tensor([1.5, -0.5, 0.0, 3.0, -2.0, 0.25])
OPTIONS = {
    "causal": {},
    "window": {"window": 4},
    "window of one": {"window": 1},
    "window above every length": {"window": 100},
    "softcap": {"softcap": 1.5},
    "window and softcap": {"window": 4, "softcap": 1.5},
    "sinks": {"sinks": SINKS},
    "window and sinks": {"window": 4, "sinks": SINKS},
}


def tensors(
    dtype: torch.dtype, key_heads: int = KEY_HEADS, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys, values and the output's gradient, padding included."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = sum(LENGTHS) + PADDING

    def normal(heads: int) -> torch.Tensor:
        shape = (num_rows, heads, HEAD_SIZE)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return normal(HEADS), normal(key_heads), normal(key_heads), normal(HEADS)


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token at a time: a softmax over exactly the keys that the token may see, and its head's
    sink."""
    share = query.shape[1] // key.shape[1]
    rows = []
    for start, stop in itertools.pairwise(itertools.accumulate(lengths, initial=0)):
        for token in range(start, stop):
            first = start if window is None else max(start, token - window + 1)
            keys, values = (
                torch.stack([x[first : token + 1, h // share] for h in range(query.shape[1])])
                for x in (key, value)
            )
            scores = (keys * query[token][:, None]).sum(dim=2) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            largest = scores.detach().amax(dim=1, keepdim=True)
            weights = (scores - largest).exp()
            sunk = 0.0 if sinks is None else (sinks[:, None] - largest).exp()
            weights = weights / (weights.sum(dim=1, keepdim=True) + sunk)
            rows.append((weights[:, :, None] * values).sum(dim=1))
    padding = query.new_zeros(len(query) - len(rows), *query.shape[1:])
    return torch.cat([torch.stack(rows), padding])


def results(
    attention: Attention,
    inputs: tuple[torch.Tensor, ...],
    lengths: list[int] = LENGTHS,
    dtype: torch.dtype | None = None,
    **options: object,
) -> list[torch.Tensor]:
    """The output and the gradients of queries, keys and values."""
    *qkv, gradient = (tensor.to(dtype or tensor.dtype) for tensor in inputs)
    qkv = [tensor.clone().requires_grad_(True) for tensor in qkv]
    out = attention(*qkv, lengths, scale=SCALE, **options)
    out.backward(gradient)
    return [out.detach(), *(tensor.grad for tensor in qkv)]


def sequences(values: list[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """The rows of each sequence and, last, of the padding."""
    sizes = [*LENGTHS, PADDING]
    return list(zip(*(value.split(sizes) for value in values), strict=True))


def mismatches(
    found: list[torch.Tensor], right: list[torch.Tensor], tolerance: float | None = None
) -> list[str]:
    """Outputs and gradients that differ by more than the noise of their number format."""
    return [
        f"{name} of sequence {i}"
        for i, errors in enumerate(errors_by_sequence(found, right))
        for name, error in errors.items()
        if not error <= (tolerance or TOLERANCES[found[0].dtype])
    ]


def errors_by_sequence(
    found: list[torch.Tensor], right: list[torch.Tensor]
) -> list[dict[str, float]]:
    """Relative to the right values; where those are 0 (nothing depends on the queries and keys of a
    token that sees only itself), to the right gradient of the values."""
    errors = []
    for left, wanted in zip(sequences(found), sequences(right), strict=True):
        sizes = [w if w.any() else wanted[3] for w in wanted]
        named = zip(("out", "dq", "dk", "dv"), left, wanted, sizes, strict=True)
        errors.append({n: relative_error(f, w, size) for n, f, w, size in named})
    return errors


def leaks(attention: Attention, sequence: int, where: int, **options: object) -> list[int]:
    """The other sequences whose bits change when one is poisoned in q, k, v or its gradient."""
    inputs = tensors(torch.float32)
    clean = sequences(results(attention, inputs, **options))
    start = sum(LENGTHS[:sequence])
    inputs[where][start : start + LENGTHS[sequence]] = math.nan
    found = sequences(results(attention, inputs, **options))
    assert any(value.isnan().any() for value in found[sequence]), "the poison must act"
    return [
        i
        for i, (left, right) in enumerate(zip(found, clean, strict=True))
        if i != sequence and not all(map(same_bits, left, right))
    ]
