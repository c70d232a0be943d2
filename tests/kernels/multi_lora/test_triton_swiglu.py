"""SwiGLU with its adapters against the float32 reference; support/interpreter.py says where it
runs."""

from dataclasses import replace

import pytest
import torch
from support.interpreter import DEVICE, DTYPES, KERNELS_RUN, runs_kernels

from tlora.kernels import streams
from tlora.kernels.multi_lora import reference
from tlora.kernels.multi_lora.blocks import Blocks, Layout, Tiles
from tlora.kernels.multi_lora.tables import Segment

if KERNELS_RUN:
    from tlora.kernels.multi_lora import triton_forward, triton_swiglu

# Of h, dgate and dup. Measured errors: float32 2.4e-7, float16 7.4e-4; a scale off by 1 % gives
# 9.8e-3 or more.
LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}
TILES = Tiles(
    shrink_tokens=16,
    shrink_rank=32,
    expand_tokens=32,
    chunk_tokens=32,
    chunk_rank=32,
    stack_rank=32,
)
NUM_TOKENS, NUM_IN = 70, 32
LINEARS = [4, 5]


def segment(start, stop, a_row, ranks, b_row, scale=1.5, dropout=0.0, key=0):
    return Segment(
        start=start,
        stop=stop,
        a_row=a_row,
        ranks=ranks,
        b_rows=(b_row, b_row + 1),
        scale=scale,
        threshold=streams.threshold(dropout),
        key=key,
    )


CASES = {
    "one job, all tokens": [segment(0, 70, 0, (16, 16), 0)],
    "odd ranks, one linear alone, empty segment, gaps, dropout": [
        segment(0, 33, 3, (16, 16), 0, scale=2.0),
        segment(33, 33, 0, (8, 8), 0),
        segment(33, 34, 40, (5, 0), 30, dropout=0.3, key=0x9ABCDEF0),
        segment(37, 48, 50, (0, 7), 40, dropout=0.5, key=7),
        segment(48, 66, 60, (1, 20), 50),
    ],
    "ranks beyond a tile": [
        segment(2, 40, 0, (100, 33), 0, scale=0.5),
        segment(40, 41, 140, (256, 256), 120, scale=0.2),
        segment(41, 70, 700, (3, 64), 400),
    ],
    "nobody": [],
}


class Problem:
    """Frozen products, pools and S for 70 tokens."""

    def __init__(self, segments, dtype, *, features=48, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=generator).to(DEVICE)

        self.segments, self.features = segments, features
        self.a = random(800, NUM_IN) / NUM_IN**0.5
        self.b = [random(500, features) for _ in range(2)]
        self.x = random(NUM_TOKENS, NUM_IN).to(dtype)
        self.gate, self.up, self.dh = (random(NUM_TOKENS, features).to(dtype) for _ in range(3))
        self.rows = torch.arange(NUM_TOKENS, dtype=torch.int32, device=DEVICE) % 17
        layout = Layout(
            num_tokens=NUM_TOKENS,
            in_features=NUM_IN,
            out_features=(features, features),
            max_segments=6,
            max_rank=max((max(s.ranks) for s in segments), default=1),
            tiles=TILES,
        )
        self.blocks = Blocks.new(layout, DEVICE)
        self.blocks.copy(segments)

    def run(self, **setting):
        """What the kernels write over NaN: h, dgate, dup."""
        s = torch.full(
            (NUM_TOKENS, self.blocks.layout.s_width), float("nan"), dtype=self.x.dtype
        ).to(DEVICE)
        triton_forward.shrink(
            s, [self.x] * 2, [self.a] * 2, self.blocks, self.rows, LINEARS, name="shrink_x"
        )
        h, dgate, dup = (torch.full_like(self.gate, float("nan")) for _ in range(3))
        tuning = triton_forward.Tuning(**{"tokens": 16, "features": 32, "programs": 1} | setting)
        frozen = (self.gate, self.up)
        triton_swiglu.swiglu_forward(h, *frozen, s, self.b, self.blocks, tuning=tuning)
        triton_swiglu.swiglu_backward(
            dgate, dup, self.dh, *frozen, s, self.b, self.blocks, tuning=tuning
        )
        return [h, dgate, dup]

    def expected(self, segments=None):
        segments = self.segments if segments is None else segments
        deltas = reference.forward(self.x.float(), self.a, self.b, segments, self.rows, LINEARS)
        gate, up = self.gate.float() + deltas[0], self.up.float() + deltas[1]
        return list(reference.swiglu(gate, up, self.dh.float()))


