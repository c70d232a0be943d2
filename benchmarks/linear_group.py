"""The linears of one decoder layer that share an input, with adapters: what `gpu_linears.py` and
`gpu_ways.py` time."""

import itertools
from dataclasses import dataclass

import torch
from composed_batch import Part, composed_batch

from tlora.kernels.multi_lora import triton_backward as backward
from tlora.kernels.multi_lora import triton_forward as forward
from tlora.kernels.multi_lora.blocks import Blocks, Layout, Tiles
from tlora.kernels.multi_lora.tables import Segment
from tlora.kernels.streams import step_key, threshold
from tlora.runtime.benchmark.settings import read_lengths

MIXED = (8, 64, 16, 32)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's numbers have no bfloat16.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16


@dataclass(frozen=True)
class Case:
    tokens: int
    adapters: int
    ranks: str
    dropout: float
    zero: bool = False
    """Gradients are marked as zero: a job's whole batch is in the nano-batch."""

    composed: int | None = None
    """The nano-batch of this number that the engine makes of so many jobs, instead of one with all
    adapters in it."""

    lengths: str = "512"
    batch: tuple[int, ...] = (1, 2, 4)

    @property
    def max_rank(self) -> int:
        return max(self.rank(i) for i in range(self.adapters))

    def rank(self, i: int) -> int:
        return MIXED[i % len(MIXED)] if self.ranks == "mixed" else int(self.ranks)

    def segments(self, linears: int) -> list[Segment]:
        parts = self.uneven() if self.composed is None else self.as_composed(self.composed)
        segments, start, a_row, b_row = [], 0, 0, 0
        for part in parts:
            rank, stop = self.rank(part.job), start + part.tokens
            segments.append(
                Segment(
                    start=start,
                    stop=stop,
                    a_row=a_row,
                    ranks=(rank,) * linears,
                    b_rows=(b_row,) * linears,
                    scale=16 / rank,
                    threshold=threshold(self.dropout),
                    key=step_key(part.job, 3),
                    zero_grad=part.begins,
                )
            )
            start, a_row, b_row = stop, a_row + rank * linears, b_row + rank
        return segments

    def uneven(self) -> list[Part]:
        """Of all adapters, so that they fill the nano-batch."""
        weights = [1.0 + 0.5 * ((7 * i) % 5 - 2) / 2 for i in range(self.adapters)]
        edges = [0, *itertools.accumulate(weights)]
        edges = [round(edge / edges[-1] * self.tokens) for edge in edges]
        return [
            Part(i, stop - start, self.zero)
            for i, (start, stop) in enumerate(itertools.pairwise(edges))
        ]

    def as_composed(self, number: int) -> list[Part]:
        return composed_batch(
            [self.rank(i) for i in range(self.adapters)],
            self.tokens,
            lengths=read_lengths(self.lengths),
            batches=self.batch,
            number=number,
        )


class Group:
    """Linears that share an input, with pools, gradients and block tables."""

    def __init__(self, case: Case, features: tuple, *, shadow: bool = False):
        self.case = case
        self.num_in, self.outs = features
        tiles = Tiles.for_tokens(case.tokens, dropout=case.dropout > 0)
        n = len(self.outs)
        self.segments = case.segments(n)
        rank_rows = sum(s.ranks[0] for s in self.segments)
        random = {"device": DEVICE, "dtype": DTYPE}
        self.x = torch.randn(case.tokens, self.num_in, **random)
        self.weights = [
            torch.randn(o, self.num_in, **random) * self.num_in**-0.5 for o in self.outs
        ]
        self.dy = [torch.randn(case.tokens, o, **random) * 0.1 for o in self.outs]
        self.a = torch.randn(rank_rows * n, self.num_in, device=DEVICE) * self.num_in**-0.5
        self.b = [torch.randn(rank_rows, o, device=DEVICE) * 0.1 for o in self.outs]
        self.grad_a = torch.zeros_like(self.a)
        self.grad_b = [torch.zeros_like(b) for b in self.b]
        self.a_used = self.a.to(DTYPE) if shadow else self.a
        self.b_used = [b.to(DTYPE) for b in self.b] if shadow else self.b
        self.rows = torch.cat(
            [
                torch.arange(s.stop - s.start, dtype=torch.int32, device=DEVICE)
                for s in self.segments
            ]
            # Padding is nobody's.
            + [torch.zeros(case.tokens, dtype=torch.int32, device=DEVICE)]
        )[: case.tokens]
        self.linears = list(range(5, 5 + n))
        layout = Layout(
            num_tokens=case.tokens,
            in_features=self.num_in,
            out_features=self.outs,
            max_segments=max(32, case.adapters),
            max_rank=case.max_rank,
            dropout=case.dropout > 0,
            tiles=tiles,
        )
        self.blocks = Blocks.new(layout, DEVICE)
        self.blocks.copy(self.segments)
        self.y = [torch.empty(case.tokens, o, **random) for o in self.outs]
        self.dx = torch.empty_like(self.x)
        self.s = torch.empty(case.tokens, layout.s_width, **random)
        self.ds = torch.empty_like(self.s)

    def frozen_forward(self):
        for y, w in zip(self.y, self.weights, strict=True):
            torch.mm(self.x, w.T, out=y)

    def frozen_backward(self):
        torch.mm(self.dy[0], self.weights[0], out=self.dx)
        for dy, w in zip(self.dy[1:], self.weights[1:], strict=True):
            self.dx.addmm_(dy, w)

    def forward(self, how: str):
        if how == "add":
            self.frozen_forward()
        self.s = forward.add_forward(
            self.y, self.x, self.a_used, self.b_used, self.blocks, self.rows, self.linears,
            write=how != "add",
        )  # fmt: skip
        if how == "write":
            for y, w in zip(self.y, self.weights, strict=True):
                y.addmm_(self.x, w.T)

    def backward(self, how: str):
        if how == "add":
            self.frozen_backward()
        backward.add_backward(
            self.dx, self.x, self.dy, self.s, self.a_used, self.b_used, self.grad_a, self.grad_b,
            self.blocks, self.rows, self.linears, write=how != "add",
        )  # fmt: skip
        if how == "write":
            for dy, w in zip(self.dy, self.weights, strict=True):
                self.dx.addmm_(dy, w)

    def floor_bytes(self) -> dict[str, int]:
        """Activations and pools once per kernel that touches them; gradients read and written."""
        x = 2 * self.case.tokens * self.num_in
        y = 2 * self.case.tokens * sum(self.outs)
        a = self.a_used.numel() * self.a_used.itemsize
        b = sum(b.numel() * b.itemsize for b in self.b_used)
        grad_a, grad_b = 8 * self.a.numel(), 8 * sum(b.numel() for b in self.b)
        return {
            "shrink_x": x + a,
            "expand_y": y + b,
            "reduce_b": y + b + grad_b,
            "reduce_a": x + grad_a,
            "expand_dx": x + a,
        }
