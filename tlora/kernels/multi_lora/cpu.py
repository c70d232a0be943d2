"""The path for CPUs: a few matrix products per segment, written straight into their place.

Linears of a group share one product for S = X A^T and one for dX where no dropout tells their
inputs apart. Segments are slices, so one job's values never meet another's, not even as zeros. The
products are so small that slicing counts: tokens are cut for all segments at once, and views of
the pool are kept from call to call.
"""

from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tlora.kernels.multi_lora.tables import Segment
from tlora.kernels.streams import apply_mask, dropped, keep_mask, linear_key


class Rows(NamedTuple):
    """A job's rank rows in the matrices of a group, or in their gradients."""

    a: torch.Tensor
    parts: list[tuple[int, torch.Tensor, torch.Tensor]]
    """(linear, its rows of a, its rows of b), for the linears that the job adapts."""


class Matrices:
    """A and the B of every linear, with the views of them that were used before."""

    def __init__(self, a: torch.Tensor, b: list[torch.Tensor]) -> None:
        self.b = list(b)
        self._a = a.detach()
        self._rows: dict[object, Rows] = {}

    def has(self, b: list[torch.Tensor]) -> bool:
        return len(b) == len(self.b) and all(
            mine is b_l for mine, b_l in zip(self.b, b, strict=True)
        )

    def rows(self, segment: Segment) -> Rows:
        place = (segment.a_row, segment.ranks, segment.b_rows)
        if place not in self._rows:
            self._rows[place] = self._cut(segment)
        return self._rows[place]

    def _cut(self, segment: Segment) -> Rows:
        a = self._a[segment.a_row : segment.a_row + segment.width]
        parts, first = [], 0
        for i, (rank, row) in enumerate(zip(segment.ranks, segment.b_rows, strict=True)):
            if rank:
                parts.append((i, a[first : first + rank], self.b[i].detach()[row : row + rank]))
                first += rank
        return Rows(a, parts)


_known = WeakTensorKeyDictionary()
"""Matrices by their A, which is another tensor once a pool has grown."""


def matrices(a: torch.Tensor, b: list[torch.Tensor]) -> Matrices:
    found = _known.get(a)
    if found is None or not found.has(b):
        found = _known[a] = Matrices(a, b)
    return found


def add_forward(
    y: list[torch.Tensor],
    s: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: list[torch.Tensor],
    segments: list[Segment],
    rows: torch.Tensor,
    linears: list[int],
) -> None:
    """y_l += delta_l. The segment's S of [tokens, width], columns of a linear behind those of the one
    before, is written without gaps to where its rows begin in s."""
    values = matrices(a, b)
    busy = [segment for segment in segments if segment.width and segment.start < segment.stop]
    for segment, x_s, *y_s in _cut_tokens(busy, x, *y):
        x_s = x_s.to(a.dtype)
        own = values.rows(segment)
        s_s = _of_segment(s, segment)
        pieces_of_s = _by_linear(s_s, own)
        if segment.threshold:
            rows_s = rows[segment.start : segment.stop]
            for (i, a_l, _), s_l in zip(own.parts, pieces_of_s, strict=True):
                _write_product(s_l, _dropped(x_s, rows_s, segment, linears[i]), a_l.t())
        else:
            _write_product(s_s, x_s, own.a.t())
        for (i, _, b_l), s_l in zip(own.parts, pieces_of_s, strict=True):
            _add_product(y_s[i], s_l, b_l, segment.scale)


def add_backward(
    dx: torch.Tensor | None,
    x: torch.Tensor,
    dy: list[torch.Tensor],
    s: torch.Tensor,
    a: torch.Tensor,
    b: list[torch.Tensor],
    grad_a: torch.Tensor,
    grad_b: list[torch.Tensor],
    segments: list[Segment],
    rows: torch.Tensor,
    linears: list[int],
) -> None:
    """dx += ..., grad_a += ..., grad_b += ...; dx is None where nobody asks for it, s is what
    forward wrote."""
    values, gradients = matrices(a, b), matrices(grad_a, grad_b)
    busy = [segment for segment in segments if segment.width and segment.start < segment.stop]
    for segment, x_s, dx_s, *dy_s in _cut_tokens(busy, x, dx, *dy):
        x_s = x_s.to(a.dtype)
        dy_s = [dy_l.to(a.dtype) for dy_l in dy_s]
        own, grads = values.rows(segment), gradients.rows(segment)
        for (i, _, _), (_, _, grad_b_l), s_l in zip(
            own.parts, grads.parts, _by_linear(_of_segment(s, segment), own), strict=True
        ):
            grad_b_l.addmm_(s_l.t(), dy_s[i], alpha=segment.scale)
        if segment.threshold:
            _backward_dropped(segment, dx_s, x_s, dy_s, own, grads, rows, linears)
        else:
            _backward_shared(segment, dx_s, x_s, dy_s, own, grads)