def errors(values, expected):
    """Relative, of each; NaN if any element is."""
    return [
        float((value.float() - right).norm() / right.norm())
        for value, right in zip(values, expected, strict=True)
    ]


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_match_the_reference(name, dtype):
    """Tiles of features fit or hang over; two settings of the tokens."""
    for setting in ({}, {"features": 16}, {"tokens": 32, "programs": 0}):
        problem = Problem(CASES[name], dtype)
        worst = errors(problem.run(**setting), problem.expected())
        assert all(error < LIMITS[dtype] for error in worst), (setting, worst)


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in CASES if name != "nobody"])
def test_a_scale_off_by_one_percent_is_refused(name, dtype):
    problem = Problem(CASES[name], dtype)
    off = [replace(s, scale=s.scale * 1.01) for s in problem.segments]
    assert all(error > LIMITS[dtype] for error in errors(problem.run(), problem.expected(off)))


@runs_kernels
def test_a_linear_without_its_adapter_is_refused():
    """The sums of gate and up each count, in h and dgate."""
    problem = Problem(CASES["one job, all tokens"], torch.float32)
    found = problem.run()
    for linear in (0, 1):
        b = problem.b[linear].clone()
        problem.b[linear].zero_()
        assert all(error > 0.1 for error in errors(found[:2], problem.expected()[:2]))
        problem.b[linear].copy_(b)


@runs_kernels
def test_the_reference_has_the_gradients_of_autograd():
    generator = torch.Generator().manual_seed(3)
    gate, up, dh = torch.randn(3, 40, 9, generator=generator, dtype=torch.float64)
    gate.requires_grad_(), up.requires_grad_()
    h = torch.nn.functional.silu(gate) * up
    h.backward(dh)
    found = reference.swiglu(gate.detach(), up.detach(), dh)
    assert all(map(torch.allclose, found, (h.detach(), gate.grad, up.grad)))
    assert not torch.allclose(found.gate, 1.0001 * gate.grad)


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_twice_and_with_other_neighbours(dtype):
    """19 tokens: first at 0, then at 31 behind jobs of other ranks, one of them beyond a tile."""

    def outcome(start, others, key=3):
        mine = segment(start, start + 19, 10, (7, 3), 5, dropout=0.2, key=key)
        problem = Problem(sorted([mine, *others], key=lambda s: s.start), dtype, seed=start)
        one = Problem([], dtype, seed=99)
        span = slice(start, start + 19)
        for name in ("x", "rows", "gate", "up", "dh"):
            getattr(problem, name)[span] = getattr(one, name)[:19]
        problem.a, problem.b = one.a, one.b
        return [value[span] for value in problem.run()]

    first = outcome(0, [segment(19, 50, 40, (16, 16), 30, dropout=0.4, key=8)])
    again = outcome(0, [segment(19, 50, 40, (16, 16), 30, dropout=0.4, key=8)])
    moved = outcome(31, [segment(0, 5, 40, (9, 60), 30), segment(5, 30, 190, (4, 4), 150)])
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, first, moved))
    assert not any(map(torch.equal, first, outcome(0, [], key=4)))


@runs_kernels
def test_large_gates_stay_finite():
    """silu(-200) is 0 and silu(200) is 200, with gradients 0 and 1."""
    problem = Problem([], torch.float32)
    problem.gate[:35], problem.gate[35:] = -200.0, 200.0
    h, dgate, dup = problem.run()
    assert not h[:35].any() and not dup[:35].any() and not dgate[:35].any()
    assert torch.equal(h[35:], 200.0 * problem.up[35:])
    assert torch.equal(dgate[35:], problem.dh[35:] * problem.up[35:])
