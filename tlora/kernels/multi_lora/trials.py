"""Inputs on which the tuner times the kernels: one group of linears, eight jobs of usual ranks, and
random values from a generator of their own."""

from collections.abc import Callable, Iterator

import torch

from tlora.kernels import streams
from tlora.kernels.multi_lora import triton_backward, triton_forward
from tlora.kernels.multi_lora.blocks import Blocks, Layout, Tiles
from tlora.kernels.multi_lora.devices import choice_name, tuning_of
from tlora.kernels.multi_lora.routes import MIN_RANK, MIN_SEGMENTS
from tlora.kernels.multi_lora.settings import Shape, Tuning
from tlora.kernels.multi_lora.tables import Segment
from tlora.kernels.multi_lora.tuner import GroupShape, Trial

TOKENS = 2048
RANKS = (8, 16, 32, 64) * 2
# Those that take most of a step first: time may not suffice for all.
KERNELS = ("reduce_b", "expand_y", "reduce_a", "expand_dx", "shrink", "sum")
WITH_DROPOUT = ("shrink", "reduce_a")
"""Those whose settings differ then."""


def names(group: GroupShape, dtype: torch.dtype, operands: torch.dtype) -> list[str]:
    """Of the choices that a model of this format needs."""
    return [
        choice_name(kernel, _shape(group, dtype, operands, kernel, dropout))
        for kernel, dropout in _cases()
    ]


def _cases() -> Iterator[tuple[str, bool]]:
    yield from ((kernel, False) for kernel in KERNELS)
    yield from ((kernel, True) for kernel in WITH_DROPOUT)


def _shape(
    group: GroupShape, dtype: torch.dtype, operands: torch.dtype, kernel: str, dropout: bool
) -> Shape:
    pool = dtype if kernel == "reduce_a" else operands
    return Shape(
        num_tokens=TOKENS,
        max_rank=MIN_RANK,
        width=len(group[1]) * MIN_RANK,
        itemsize=dtype.itemsize,
        pool_itemsize=pool.itemsize,
        dropout=dropout,
    )


def trials(
    device: torch.device,
    group: GroupShape,
    dtype: torch.dtype,
    operands: torch.dtype,
    *,
    tokens: int = TOKENS,
) -> list[Trial]:
    values = {d: _Values(device, group, dtype, operands, d, tokens) for d in (False, True)}
    return [
        Trial(
            kernel,
            _shape(group, dtype, operands, kernel, dropout),
            *values[dropout].launches(kernel),
        )
        for kernel, dropout in _cases()
    ]


class _Values:
    def __init__(
        self,
        device: torch.device,
        group: GroupShape,
        dtype: torch.dtype,
        operands: torch.dtype,
        dropout: bool,
        tokens: int,
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device).to(dtype)

        width, self.outs = group
        self.n = len(self.outs)
        rows = sum(RANKS)
        layout = Layout(
            num_tokens=tokens,
            in_features=width,
            out_features=self.outs,
            max_segments=MIN_SEGMENTS,
            max_rank=MIN_RANK,
            dropout=dropout,
            tiles=Tiles.for_tokens(tokens, dropout=dropout),
        )
        self.x, self.dy = random(tokens, width), [random(tokens, out) for out in self.outs]
        self.a = random(self.n * rows, width, dtype=operands)
        self.b = [random(rows, out, dtype=operands) for out in self.outs]
        self.s = random(tokens, layout.s_width)
        self.blocks = Blocks.new(layout, device)
        self.blocks.copy(_segments(tokens, self.n, 0.1 if dropout else 0.0))
        numbers = torch.arange(tokens, dtype=torch.int32, device=device)
        self.common = (self.blocks, numbers, list(range(self.n)))

    def launches(
        self, kernel: str
    ) -> tuple[Callable[[Tuning], None], Callable[[Tuning], list[torch.Tensor]]]:
        make, launch = getattr(self, f"_{kernel}")()
        kept: list[list[torch.Tensor]] = []

        def run(tuning: Tuning) -> None:
            if not kept:
                kept.append(make())
            launch(kept[0], tuning)

        def results(tuning: Tuning) -> list[torch.Tensor]:
            out = make()
            launch(out, tuning)
            return out

        return run, results

    def _shrink(self):
        def launch(out, tuning):
            x, a = [self.x] * self.n, [self.a] * self.n
            triton_forward.shrink(out[0], x, a, *self.common, name="shrink_x", tuning=tuning)

        return lambda: [torch.zeros_like(self.s)], launch

    def _expand_y(self):
        def launch(out, tuning):
            triton_forward.expand(
                out, self.s, self.b, *self.common, name="expand_y", write=True, tuning=tuning
            )

        return lambda: [torch.zeros_like(dy) for dy in self.dy], launch

    def _expand_dx(self):
        def launch(out, tuning):
            triton_forward.expand(
                out, self.s, [self.a], *self.common, name="expand_dx", write=True, tuning=tuning
            )

        return lambda: [torch.zeros_like(self.x)], launch

    def _reduce_a(self):
        def launch(out, tuning):
            x = [self.x] * self.n
            triton_backward.reduce(
                out * self.n, self.s, x, *self.common, name="reduce_a", tuning=tuning
            )

        return lambda: [torch.zeros_like(self.a, dtype=torch.float32)], launch

    def _reduce_b(self):
        def launch(out, tuning):
            triton_backward.reduce(
                out[:-1], self.s, self.dy, *self.common,
                name="reduce_b", tuning=tuning, w=self.b, part=out[-1],
            )  # fmt: skip

        return lambda: [
            *(torch.zeros_like(b, dtype=torch.float32) for b in self.b),
            self._parts(),
        ], launch

    def _sum(self):
        part = self._parts().normal_(generator=torch.Generator(self.s.device).manual_seed(1))

        def launch(out, tuning):
            triton_backward.sum_parts(
                out[0], part, list(self.outs), self._tile(), self.blocks, tuning
            )

        return lambda: [torch.zeros_like(self.s)], launch

    def _tile(self) -> int:
        shape = triton_forward.shape_of(self.blocks.layout, self.s, self.b[0], dropout=False)
        return tuning_of("reduce_b", shape, self.s.device).features

    def _parts(self) -> torch.Tensor:
        return self.s.new_zeros(-(-max(self.outs) // self._tile()), *self.s.shape)


def _segments(tokens: int, linears: int, dropout: float) -> list[Segment]:
    found, row = [], 0
    size = tokens // len(RANKS)
    for i, rank in enumerate(RANKS):
        found.append(
            Segment(
                start=i * size,
                stop=(i + 1) * size,
                a_row=linears * row,
                ranks=(rank,) * linears,
                b_rows=(row,) * linears,
                scale=1.0,
                threshold=streams.threshold(dropout),
                key=i,
            )
        )
        row += rank
    return found


def milliseconds(run: Callable[[], None], times: int = 10) -> float:
    """The median of single runs, after two that are not counted."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    for _ in range(2):
        run()
    for begin, end in pairs:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in pairs)[times // 2]
