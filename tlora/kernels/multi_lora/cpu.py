"""The path for CPUs: a few matrix products per segment, written straight into their place.

Linears of a group share one product for S = X A^T and one for dX where no dropout tells their
inputs apart. Segments are slices, so one job's values never meet another's, not even as zeros.
"""

import torch

from tlora.kernels.multi_lora.tables import Segment
from tlora.kernels.streams import apply_mask, dropped, keep_mask, linear_key


def _add_product(target: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float):
    """target += scale * left @ right, rounded once to the target's number format."""
    if target.dtype == left.dtype:
        target.addmm_(left, right, alpha=scale)
    else:
        target.copy_(torch.addmm(target.to(left.dtype), left, right, alpha=scale))


def _rank_slices(segment: Segment) -> list[tuple[int, slice]]:
    """(linear, its rank rows inside the segment's width) for the linears the job adapts."""
    slices, first = [], 0
    for i, rank in enumerate(segment.ranks):
        if rank:
            slices.append((i, slice(first, first + rank)))
        first += rank
    return slices


def add_forward(
    y: list[torch.Tensor],
    x: torch.Tensor,
    a: torch.Tensor,
    b: list[torch.Tensor],
    segments: list[Segment],
    rows: torch.Tensor,
    linears: list[int],
) -> None:
    """y_l += delta_l."""
    for segment in segments:
        tokens = slice(segment.start, segment.stop)
        parts = _rank_slices(segment)
        if not parts or segment.start == segment.stop:
            continue
        x_s = x[tokens].to(a.dtype)
        a_s = a[segment.a_row : segment.a_row + segment.width]
        shared = None if segment.threshold else x_s @ a_s.T
        for i, ranks in parts:
            if shared is None:
                key = linear_key(segment.key, linears[i])
                x_l = dropped(x_s, rows[tokens], key=key, threshold=segment.threshold)
                s = x_l @ a_s[ranks].T
            else:
                s = shared[:, ranks]
            b_l = b[i][segment.b_rows[i] : segment.b_rows[i] + segment.ranks[i]]
            _add_product(y[i][tokens], s, b_l, segment.scale)


def add_backward(
    dx: torch.Tensor | None,
    x: torch.Tensor,
    dy: list[torch.Tensor],
    a: torch.Tensor,
    b: list[torch.Tensor],
    grad_a: torch.Tensor,
    grad_b: list[torch.Tensor],
    segments: list[Segment],
    rows: torch.Tensor,
    linears: list[int],
) -> None:
    """dx += ..., grad_a += ..., grad_b += ...; dx is None where nobody asks for it."""
    for segment in segments:
        if segment.width and segment.start < segment.stop:
            backward = _backward_dropped if segment.threshold else _backward_shared
            backward(segment, dx, x, dy, a, b, grad_a, grad_b, rows, linears)


def _backward_shared(segment, dx, x, dy, a, b, grad_a, grad_b, rows, linears):
    tokens = slice(segment.start, segment.stop)
    a_rows = slice(segment.a_row, segment.a_row + segment.width)
    x_s = x[tokens].to(a.dtype)
    s = x_s @ a[a_rows].T
    ds = torch.empty_like(s)
    for i, ranks in _rank_slices(segment):
        b_rows = slice(segment.b_rows[i], segment.b_rows[i] + segment.ranks[i])
        dy_l = dy[i][tokens].to(a.dtype)
        ds[:, ranks] = dy_l @ b[i][b_rows].T
        grad_b[i][b_rows].addmm_(s[:, ranks].T, dy_l, alpha=segment.scale)
    grad_a[a_rows].addmm_(ds.T, x_s, alpha=segment.scale)
    if dx is not None:
        _add_product(dx[tokens], ds, a[a_rows], segment.scale)


def _backward_dropped(segment, dx, x, dy, a, b, grad_a, grad_b, rows, linears):
    tokens = slice(segment.start, segment.stop)
    x_s = x[tokens].to(a.dtype)
    # A copy where the formats differ, so that the sum over linears is rounded once.
    dx_s = None if dx is None else dx[tokens].to(a.dtype)
    for i, ranks in _rank_slices(segment):
        key = linear_key(segment.key, linears[i])
        kept = keep_mask(rows[tokens], x.shape[1], key=key, threshold=segment.threshold)
        a_rows = slice(segment.a_row + ranks.start, segment.a_row + ranks.stop)
        b_rows = slice(segment.b_rows[i], segment.b_rows[i] + segment.ranks[i])
        x_l = apply_mask(x_s, kept, segment.threshold)
        dy_l = dy[i][tokens].to(a.dtype)
        ds = dy_l @ b[i][b_rows].T
        grad_b[i][b_rows].addmm_((x_l @ a[a_rows].T).T, dy_l, alpha=segment.scale)
        grad_a[a_rows].addmm_(ds.T, x_l, alpha=segment.scale)
        if dx_s is not None:
            back = apply_mask(ds @ a[a_rows], kept, segment.threshold)
            dx_s.add_(back, alpha=segment.scale)
    if dx is not None and dx.dtype != a.dtype:
        dx[tokens] = dx_s
