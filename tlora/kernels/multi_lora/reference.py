"""The definition of right: plain torch, a loop over segments and linears, nothing clever.

`forward` gives what the adapters add to each linear's output, `backward` every gradient, both in
the pool's number format whatever the activations'. Every faster path is compared with these.
"""

from typing import NamedTuple

import torch

from tlora.kernels.multi_lora.tables import Segment
from tlora.kernels.streams import dropped, linear_key


class Gradients(NamedTuple):
    x: torch.Tensor
    a: torch.Tensor
    b: list[torch.Tensor]


def forward(
    x: torch.Tensor,
    a: torch.Tensor,
    b: list[torch.Tensor],
    segments: list[Segment],
    rows: torch.Tensor,
    linears: list[int],
) -> list[torch.Tensor]:
    """delta_l[t] = scale * drop_l(x[t]) A_l^T B_l for the tokens t of each segment, 0 elsewhere."""
    deltas = [x.new_zeros(len(x), b_l.shape[1], dtype=a.dtype) for b_l in b]
    for segment in segments:
        tokens = slice(segment.start, segment.stop)
        a_row = segment.a_row
        for i, rank in enumerate(segment.ranks):
            key = linear_key(segment.key, linears[i])
            x_l = dropped(x[tokens].to(a.dtype), rows[tokens], key=key, threshold=segment.threshold)
            a_l, a_row = a[a_row : a_row + rank], a_row + rank
            b_l = b[i][segment.b_rows[i] : segment.b_rows[i] + rank]
            deltas[i][tokens] = segment.scale * (x_l @ a_l.T) @ b_l
    return deltas


def backward(
    x: torch.Tensor,
    dy: list[torch.Tensor],
    a: torch.Tensor,
    b: list[torch.Tensor],
    segments: list[Segment],
    rows: torch.Tensor,
    linears: list[int],
) -> Gradients:
    """The gradients of sum_l <dy_l, delta_l> for x, A and each B."""
    grads = Gradients(
        x=torch.zeros_like(x, dtype=a.dtype),
        a=torch.zeros_like(a),
        b=[torch.zeros_like(b_l) for b_l in b],
    )
    for segment in segments:
        tokens = slice(segment.start, segment.stop)
        a_row = segment.a_row
        for i, rank in enumerate(segment.ranks):
            key = linear_key(segment.key, linears[i])
            stream = {"key": key, "threshold": segment.threshold}
            x_l = dropped(x[tokens].to(a.dtype), rows[tokens], **stream)
            a_rows, a_row = slice(a_row, a_row + rank), a_row + rank
            b_rows = slice(segment.b_rows[i], segment.b_rows[i] + rank)
            dy_l = dy[i][tokens].to(a.dtype)
            ds = segment.scale * dy_l @ b[i][b_rows].T
            grads.b[i][b_rows] += segment.scale * (x_l @ a[a_rows].T).T @ dy_l
            grads.a[a_rows] += ds.T @ x_l
            grads.x[tokens] += dropped(ds @ a[a_rows], rows[tokens], **stream)
    return grads
