"""The entry where the frozen products take the adapters' update in their own loop."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.comparing import relative_error
from support.interpreter import DEVICE, KERNELS_RUN, SEED, runs_kernels

from tlora.kernels import streams
from tlora.kernels.multi_lora import Group, Routes, multi_lora, reference, settings
from tlora.kernels.multi_lora.blocks import build_table
from tlora.kernels.multi_lora.pages import Way
from tlora.kernels.multi_lora.tables import Segment

if KERNELS_RUN:
    from tlora.kernels.multi_lora import triton_product

pytestmark = pytest.mark.usefixtures("new_tensors_hold_nan")
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
# Measured: half precision 6e-4, bfloat16 4e-3; a scale off by 3 % gives 2e-2.
LIMIT = 8e-3 if DEVICE == "cuda" else 2e-3
TOKENS = 200
FORWARD, BACKWARD, TOGETHER = (48, (64, 64)), (72, (48,)), (72, (64, 48, 16))
"""Gate and up; down; q, k and v."""


@pytest.fixture(autouse=True)
def small_products(monkeypatch):
    """What is said of 8,192 tokens is done with few."""
    monkeypatch.setattr(settings, "INSIDE_TOKENS", TOKENS)
    small = settings.Tuning(tokens=128, features=64, warps=4, stages=2, programs=1)
    monkeypatch.setattr(settings, "PRODUCT", small)


class Linears:
    """A group with three jobs, of which one has nothing on the first of two linears."""

    def __init__(self, features: tuple, *ways: Way, dropout: float = 0.0):
        torch.manual_seed(SEED + 3)
        self.num_in, self.outs = features
        n = len(self.outs)
        self.segments = [
            self._segment(start, stop, i, (rank,) * (n - 1) + (last,), dropout)
            for i, (start, stop, rank, last) in enumerate(
                [(0, 70, 16, 16), (70, 71, 0, 9), (80, 190, 64, 64)]
            )
        ]
        self.x = torch.randn(TOKENS, self.num_in).to(DEVICE, DTYPE)
        self.dy = [torch.randn(TOKENS, out).to(DEVICE, DTYPE) for out in self.outs]
        self.weights = [torch.randn(out, self.num_in) / self.num_in**0.5 for out in self.outs]
        self.weights = [weight.to(DEVICE, DTYPE) for weight in self.weights]
        # Rows of nobody are numbers, as they are in a pool.
        self.a = (torch.randn(600, self.num_in) / self.num_in**0.5).to(DEVICE, DTYPE)
        self.b = [(torch.randn(400, out) * 0.3).to(DEVICE, DTYPE) for out in self.outs]
        self.rows = torch.arange(TOKENS, dtype=torch.int32, device=DEVICE) % 40
        self.group = Group(self.num_in, self.outs, max_rank=64, dropout=dropout > 0, inside=ways)
        self.biases: list[torch.Tensor | None] = [None] * n

    def _segment(self, start, stop, i, ranks, dropout):
        return Segment(
            start=start,
            stop=stop,
            a_row=201 * i,
            ranks=ranks,
            b_rows=tuple(67 * i + 3 * j for j in range(len(ranks))),
            scale=1.5,
            threshold=streams.threshold(dropout),
            key=11 * i,
        )

    def run(self, *, kept=None, needs_dx=True):
        """y, dx, dA, dB."""
        route = Routes(torch.device(DEVICE)).write(self.group, self.segments, TOKENS)
        x = self.x.clone().requires_grad_(needs_dx)
        a = self.a.clone().requires_grad_(True)
        grad_a, grad_b = (
            torch.zeros(600, self.num_in, device=DEVICE),
            [torch.zeros(400, out, device=DEVICE) for out in self.outs],
        )
        *y, s = multi_lora(
            x, self.weights, self.biases, a=a, b=self.b, grad_a=grad_a, grad_b=grad_b, route=route,
            rows=self.rows, linears=torch.arange(len(self.outs)), keep=True, kept=kept,
        )  # fmt: skip
        torch.autograd.backward(y, self.dy)
        return [*(each.detach() for each in y), x.grad, grad_a, *grad_b], s

    def expected(self, segments=None):
        segments = segments or self.segments
        x, dy = self.x.float(), [each.float() for each in self.dy]
        a, b, weights = (
            self.a.float(),
            [b.float() for b in self.b],
            [w.float() for w in self.weights],
        )
        linears = list(range(len(b)))
        y = reference.forward(x, a, b, segments, self.rows, linears)
        y = [delta + x @ w.T for delta, w in zip(y, weights, strict=True)]
        y = [u if v is None else u + v.float() for u, v in zip(y, self.biases, strict=True)]
        grads = reference.backward(x, dy, a, b, segments, self.rows, linears)
        dx = grads.x + sum(u @ w for u, w in zip(dy, weights, strict=True))
        return [*y, dx, grads.a, *grads.b]

    def check(self):
        found, right = self.run()[0], self.expected()
        errors = [relative_error(u, v) for u, v in zip(found, right, strict=True)]
        # Not the largest of them, which a NaN need not be.
        assert all(error < LIMIT for error in errors), errors
        off = [replace(each, scale=1.03 * each.scale) for each in self.segments]
        twins = [relative_error(u, v) for u, v in zip(found, self.expected(off), strict=True)]
        assert all(twin > LIMIT for twin in twins), twins


@pytest.fixture
def launched(monkeypatch) -> list[tuple[str, int]]:
    """Products of our own that were launched: which way each was, and how many outputs it had."""
    calls, original = [], triton_product.product

    def product(*arguments, **options):
        calls.append((options["update"].way, len(arguments[0])))
        return original(*arguments, **options)

    monkeypatch.setattr(triton_product, "product", product)
    return calls


@runs_kernels
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_forward_has_the_update_inside(launched, dropout):
    Linears(FORWARD, "forward", dropout=dropout).check()
    assert launched == [("forward", 2)]


@runs_kernels
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_both_ways_have_the_update_inside(launched, dropout):
    """A mask acts on dS A: then Y has it alone."""
    Linears(TOGETHER, "forward", "backward", dropout=dropout).check()
    assert launched == [("forward", 3), *([] if dropout else [("backward", 1)])]


@runs_kernels
@pytest.mark.parametrize("features", [BACKWARD, TOGETHER])
def test_backward_has_the_update_inside(launched, features):
    """In one product, whether of one linear or of several."""
    linears = Linears(features, "backward")
    linears.check()
    assert launched == [("backward", 1)]
    assert linears.run(needs_dx=False)[0][len(features[1])] is None
    assert launched == [("backward", 1)], "nobody asks for dx"


@runs_kernels
def test_an_s_that_was_kept_gives_the_same_bits(launched):
    linears = Linears(FORWARD, "forward")
    first, s = linears.run()
    again, _ = linears.run(kept=s)
    assert all(torch.equal(u, v) for u, v in zip(first, again, strict=True))
    assert launched == [("forward", 2)] * 2


ELSEWHERE = {
    "dropout acts on dS A": lambda: Linears(BACKWARD, "backward", dropout=0.3),
    "the weight lies turned": lambda: _turned(Linears(FORWARD, "forward")),
    "a bias": lambda: _with_a_bias(Linears(FORWARD, "forward")),
    "a crowd": lambda: _crowded(Linears(FORWARD, "forward")),
    "not asked for": lambda: Linears(FORWARD),
    "float32, whose rows may hold anything": lambda: _in_float32(Linears(FORWARD, "forward")),
}


def _in_float32(linears: Linears) -> Linears:
    linears.x, linears.a = linears.x.float(), linears.a.float()
    linears.dy, linears.b = [u.float() for u in linears.dy], [u.float() for u in linears.b]
    linears.weights = [weight.float() for weight in linears.weights]
    return linears


def _turned(linears: Linears) -> Linears:
    linears.weights = [weight.T.contiguous().T for weight in linears.weights]
    return linears


def _with_a_bias(linears: Linears) -> Linears:
    linears.biases[1] = torch.randn(linears.outs[1]).to(DEVICE, DTYPE)
    return linears


def _crowded(linears: Linears) -> Linears:
    linears.segments = [
        replace(linears.segments[0], start=3 * i, stop=3 * i + 3, a_row=16 * i) for i in range(33)
    ]
    return linears


@runs_kernels
@pytest.mark.parametrize("why", ELSEWHERE)
def test_what_does_not_fit_goes_the_other_way(launched, why):
    """And is right."""
    ELSEWHERE[why]().check()
    assert launched == []


@runs_kernels
def test_smaller_nano_batches_go_the_other_way(launched, monkeypatch):
    monkeypatch.setattr(settings, "INSIDE_TOKENS", TOKENS + 1)
    Linears(FORWARD, "forward").check()
    assert launched == []


sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
SHAPES = {
    "inside": (256, (128,)),
    "wide": (64, (256, 256)),
    "forward": (128, (256, 256)),
    "backward": (128, (256, 128)),
    "both": (128, (128, 64)),
}
"""Down as the settings have it; others the way that they do not, gate and up among them."""

LAUNCHES = {"inside": 1, "wide": 1, "forward": 1, "backward": 1, "both": 2}


def benchmarked(how: str):
    """The linears that `gpu_linears.py --how inside forward backward both` times."""
    linears = __import__("gpu_linears")
    case = linears.Case(256, 3, "mixed", 0.0)
    return linears, linears.InsideGroup(case, SHAPES[how], shadow=True)


@runs_kernels
@pytest.mark.parametrize("how", SHAPES)
def test_the_benchmark_has_the_update_inside(launched, how):
    """And sees pages that are not the jobs' own."""
    linears, group = benchmarked(how)
    linears.check_inside("linears", group, how)
    assert len(launched) == LAUNCHES[how]
    assert not group.grad_a.any()
    blocks = group.pages[group.ways(how)]
    # Those of another order of the jobs.
    wrong = [
        replace(each, a_row=other.a_row, ranks=other.ranks)
        for each, other in zip(group.segments, reversed(group.segments), strict=True)
    ]
    first = blocks.layout.first_head(0)
    blocks.table.view(-1)[first:] = build_table(blocks.layout, wrong).view(-1)[first:]
    with pytest.raises(AssertionError, match=f"{how}: errors"):
        linears.check_inside("linears", group, how)


@runs_kernels
def test_the_benchmark_sees_an_output_that_is_not_written():
    """Though another one, which is right, comes before it."""
    linears, group = benchmarked("backward")
    usual = group.backward
    group.backward = lambda how: usual(how) if how != "backward" else None
    with pytest.raises(AssertionError, match="backward: errors"):
        linears.check_inside("linears", group, "backward")
