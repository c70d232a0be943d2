"""Cases for multi-LoRA, the right answer in float64, and a comparison piece by piece.

Rows of the pool that belong to nobody hold NaN, so that whoever reads them shows it.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from support.comparing import agrees, relative_error, same_bits
from tlora.kernels.multi_lora import Segment, multi_lora, reference, write_table
from tlora.kernels.multi_lora.routes import table_route
from tlora.kernels.multi_lora.tables import new_table
from tlora.kernels.streams import step_key, threshold

S_WIDTH = 208
"""Columns of S: more than any job of the tests needs."""

GAP = 2
"""Rows of nobody before every job's rows, and after the last."""


@dataclass(frozen=True)
class Job:
    tokens: int
    ranks: tuple[int, ...]
    scale: float = 1.0
    dropout: float = 0.0


@dataclass(frozen=True)
class Case:
    x: torch.Tensor
    dy: list[torch.Tensor]
    weights: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    transposed: bool
    a: torch.Tensor
    b: list[torch.Tensor]
    grad_a: torch.Tensor
    """What the gradients hold before backward."""

    grad_b: list[torch.Tensor]
    segments: list[Segment]
    rows: torch.Tensor
    linears: list[int]

    def but(self, **changes: object) -> "Case":
        return dataclasses.replace(self, **changes)

    def but_segment(self, index: int, **changes: object) -> "Case":
        segments = list(self.segments)
        segments[index] = dataclasses.replace(segments[index], **changes)
        return self.but(segments=segments)

    def table(self, capacity: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The segments as a table, and its scales. What lies behind them holds rubbish."""
        capacity = len(self.segments) + 3 if capacity is None else capacity
        table = new_table(capacity, len(self.b)).fill_(-7)
        scales = torch.full((capacity,), math.nan, dtype=torch.float64)
        write_table(self.segments, table, scales)
        return table, scales


class Results(NamedTuple):
    y: list[torch.Tensor]
    dx: torch.Tensor | None
    grad_a: torch.Tensor
    grad_b: list[torch.Tensor]


def make_case(
    jobs: list[Job],
    *,
    in_features: int = 24,
    out_features: tuple[int, ...] = (16, 40, 9),
    padding: int = 3,
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype = torch.float32,
    transposed: bool = False,
    seed: int = 0,
) -> Case:
    """Random values of both signs; the adapters add as much as the frozen linears give.

    Every second linear has a bias; jobs lie in the pool in another order than in the row.
    """
    generator = torch.Generator().manual_seed(seed)
    num_linears = len(out_features)
    tokens = sum(job.tokens for job in jobs) + padding

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    order = torch.randperm(len(jobs), generator=generator).tolist()
    a_rows, a_size = _places([sum(job.ranks) for job in jobs], order)
    places = [_places([job.ranks[i] for job in jobs], order[::-1]) for i in range(num_linears)]
    nan = torch.tensor(math.nan, dtype=pool_dtype)
    a = nan.repeat(a_size, in_features)
    b = [nan.repeat(size, out) for (_, size), out in zip(places, out_features, strict=True)]
    segments, row_ids, start = [], [], 0
    for j, job in enumerate(jobs):
        b_rows = tuple(first[j] for first, _ in places)
        a_l = normal(sum(job.ranks), in_features, dtype=pool_dtype) / in_features**0.5
        a[a_rows[j] : a_rows[j] + len(a_l)] = a_l
        for b_l, rank, b_row in zip(b, job.ranks, b_rows, strict=True):
            values = normal(rank, b_l.shape[1], dtype=pool_dtype) / max(rank, 1) ** 0.5
            b_l[b_row : b_row + rank] = values
        segments.append(
            Segment(
                start=start,
                stop=start + job.tokens,
                a_row=a_rows[j],
                ranks=job.ranks,
                b_rows=b_rows,
                scale=job.scale,
                threshold=threshold(job.dropout),
                key=step_key(seed, j),
            )
        )
        first_row = 1000 * j + 17
        row_ids += range(first_row, first_row + job.tokens)
        start += job.tokens
    shapes = [(in_features, out) if transposed else (out, in_features) for out in out_features]
    return Case(
        x=normal(tokens, in_features),
        dy=[normal(tokens, out) for out in out_features],
        weights=[normal(*shape) / in_features**0.5 for shape in shapes],
        biases=[normal(out) if i % 2 == 0 else None for i, out in enumerate(out_features)],
        transposed=transposed,
        a=a,
        b=b,
        grad_a=normal(*a.shape, dtype=pool_dtype),
        grad_b=[normal(*b_l.shape, dtype=pool_dtype) for b_l in b],
        segments=segments,
        rows=torch.tensor(row_ids + [0] * padding, dtype=torch.int32),
        linears=list(range(5, 5 + num_linears)),
    )


def run(
    case: Case,
    *,
    needs_dx: bool = True,
    capacity: int | None = None,
    entry: Callable[..., tuple[torch.Tensor, ...]] = multi_lora,
) -> Results:
    """Forward and backward through the public entry; the case itself is left as it was."""
    x = case.x.detach().clone().requires_grad_(needs_dx)
    a = case.a.detach().clone().requires_grad_(True)
    grad_a, grad_b = case.grad_a.clone(), [grad.clone() for grad in case.grad_b]
    table, scales = case.table(capacity)
    y = entry(
        x,
        case.weights,
        case.biases,
        a=a,
        b=case.b,
        grad_a=grad_a,
        grad_b=grad_b,
        route=table_route(table, scales, S_WIDTH),
        rows=case.rows,
        linears=torch.tensor(case.linears),
        transposed=case.transposed,
    )
    torch.autograd.backward(y, case.dy)
    assert a.grad is None, "the pool's values have a gradient of their own"
    return Results([y_l.detach() for y_l in y], x.grad, grad_a, grad_b)


def expected(case: Case, dtype: torch.dtype = torch.float64) -> Results:
    """The frozen linears by plain products, the adapters by the reference, all in `dtype`."""
    x, a = case.x.to(dtype), case.a.to(dtype)
    dy, b = [dy_l.to(dtype) for dy_l in case.dy], [b_l.to(dtype) for b_l in case.b]
    bases = [(w.T if case.transposed else w).to(dtype) for w in case.weights]
    where = (case.segments, case.rows, case.linears)
    y = reference.forward(x, a, b, *where)
    for y_l, base, bias in zip(y, bases, case.biases, strict=True):
        y_l += x @ base.T
        if bias is not None:
            y_l += bias.to(dtype)
    grads = reference.backward(x, dy, a, b, *where)
    dx = grads.x + sum(dy_l @ base for dy_l, base in zip(dy, bases, strict=True))
    grad_b = [start.to(dtype) + grad for start, grad in zip(case.grad_b, grads.b, strict=True)]
    return Results(y, dx, case.grad_a.to(dtype) + grads.a, grad_b)


def pieces(results: Results, case: Case) -> Iterator[tuple[str, torch.Tensor]]:
    """Every part of the results that belongs to one job or to none, by name."""
    padding = max((segment.stop for segment in case.segments), default=0)
    spans = [(f"job {j}", s.start, s.stop) for j, s in enumerate(case.segments)]
    for (name, start, stop), (kind, values) in itertools.product(
        [*spans, ("padding", padding, len(case.x))],
        [*((f"y{i}", y_l) for i, y_l in enumerate(results.y)), ("dx", results.dx)],
    ):
        if values is not None:
            yield f"{name}: {kind}", values[start:stop]
    for j, segment in enumerate(case.segments):
        a_row = segment.a_row
        for i, (rank, b_row) in enumerate(zip(segment.ranks, segment.b_rows, strict=True)):
            yield f"job {j}: grad_a{i}", results.grad_a[a_row : a_row + rank]
            yield f"job {j}: grad_b{i}", results.grad_b[i][b_row : b_row + rank]
            a_row += rank


def errors(found: Results, right: Results, case: Case) -> dict[str, float]:
    """The relative error of every piece."""
    both = zip(pieces(found, case), pieces(right, case), strict=True)
    return {name: relative_error(value, wanted) for (name, value), (_, wanted) in both}


def mismatches(found: Results, right: Results, case: Case) -> list[str]:
    """The pieces that are wrong. None means: every output and gradient is right to the noise of
    its number format, and gradients of rows of nobody kept their bits."""
    right = right if found.dx is not None else right._replace(dx=None)
    both = zip(pieces(found, case), pieces(right, case), strict=True)
    wrong = [name for (name, value), (_, wanted) in both if not agrees(value, wanted)]
    grads = [(found.grad_a, case.grad_a), *zip(found.grad_b, case.grad_b, strict=True)]
    for i, ((grad, before), nobody) in enumerate(zip(grads, _rows_of_nobody(case), strict=True)):
        if not same_bits(grad[nobody], before[nobody]):
            wrong.append(f"nobody: gradient {i}")
    return wrong


def of_others(results: Results, case: Case, job: int) -> list[torch.Tensor]:
    """The pieces that are not this job's."""
    return [value for name, value in pieces(results, case) if not name.startswith(f"job {job}:")]


def own(results: Results, case: Case, job: int) -> dict[str, torch.Tensor]:
    """The pieces of one job, by kind."""
    prefix = f"job {job}: "
    return {
        name.removeprefix(prefix): value
        for name, value in pieces(results, case)
        if name.startswith(prefix)
    }


def _places(sizes: list[int], order: list[int]) -> tuple[list[int], int]:
    """The first row of each range, laid out in `order` with gaps, and the rows in all."""
    first, places = GAP, [0] * len(sizes)
    for j in order:
        places[j] = first
        first += sizes[j] + GAP
    return places, first


def _rows_of_nobody(case: Case) -> list[torch.Tensor]:
    """bool [rows] for A and for each B."""
    free_a = torch.ones(len(case.a), dtype=torch.bool)
    free_b = [torch.ones(len(b_l), dtype=torch.bool) for b_l in case.b]
    for segment in case.segments:
        free_a[segment.a_row : segment.a_row + segment.width] = False
        for free, rank, b_row in zip(free_b, segment.ranks, segment.b_rows, strict=True):
            free[b_row : b_row + rank] = False
    return [free_a, *free_b]
