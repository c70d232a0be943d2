"""The path for CPUs without a C compiler, and for half precision there: a few matrix products per
segment, written straight into their place.

Linears of a group share one product for S = X A^T and one for dX where no dropout tells their
inputs apart. Segments are slices, so one job's values never meet another's, not even as zeros. The
products are so small that slicing counts: tokens are cut for all segments at once, and views of
the pool are kept from call to call.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tlora.kernels.multi_lora.routes import Route
from tlora.kernels.multi_lora.tables import Segment, read_table
from tlora.kernels.streams import apply_mask, dropped, keep_mask, linear_key

LINE = 16
"""float32 values in a cache line."""


class Part(NamedTuple):
    """A job's rank rows for one linear."""

    linear: int
    a: torch.Tensor
    b: torch.Tensor
    b_transposed: torch.Tensor


class Rows(NamedTuple):
    """A job's rank rows in the matrices of a group, or in their gradients."""

    a: torch.Tensor
    a_transposed: torch.Tensor
    parts: list[Part]
    """For the linears that the job adapts."""

    ranks: list[int]
    """Of the parts."""


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
                b = self.b[i].detach()[row : row + rank]
                parts.append(Part(i, a[first : first + rank], b, b.t()))
                first += rank
        return Rows(a, a.t(), parts, [rank for rank in segment.ranks if rank])


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
    route: Route,
    rows: torch.Tensor,
    linears: torch.Tensor,
    *,
    is_written: bool = False,
) -> None:
    """y_l += delta_l. Every segment's S of [tokens, width], the columns of a linear behind those of
    the one before, is written to s without gaps, unless it is there."""
    values, numbers, busy = matrices(a, b), linears.tolist(), _busy(route)
    x, same_format = x.to(a.dtype), all(y_l.dtype == a.dtype for y_l in y)
    pieces = zip(busy, _cut_s(s, busy), *_cut_tokens(busy, x, *y), strict=True)
    for segment, s_s, x_s, *y_s in pieces:
        own = values.rows(segment)
        parts_of_s = _by_linear(s_s, own)
        if is_written:
            pass
        elif segment.threshold:
            rows_s = rows[segment.start : segment.stop]
            for part, s_l in zip(own.parts, parts_of_s, strict=True):
                key = linear_key(segment.key, numbers[part.linear])
                x_l = dropped(x_s, rows_s, key=key, threshold=segment.threshold)
                _write_product(s_l, x_l, part.a.t())
        else:
            _write_product(s_s, x_s, own.a_transposed)
        for part, s_l in zip(own.parts, parts_of_s, strict=True):
            _add_product(y_s[part.linear], s_l, part.b, segment.scale, same_format)


def add_backward(
    dx: torch.Tensor | None,
    x: torch.Tensor,
    dy: list[torch.Tensor],
    s: torch.Tensor,
    a: torch.Tensor,
    b: list[torch.Tensor],
    grad_a: torch.Tensor,
    grad_b: list[torch.Tensor],
    route: Route,
    rows: torch.Tensor,
    linears: torch.Tensor,
) -> None:
    """dx += ..., grad_a += ..., grad_b += ...; dx is None where nobody asks for it, s is what
    forward wrote."""
    values, gradients = matrices(a, b), matrices(grad_a, grad_b)
    numbers, busy = linears.tolist(), _busy(route)
    dx_pieces = [None] * len(busy) if dx is None else _cut_tokens(busy, dx)[0]
    tokens = _cut_tokens(busy, x.to(a.dtype), *(dy_l.to(a.dtype) for dy_l in dy))
    for segment, s_s, dx_s, x_s, *dy_s in zip(
        busy, _cut_s(s, busy), dx_pieces, *tokens, strict=True
    ):
        own, grads = values.rows(segment), gradients.rows(segment)
        for part, s_l in zip(grads.parts, _by_linear(s_s, own), strict=True):
            part.b.addmm_(s_l.t(), dy_s[part.linear], alpha=segment.scale)
        if segment.threshold:
            _backward_dropped(segment, dx_s, x_s, dy_s, own, grads, rows, numbers)
        else:
            _backward_shared(segment, dx_s, x_s, dy_s, own, grads)


def _busy(route: Route) -> list[Segment]:
    return [
        segment
        for segment in read_table(route.table, route.extra)
        if segment.width and segment.start < segment.stop
    ]


def _backward_shared(segment, dx_s, x_s, dy_s, own: Rows, grads: Rows):
    ds = x_s.new_empty(x_s.shape[0], segment.width)
    for part, ds_l in zip(own.parts, _by_linear(ds, own), strict=True):
        _write_product(ds_l, dy_s[part.linear], part.b_transposed)
    grads.a.addmm_(ds.t(), x_s, alpha=segment.scale)
    if dx_s is not None:
        _add_product(dx_s, ds, own.a, segment.scale, dx_s.dtype == ds.dtype)


def _backward_dropped(segment, dx_s, x_s, dy_s, own: Rows, grads: Rows, rows, linears):
    rows_s = rows[segment.start : segment.stop]
    # A copy where the formats differ, so that the sum over linears is rounded once.
    sum_s = None if dx_s is None else dx_s.to(own.a.dtype)
    for part, grad in zip(own.parts, grads.parts, strict=True):
        key = linear_key(segment.key, linears[part.linear])
        kept = keep_mask(rows_s, x_s.shape[1], key=key, threshold=segment.threshold)
        ds = dy_s[part.linear].mm(part.b_transposed)
        grad.a.addmm_(ds.t(), apply_mask(x_s, kept, segment.threshold), alpha=segment.scale)
        if sum_s is not None:
            back = apply_mask(ds.mm(part.a), kept, segment.threshold)
            sum_s.add_(back, alpha=segment.scale)
    if dx_s is not None and dx_s.dtype != own.a.dtype:
        dx_s.copy_(sum_s)


def _cut_s(s: torch.Tensor, segments: list[Segment]) -> list[torch.Tensor]:
    """Each segment's S, in one piece of memory: if its rows were as far apart as those of s, which
    is as wide as the widest job needs, neighbours would decide how its products are computed."""
    shapes = [(segment.stop - segment.start, segment.width) for segment in segments]
    sizes: list[int] = []
    for tokens, width in shapes:
        # A piece begins where a cache line does, as a tensor of its own would.
        sizes += [tokens * width, -tokens * width % LINE]
    sizes.append(s.numel() - sum(sizes))
    pieces = torch.split_with_sizes(s.view(-1), sizes)[::2]
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=False)]


def _cut_tokens(segments: list[Segment], *tensors: torch.Tensor) -> list[Sequence[torch.Tensor]]:
    """Of each tensor, every segment's rows."""
    sizes, end = [], 0
    for segment in segments:
        sizes += [segment.start - end, segment.stop - segment.start]
        end = segment.stop
    sizes.append(tensors[0].shape[0] - end)
    return [torch.split_with_sizes(tensor, sizes)[1::2] for tensor in tensors]


def _by_linear(s: torch.Tensor, own: Rows) -> Sequence[torch.Tensor]:
    """The columns of S that belong to each linear."""
    return (s,) if len(own.ranks) == 1 else torch.split_with_sizes(s, own.ranks, 1)


def _write_product(target: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """target = left @ right. mm(out=target) would make a copy where columns are strided."""
    target.addmm_(left, right, beta=0.0)


def _add_product(
    target: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float, same_format: bool
) -> None:
    """target += scale * left @ right, rounded once to the target's number format."""
    if same_format:
        target.addmm_(left, right, alpha=scale)
    else:
        target.copy_(torch.addmm(target.to(left.dtype), left, right, alpha=scale))
