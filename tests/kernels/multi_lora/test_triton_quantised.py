"""Frozen weights in fewer bits under the kernels of a GPU: outputs and every gradient."""

import pytest
import torch
from support.comparing import relative_error, same_bits
from support.interpreter import DEVICE, SEED, runs_kernels

from tlora.kernels import streams
from tlora.kernels.multi_lora import Group, Routes, multi_lora, reference
from tlora.kernels.multi_lora.tables import Segment
from tlora.kernels.quantised import dense, fp8, quantise

pytestmark = pytest.mark.usefixtures("new_tensors_hold_nan")
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
TOKENS, IN, OUTS = 50, 48, (64, 16, 32)
LINEARS = [4, 5, 6]

# Of the norm. Measured in float16: X or dY, and the weight, rounded to FP8 3.6e-2 to 4.1e-2.
OF_BOTH_SIDES = 7e-2


@pytest.fixture
def products_in_fp8(monkeypatch):
    """The interpreter's bfloat16 is wrong: float16 is multiplied so there."""
    monkeypatch.setattr(fp8, "multiplies", lambda x, weights: weights[0].dtype == fp8.FORMAT)


def segment(start: int, stop: int, first: int, ranks: tuple[int, ...], dropout: float) -> Segment:
    return Segment(
        start=start,
        stop=stop,
        a_row=first,
        ranks=ranks,
        b_rows=tuple(first // 3 + i for i in range(3)),
        scale=1.5,
        threshold=streams.threshold(dropout),
        key=first,
    )


SEGMENTS = [
    segment(0, 33, 3, (16, 5, 16), 0.0),
    segment(33, 34, 60, (5, 0, 9), 0.3),
    segment(37, 48, 90, (3, 20, 8), 0.5),
]


class Problem:
    """Three linears of one input, three jobs, tokens of nobody; one linear has a bias."""

    def __init__(self, how: str) -> None:
        generator = torch.Generator().manual_seed(SEED + 5)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(DEVICE)

        self.x = random(TOKENS, IN).to(DTYPE)
        self.dy = [random(TOKENS, out).to(DTYPE) for out in OUTS]
        self.a, self.b = random(130, IN) / IN**0.5, [random(70, out) * 0.3 for out in OUTS]
        self.biases = [None, random(OUTS[1]).to(DTYPE), None]
        self.kept = [quantise(random(out, IN).to(DTYPE) / IN**0.5, how) for out in OUTS]
        shapes = [(out, IN) for out in OUTS]
        self.full = [
            dense(*kept, shape, DTYPE) for kept, shape in zip(self.kept, shapes, strict=True)
        ]
        self.rows = torch.arange(TOKENS, dtype=torch.int32, device=DEVICE) % 17
        self.group = Group(IN, OUTS, max_rank=32, dropout=True)

    def run(self, *, full: bool = False, **scales: list[torch.Tensor]) -> list[torch.Tensor]:
        """y, dx, dA, dB; with the weights in full if asked for, else as they are kept."""
        route = Routes(torch.device(DEVICE)).write(self.group, SEGMENTS, TOKENS)
        assert not route.is_table
        x, a = self.x.clone().requires_grad_(True), self.a.clone().requires_grad_(True)
        grad_a, grad_b = torch.zeros_like(self.a), [torch.zeros_like(b) for b in self.b]
        kept = {"scales": [each.scales for each in self.kept], **scales}
        y = multi_lora(
            x,
            self.full if full else [each.values for each in self.kept],
            self.biases,
            a=a,
            b=self.b,
            grad_a=grad_a,
            grad_b=grad_b,
            route=route,
            rows=self.rows,
            linears=torch.tensor(LINEARS),
            **({} if full else kept),
        )
        torch.autograd.backward(y, self.dy)
        return [*(y_l.detach() for y_l in y), x.grad, grad_a, *grad_b]

    def expected(self) -> list[torch.Tensor]:
        """In float32, with the weights in full."""
        x, dy = self.x.float(), [dy.float() for dy in self.dy]
        weights = [weight.float() for weight in self.full]
        y = reference.forward(x, self.a, self.b, SEGMENTS, self.rows, LINEARS)
        for y_l, weight, bias in zip(y, weights, self.biases, strict=True):
            y_l += x @ weight.T + (0 if bias is None else bias.float())
        grads = reference.backward(x, dy, self.a, self.b, SEGMENTS, self.rows, LINEARS)
        frozen = sum(dy_l @ weight for dy_l, weight in zip(dy, weights, strict=True))
        return [*y, grads.x + frozen, grads.a, *grads.b]


@runs_kernels
@pytest.mark.parametrize("how", ["nf4", "fp8"])
def test_unpacked_weights_give_the_bits_of_full_ones(how, monkeypatch):
    """Output and every gradient, where products are not of FP8 values themselves."""
    monkeypatch.setattr(fp8, "multiplies", lambda *_: False)
    problem = Problem(how)
    found = problem.run()
    assert all(map(same_bits, found, problem.run(full=True)))
    errors = [relative_error(*pair) for pair in zip(found, problem.expected(), strict=True)]
    assert all(error < 8e-3 for error in errors), errors
    twin = problem.run(scales=[each.scales * 1.03 for each in problem.kept])
    assert relative_error(twin[0], problem.expected()[0]) > 8e-3


@runs_kernels
def test_products_in_fp8(products_in_fp8):
    """The frozen products lose what FP8 rounds; adapters, which are added to them, nothing."""
    problem = Problem("fp8")
    found, wanted = problem.run(), problem.expected()
    errors = [relative_error(*pair) for pair in zip(found, wanted, strict=True)]
    assert all(1e-3 < error < OF_BOTH_SIDES for error in errors[:4]), errors
    assert all(map(same_bits, found[4:], problem.run(full=True)[4:]))
    twin = problem.run(scales=[each.scales.roll(1) for each in problem.kept])
    assert all(
        relative_error(*pair) > OF_BOTH_SIDES for pair in zip(twin[:4], wanted[:4], strict=True)
    )
