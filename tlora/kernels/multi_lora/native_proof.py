"""What a compiled native.c is compared on before it is used: the reference in double precision.

Widths that fill no vector, sums longer than a block, jobs with and without dropout, one cut in two
as a job is at its sequences, and rows of nobody, which hold NaN or must stay as they are.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Protocol

import torch

from tlora.kernels import streams
from tlora.kernels.multi_lora import reference
from tlora.kernels.multi_lora.routes import table_route
from tlora.kernels.multi_lora.tables import Segment, new_table, write_table

LIMIT = 1e-5
"""Of the norm of a job's part of a result. Rounding to float32 makes 5e-7."""

DROPOUT = 0.3
IN, OUTS = 300, (83, 16, 5)
JOBS = [(5, 0, 9), (16, 33, 1), (1, 4, 3), (0, 0, 7)]
"""Ranks."""

SEGMENTS = [(0, 0, 270), (1, 270, 281), (2, 281, 282), (3, 285, 300), (3, 300, 420)]
"""Job, first token, and the one behind the last."""

NUM_TOKENS = 430
GAP = 2
"""Rows of nobody before every job's rows in the pool, and behind the last."""


class Kernels(Protocol):
    def add_forward(self, y, s, x, a, b, route, rows, linears) -> None: ...

    def add_backward(self, dx, x, dy, s, a, b, grad_a, grad_b, route, rows, linears) -> None: ...


def find_fault(kernels: Kernels) -> str | None:
    """What is wrong with them, or None."""
    for dropout in (0.0, DROPOUT):
        case = _Case(dropout)
        found, right = case.found(kernels), case.right()
        for name, index, rows, limit in case.parts():
            got, wanted = found[index][rows].double(), right[index][rows]
            # Not "larger than": NaN is not.
            if not (got - wanted).norm() <= limit * wanted.norm():
                return f"{name} is off (dropout {dropout})"
    return None


class _Case:
    def __init__(self, dropout: float) -> None:
        # It runs where an adapter first meets tokens, whatever torch's defaults are there.
        generator = torch.Generator("cpu").manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

        n = len(OUTS)
        self.a_rows = _places([sum(ranks) for ranks in JOBS])
        self.b_rows = [_places([ranks[i] for ranks in JOBS]) for i in range(n)]
        self.segments = [
            Segment(
                start,
                stop,
                self.a_rows[job].start,
                JOBS[job],
                tuple(rows[job].start for rows in self.b_rows),
                scale=0.5 + job,
                threshold=streams.threshold(dropout) if job != 1 else 0,
                key=streams.step_key(job, 7),
            )
            for job, start, stop in SEGMENTS
        ]
        self.x, self.dx = random(NUM_TOKENS, IN), random(NUM_TOKENS, IN)
        self.y = [random(NUM_TOKENS, out) for out in OUTS]
        self.dy = [random(NUM_TOKENS, out) for out in OUTS]
        places = [self.a_rows, *self.b_rows]
        widths = [IN, *OUTS]
        self.pool = [
            _with_nan(random(each[-1].stop + GAP, width), each)
            for each, width in zip(places, widths, strict=True)
        ]
        self.grads = [random(*each.shape) for each in self.pool]
        self.rows = torch.arange(3, 3 + NUM_TOKENS, dtype=torch.int32, device="cpu")
        self.linears = torch.tensor([4, 11, 2], device="cpu")

    def found(self, kernels: Kernels) -> list[torch.Tensor]:
        """Y of every linear, dX, and the gradients of A and of every B."""
        a, *b = self.pool
        table = new_table(len(self.segments), len(OUTS))
        scales = self.x.new_zeros(len(self.segments))
        write_table(self.segments, table, scales)
        route = table_route(table, scales, max(map(sum, JOBS)))
        where = (route, self.rows, self.linears)
        y, dx = [each.clone() for each in self.y], self.dx.clone()
        grad_a, *grad_b = (each.clone() for each in self.grads)
        s = self.x.new_full((NUM_TOKENS, route.s_like.shape[1]), torch.nan)
        kernels.add_forward(y, s, self.x, a, b, *where)
        kernels.add_backward(dx, self.x, self.dy, s, a, b, grad_a, grad_b, *where)
        return [*y, dx, grad_a, *grad_b]

    def right(self) -> list[torch.Tensor]:
        x, dy = self.x.double(), [each.double() for each in self.dy]
        a, *b = (each.double() for each in self.pool)
        where = (self.segments, self.rows, self.linears.tolist())
        deltas = reference.forward(x, a, b, *where)
        grads = reference.backward(x, dy, a, b, *where)
        added = [*deltas, grads.x, grads.a, *grads.b]
        return [
            each.double() + more
            for each, more in zip([*self.y, self.dx, *self.grads], added, strict=True)
        ]

    def parts(self) -> Iterator[tuple[str, int, slice | torch.Tensor, float]]:
        """Name, place in the list, rows, and the limit there: job by job, so that a small one
        counts as much as a large one."""
        n = len(OUTS)
        names = [*(f"Y of linear {i}" for i in range(n)), "dX"]
        names += ["dA", *(f"dB of linear {i}" for i in range(n))]
        of_tokens = [slice(start, stop) for _, start, stop in SEGMENTS]
        rows_of = [of_tokens] * (n + 1) + [self.a_rows, *self.b_rows]
        for index, (name, places) in enumerate(zip(names, rows_of, strict=True)):
            size = NUM_TOKENS if index <= n else len(self.grads[index - n - 1])
            nobodys = torch.ones(size, dtype=torch.bool, device="cpu")
            for rows in places:
                nobodys[rows] = False
                yield f"{name}, rows {rows.start} to {rows.stop}", index, rows, LIMIT
            yield f"{name}, rows of nobody", index, nobodys, 0.0


def _places(sizes: list[int]) -> list[slice]:
    """Rows of the pool, job by job."""
    firsts = accumulate(sizes[:-1], lambda first, size: first + size + GAP, initial=GAP)
    return [slice(first, first + size) for first, size in zip(firsts, sizes, strict=True)]


def _with_nan(values: torch.Tensor, places: list[slice]) -> torch.Tensor:
    """In rows of nobody."""
    kept = torch.full_like(values, torch.nan)
    for rows in places:
        kept[rows] = values[rows]
    return kept
