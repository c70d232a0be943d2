"""What a compiled native.c is compared on before it is used: attention by scores in double
precision.

Sequences of one token, of less and more than a strip and a block of keys; heads that share keys and
that do not; head sizes that fill no vector, and the widest; a window; scores whose powers are 0;
tensors whose heads and tokens lie apart; padding, which holds NaN and must come out as zeros; and a
query of NaN, which must stay so.
"""

import itertools
from typing import Protocol

import torch

from tlora.kernels.attention.packed import attend_by_scores

LIMIT = 3e-6
"""Of the norm of a sequence's part of a result, for scores of 10: of larger ones rounding leaves as
much less. On an AMD EPYC it makes 3e-7."""

LENGTHS = (1, 33, 150, 7, 64, 129)
PADDING = 3
PLACE_OF_NAN = 100
CASES = [
    # heads, heads of keys, head size, window, factor of queries
    (4, 2, 32, None, 1.0),
    (3, 3, 20, None, 1.0),
    (6, 1, 8, 40, 1.0),
    (2, 1, 256, None, 1.0),
    (2, 2, 16, 50, 60.0),
]
SCALE = 0.3


class Kernels(Protocol):
    def forward(self, q, k, v, starts, scale, window) -> tuple[torch.Tensor, ...]: ...

    def backward(self, dy, q, k, v, y, sums, starts, scale, window) -> tuple[torch.Tensor, ...]: ...


def find_fault(kernels: Kernels) -> str | None:
    """What is wrong with them, or None."""
    # Wherever it is first needed, in an evaluation too.
    with torch.inference_mode(False), torch.enable_grad():
        return _find_fault(kernels)


def _find_fault(kernels: Kernels) -> str | None:
    for heads, kv_heads, size, window, factor in CASES:
        q, dy = factor * _random(heads, size, 0), _random(heads, size, 1)
        k, v = _random(kv_heads, size, 2), _random(kv_heads, size, 3)
        starts = torch.tensor(list(_starts()), dtype=torch.int32, device="cpu")
        where = (starts, SCALE, window or 2**31 - 1)
        y, sums = kernels.forward(q, k, v, *where)
        found = [y, *kernels.backward(dy, q, k, v, y, sums, *where)]
        case = f"{heads} heads over {kv_heads} of {size}, window {window}, queries of {factor}"
        limit = LIMIT * max(1.0, factor)
        for name, got in zip(("Y", "dQ", "dK", "dV"), found, strict=True):
            if got[sum(LENGTHS) :].any():
                return f"{name} of padding is not zero ({case})"
        for start, stop in itertools.pairwise(_starts()):
            right = _right(q[start:stop], k[start:stop], v[start:stop], dy[start:stop], window)
            for name, got, wanted in zip(("Y", "dQ", "dK", "dV"), found, right, strict=True):
                # One token's dQ and dK are zeros, to rounding.
                size_of = torch.maximum(wanted.norm(), dy[start:stop].double().norm())
                # Not "larger than": NaN is not.
                if not (got[start:stop].double() - wanted).norm() <= limit * size_of:
                    return f"{name} of {stop - start} tokens is off ({case})"
        q[PLACE_OF_NAN] = torch.nan
        y, _ = kernels.forward(q, k, v, *where)
        if not y[PLACE_OF_NAN].isnan().all():
            return f"Y of a query of NaN is a number ({case})"
    return None


def _starts() -> itertools.accumulate:
    return itertools.accumulate(LENGTHS, initial=0)


def _random(heads: int, size: int, seed: int) -> torch.Tensor:
    """[tokens, heads, size], a head's tokens beside each other."""
    # It runs at a user's first step, whatever torch's defaults are there.
    generator = torch.Generator("cpu").manual_seed(seed)
    num_rows = sum(LENGTHS) + PADDING
    x = torch.randn(heads, num_rows, size, generator=generator, dtype=torch.float32, device="cpu")
    x[:, sum(LENGTHS) :] = torch.nan
    return x.transpose(0, 1)


def _right(q, k, v, dy, window: int | None) -> list[torch.Tensor]:
    queries, keys, values = (
        each.double().transpose(0, 1)[None].requires_grad_() for each in (q, k, v)
    )
    y = attend_by_scores(queries, keys, values, SCALE, window, None, None)
    upstream = dy.double().transpose(0, 1)[None]
    gradients = torch.autograd.grad(y, (queries, keys, values), upstream)
    return [each[0].transpose(0, 1) for each in (y.detach(), *gradients)]