def _backward_shared(segment, dx_s, x_s, dy_s, own: Rows, grads: Rows):
    ds = x_s.new_empty(len(x_s), segment.width)
    for (i, _, b_l), ds_l in zip(own.parts, _by_linear(ds, own), strict=True):
        _write_product(ds_l, dy_s[i], b_l.t())
    grads.a.addmm_(ds.t(), x_s, alpha=segment.scale)
    if dx_s is not None:
        _add_product(dx_s, ds, own.a, segment.scale)


def _backward_dropped(segment, dx_s, x_s, dy_s, own: Rows, grads: Rows, rows, linears):
    rows_s = rows[segment.start : segment.stop]
    # A copy where the formats differ, so that the sum over linears is rounded once.
    sum_s = None if dx_s is None else dx_s.to(own.a.dtype)
    for (i, a_l, b_l), (_, grad_a_l, _) in zip(own.parts, grads.parts, strict=True):
        key = linear_key(segment.key, linears[i])
        kept = keep_mask(rows_s, x_s.shape[1], key=key, threshold=segment.threshold)
        ds = dy_s[i].mm(b_l.t())
        grad_a_l.addmm_(ds.t(), apply_mask(x_s, kept, segment.threshold), alpha=segment.scale)
        if sum_s is not None:
            back = apply_mask(ds.mm(a_l), kept, segment.threshold)
            sum_s.add_(back, alpha=segment.scale)
    if dx_s is not None and dx_s.dtype != own.a.dtype:
        dx_s.copy_(sum_s)


def _dropped(x_s, rows_s, segment: Segment, linear: int) -> torch.Tensor:
    key = linear_key(segment.key, linear)
    return dropped(x_s, rows_s, key=key, threshold=segment.threshold)


def _of_segment(s: torch.Tensor, segment: Segment) -> torch.Tensor:
    """Its S. Rows that lay as far apart as in s, which is as wide as the widest job needs, would let
    neighbours decide how a product is computed."""
    tokens = segment.stop - segment.start
    place = s.view(-1)[segment.start * s.shape[1] :]
    return place[: tokens * segment.width].view(tokens, segment.width)


def _by_linear(s: torch.Tensor, own: Rows) -> list[torch.Tensor]:
    """The columns of S that belong to each linear."""
    return list(s.split([len(a_l) for _, a_l, _ in own.parts], dim=1))


def _cut_tokens(segments: list[Segment], *tensors: torch.Tensor | None):
    """(segment, the rows of each tensor that are its own), segment by segment."""
    sizes, wanted, end = [], [], 0
    for segment in segments:
        if segment.start > end:
            sizes.append(segment.start - end)
        wanted.append(len(sizes))
        sizes.append(segment.stop - segment.start)
        end = segment.stop
    first = tensors[0]
    assert first is not None
    if end < len(first):
        sizes.append(len(first) - end)
    nothing = [None] * len(sizes)
    pieces = [nothing if tensor is None else tensor.split(sizes) for tensor in tensors]
    for segment, index in zip(segments, wanted, strict=True):
        yield segment, *(piece[index] for piece in pieces)


def _write_product(target: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """target = left @ right. mm(out=target) would make a copy where columns are strided."""
    target.addmm_(left, right, beta=0.0)


def _add_product(target: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float):
    """target += scale * left @ right, rounded once to the target's number format."""
    if target.dtype == left.dtype:
        target.addmm_(left, right, alpha=scale)
    else:
        target.copy_(torch.addmm(target.to(left.dtype), left, right, alpha=scale))
