"""What the kernels are compared on where they will run (proving.py): one group of linears, jobs of
several ranks with a gap and nobody's tokens between them, and random values of a generator of their
own. The update is about as large as the frozen product, so one that is lost shows.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tlora.kernels import streams
from tlora.kernels.multi_lora import reference
from tlora.kernels.multi_lora.blocks import Blocks, Layout, Tiles
from tlora.kernels.multi_lora.function import multi_lora
from tlora.kernels.multi_lora.pages import Ways
from tlora.kernels.multi_lora.routes import MIN_RANK, MIN_SEGMENTS, blocks_route
from tlora.kernels.multi_lora.tables import Segment
from tlora.kernels.multi_lora.tuner import GroupShape

LIMIT = 2e-2
"""Of the error of a row, a token's or a rank's. Rounding to bfloat16 makes 5e-3; one lost step of
64 features of 4,096, in one tile of 16 that a row has, 3e-2."""

RANKS = (8, 64, 19, 1, 32)
SCALE = 1.5


class Results(NamedTuple):
    """Of two passes."""

    outputs: list[torch.Tensor]
    """Y of every linear, and dX."""

    again: list[torch.Tensor]
    """The same from the second pass."""

    gradients: list[torch.Tensor]
    """Of A and of every linear's B, to which both have added."""

    @property
    def named(self) -> list[tuple[str, torch.Tensor]]:
        n = len(self.outputs) - 1
        names = [*(f"Y of linear {i}" for i in range(n)), "dX"]
        names += ["dA", *(f"dB of linear {i}" for i in range(n))]
        return list(zip(names, [*self.outputs, *self.gradients], strict=True))


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is compared."""

    device: torch.device
    dtype: torch.dtype
    operands: torch.dtype
    """Of A and B."""

    group: GroupShape
    tokens: int
    dropout: float = 0.0
    ways: Ways = ()
    """Products that take the update inside: their results are compared with those of the kernels
    without, which have been compared with plain products."""

    @property
    def name(self) -> str:
        """The same on every device."""
        into, outs = self.group
        formats = f"{self.dtype} and {self.operands}".replace("torch.", "")
        inside = " and ".join(self.ways) or "none"
        return (
            f"{formats}, {into} to {' + '.join(map(str, outs))}, {self.tokens} tokens, "
            f"dropout {self.dropout}, inside {inside}"
        )


def find_fault(case: Case) -> str | None:
    """What is wrong with the kernels, or None. Raises where they cannot be compared."""
    values = _Values(case)
    right = values.results(()) if case.ways else values.right()
    try:
        found = values.results(case.ways)
        errors = {
            name: _row_error(result, wanted)
            for (name, result), (_, wanted) in zip(found.named, right.named, strict=True)
        }
        pairs = zip(found.outputs, found.again, strict=True)
        same = all(torch.equal(one, other) for one, other in pairs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Does not compile, does not fit.
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    # Not the largest of them, which a NaN need not be.
    if wrong := {name: error for name, error in errors.items() if not error < LIMIT}:
        return ", ".join(f"{name} is off by {error:.3g}" for name, error in wrong.items())
    return None if same else "two passes give different bits"


def _row_error(found: torch.Tensor, right: torch.Tensor) -> float:
    """The largest of a row, against its norm or the mean norm of all: many rows of a gradient are
    nobody's."""
    norms = right.float().norm(dim=1)
    errors = (found.float() - right.float()).norm(dim=1)
    return (errors / norms.clamp(min=norms.mean())).max().item()


class _Values:
    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator(case.device).manual_seed(0)

        def random(*shape: int, dtype: torch.dtype = case.dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=case.device).to(dtype)

        width, outs = case.group
        self.x = random(case.tokens, width)
        self.dy = [random(case.tokens, out) for out in outs]
        self.weights = [random(out, width).mul_(width**-0.5) for out in outs]
        # Products with the update inside have none.
        self.biases = [None if case.ways else random(out) for out in outs]
        self.segments, rows = _segments(case)
        self.a = random(len(outs) * rows, width, dtype=case.operands).mul_(width**-0.5)
        self.b = [random(rows, out, dtype=case.operands) for out in outs]
        for segment in self.segments:
            for b_l, row, rank in zip(self.b, segment.b_rows, segment.ranks, strict=True):
                b_l[row : row + rank] *= max(rank, 1) ** -0.5
        self.rows = torch.arange(case.tokens, dtype=torch.int32, device=case.device)

    def results(self, ways: Ways) -> Results:
        """As training has them."""
        case, (width, outs) = self.case, self.case.group
        layout = Layout(
            num_tokens=case.tokens,
            in_features=width,
            out_features=outs,
            max_segments=MIN_SEGMENTS,
            max_rank=MIN_RANK,
            dropout=case.dropout > 0.0,
            inside=ways,
            tiles=Tiles.for_tokens(case.tokens, dropout=case.dropout > 0.0),
        )
        blocks = Blocks.new(layout, case.device)
        blocks.copy(self.segments)
        route = blocks_route(blocks)
        grad_a = torch.zeros_like(self.a, dtype=torch.float32)
        grad_b = [torch.zeros_like(each, dtype=torch.float32) for each in self.b]

        def one_pass() -> list[torch.Tensor]:
            x, a = self.x.detach().requires_grad_(), self.a.detach().requires_grad_()
            with torch.enable_grad():
                y = multi_lora(
                    x, self.weights, self.biases, a=a, b=self.b, grad_a=grad_a, grad_b=grad_b,
                    route=route, rows=self.rows, linears=torch.arange(len(outs)),
                )  # fmt: skip
                torch.autograd.backward(y, self.dy)
            assert x.grad is not None
            return [*(each.detach() for each in y), x.grad]

        return Results(one_pass(), one_pass(), [grad_a, *grad_b])

    @torch.no_grad()
    def right(self) -> Results:
        """By plain products in float64."""
        x, a, b = self.x.double(), self.a.double(), [each.double() for each in self.b]
        dy = [each.double() for each in self.dy]
        jobs = (self.segments, self.rows, list(range(len(b))))
        y = reference.forward(x, a, b, *jobs)
        grads = reference.backward(x, dy, a, b, *jobs)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            weight = weight.double()
            y[i] += x @ weight.T
            if bias is not None:
                y[i] += bias.double()
            grads.x.addmm_(dy[i], weight)
        outputs = [*y, grads.x]
        return Results(outputs, outputs, [2.0 * each for each in (grads.a, *grads.b)])


def _segments(case: Case) -> tuple[list[Segment], int]:
    """And the rank rows that they have of each linear. The last linear is not adapted by one job;
    one more has no tokens."""
    n = len(case.group[1])
    found, row = [], 0
    size = case.tokens // (len(RANKS) + 1)
    for i, rank in enumerate((*RANKS, RANKS[0])):
        # The first tokens are nobody's, and some between.
        start = i * size + 3
        stop = start if i == len(RANKS) else start + size - i
        last = 0 if n > 1 and i == 2 else rank
        found.append(
            Segment(
                start=start,
                stop=stop,
                a_row=n * row,
                ranks=(rank,) * (n - 1) + (last,),
                b_rows=(row,) * n,
                scale=SCALE,
                threshold=streams.threshold(case.dropout),
                key=i,
            )
        )
        row += rank
    return found, row
