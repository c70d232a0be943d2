"""The Triton path against the float32 reference; support/interpreter.py says where it runs."""

from dataclasses import replace

import pytest
import torch
from support.interpreter import DEVICE, DTYPES, KERNELS_RUN, SEED, runs_kernels

from tlora.kernels import streams
from tlora.kernels.multi_lora import Group, Routes, multi_lora, reference
from tlora.kernels.multi_lora.blocks import LISTS, Blocks, Layout, Tiles
from tlora.kernels.multi_lora.tables import Segment

if KERNELS_RUN:
    import triton
    import triton.language as tl

    from tlora.kernels.multi_lora import triton_backward, triton_forward, triton_streams

    @triton.jit
    def mask_kernel(p_mask, p_rows, key, linear, threshold, N: tl.constexpr, BT: tl.constexpr):
        o_t, o_n = tl.arange(0, BT), tl.arange(0, N)
        b_key = triton_streams.linear_key(key.to(tl.uint32), linear)
        b_rows = triton_streams.row_hash(tl.load(p_rows + o_t), b_key)
        b_features = triton_streams.feature_hash(o_n)
        b_kept = triton_streams.kept(b_rows, b_features, threshold.to(tl.uint32))
        tl.store(p_mask + o_t[:, None] * N + o_n[None, :], b_kept.to(tl.int8))


# Measured errors: float32 2e-7, float16 6e-4, bf16 4e-3; a scale off by 1 % gives 1e-2.
LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 6e-3}
SMALL = Tiles(
    shrink_tokens=16,
    shrink_rank=32,
    expand_tokens=32,
    chunk_tokens=16,
    chunk_rank=32,
    stack_rank=32,
)
LINEARS = [4, 5, 6]


def segment(start, stop, a_row, ranks, b_row, scale=1.5, dropout=0.0, key=0):
    return Segment(
        start=start,
        stop=stop,
        a_row=a_row,
        ranks=ranks,
        b_rows=tuple(b_row + i for i in range(len(ranks))),
        scale=scale,
        threshold=streams.threshold(dropout),
        key=key,
    )


CASES = {
    "one job, all tokens": [segment(0, 50, 0, (16, 16, 16), 0)],
    "odd ranks, empty segment, gaps, dropout": [
        segment(0, 33, 3, (16, 16, 16), 0, scale=2.0),
        segment(33, 33, 0, (8, 8, 8), 0),
        segment(33, 34, 60, (5, 0, 9), 30, dropout=0.3, key=0x9ABCDEF0),
        segment(37, 48, 80, (3, 20, 8), 40, dropout=0.5, key=7),
    ],
    "a job in two segments": [
        segment(2, 21, 10, (7, 1, 2), 5, dropout=0.2, key=3),
        segment(21, 50, 10, (7, 1, 2), 5, dropout=0.2, key=3),
    ],
    "nobody": [],
}


class Problem:
    """Random pools and activations for 50 tokens of a group of three linears."""

    def __init__(
        self,
        segments,
        dtype,
        *,
        tiles=SMALL,
        max_rank=20,
        seed=0,
        tokens=50,
        features=(48, (64, 16, 32)),
        rank_rows=(120, 70),
    ):
        generator = torch.Generator().manual_seed(SEED + seed)

        def random(*shape):
            return torch.randn(*shape, generator=generator).to(DEVICE)

        self.num_tokens, (self.num_in, self.outs) = tokens, features
        self.segments, self.dtype = segments, dtype
        self.a = random(rank_rows[0], self.num_in) / self.num_in**0.5
        self.b = [random(rank_rows[1], out) for out in self.outs]
        self.x = random(self.num_tokens, self.num_in).to(dtype)
        self.dy = [random(self.num_tokens, out).to(dtype) for out in self.outs]
        self.rows = torch.arange(self.num_tokens, dtype=torch.int32, device=DEVICE) % 17
        self.layout = Layout(
            num_tokens=self.num_tokens,
            in_features=self.num_in,
            out_features=self.outs,
            max_segments=max(5, len(segments)),
            max_rank=max_rank,
            tiles=tiles,
        )
        self.blocks = Blocks.new(self.layout, DEVICE)
        self.blocks.copy(segments)

    def run(self, *, fused=True):
        """What the kernels write over NaN: y, dx, dA, dB."""
        y = [self.x.new_full((self.num_tokens, out), float("nan")) for out in self.outs]
        dx = torch.full_like(self.x, float("nan"))
        grad_a, grad_b = torch.zeros_like(self.a), [torch.zeros_like(b) for b in self.b]
        s = triton_forward.add_forward(
            y, self.x, self.a, self.b, self.blocks, self.rows, LINEARS, write=True
        )
        triton_backward.add_backward(
            dx, self.x, self.dy, s, self.a, self.b, grad_a, grad_b, self.blocks, self.rows, LINEARS,
            write=True, fused=fused,
        )  # fmt: skip
        return [*y, dx, grad_a, *grad_b]

    def expected(self, segments=None):
        segments = self.segments if segments is None else segments
        x, dy = self.x.float(), [dy.float() for dy in self.dy]
        y = reference.forward(x, self.a, self.b, segments, self.rows, LINEARS)
        grads = reference.backward(x, dy, self.a, self.b, segments, self.rows, LINEARS)
        return [*y, grads.x, grads.a, *grads.b]


def errors(values, expected):
    """Relative, of each; NaN if any element is."""
    return [
        float((value.float() - right).norm() / right.norm().clamp(min=1e-9))
        for value, right in zip(values, expected, strict=True)
    ]


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_match_the_reference(name, dtype):
    problem = Problem(CASES[name], dtype)
    worst = errors(problem.run(), problem.expected())
    assert all(error < LIMITS[dtype] for error in worst), worst


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_scale_off_by_one_percent_is_refused(dtype):
    problem = Problem(CASES["odd ranks, empty segment, gaps, dropout"], dtype)
    off = [replace(s, scale=s.scale * 1.01) for s in problem.segments]
    assert all(error > LIMITS[dtype] for error in errors(problem.run(), problem.expected(off)))


@runs_kernels
def test_ranks_beyond_a_tile_are_cut_into_pieces():
    tiles = replace(SMALL, shrink_rank=16, chunk_rank=16)
    segments = [
        segment(0, 29, 3, (40, 8, 17), 0),
        segment(29, 50, 70, (3, 20, 19), 45, dropout=0.3),
    ]
    problem = Problem(segments, torch.float32, tiles=tiles, max_rank=40)
    assert all(error < 2e-6 for error in errors(problem.run(), problem.expected()))


LARGEST = [
    segment(0, 17, 0, (256, 255, 129), 0, dropout=0.2, key=9),
    segment(17, 30, 640, (1, 193, 256), 256),
]


def a_hundred_jobs():
    """Of up to two tokens each, in rows of A and B that are theirs alone."""
    segments, start = [], 0
    for i in range(100):
        stop = start + i % 3
        ranks = (i % 13 + 1, 5 * i % 9, 7 * i % 17 + 1)
        dropout = 0.3 * (i % 4 == 0)
        segments.append(segment(start, stop, 38 * i, ranks, 17 * i, dropout=dropout, key=i))
        start = stop
    return segments


MOST = {
    "ranks up to 256": {
        "segments": LARGEST,
        "tokens": 30,
        "features": (24, (32, 16, 16)),
        "rank_rows": (1090, 515),
        "max_rank": 256,
        "tiles": replace(SMALL, shrink_rank=64, chunk_rank=64, stack_rank=64),
    },
    "a hundred jobs": {
        "segments": a_hundred_jobs(),
        "tokens": 101,
        "features": (16, (16, 16, 8)),
        "rank_rows": (3800, 1700),
    },
}


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MOST)
def test_the_largest_ranks_and_many_jobs_match_the_reference(name, dtype):
    """A scale off by 1 % is refused, of all jobs and, where rounding is less than that, of one."""
    problem = Problem(dtype=dtype, **MOST[name])
    found = problem.run()
    worst = errors(found, problem.expected())
    assert all(error < LIMITS[dtype] for error in worst), worst
    off = [replace(s, scale=s.scale * 1.01) for s in problem.segments]
    assert all(error > LIMITS[dtype] for error in errors(found, problem.expected(off)))
    if dtype == torch.float32:
        longest = max(range(len(off)), key=lambda i: off[i].stop - off[i].start)
        one = [*problem.segments]
        one[longest] = off[longest]
        assert all(error > LIMITS[dtype] for error in errors(found, problem.expected(one)))


@runs_kernels
def test_reading_dy_twice_gives_the_same():
    """dS by its own kernel, instead of from parts made on the way to dB."""
    problem = Problem(CASES["odd ranks, empty segment, gaps, dropout"], torch.float32)
    assert all(error < 2e-6 for error in errors(problem.run(fused=False), problem.expected()))


SETTINGS = {
    # Tiles of 16 features fit every linear, those of 32 hang over.
    "one program per item": {"features": 32},
    "programs that walk the list": {"features": 16, "programs": 1},
    "rank tiles turned": {"features": 32, "programs": 1, "turned": 1024},
    "small rank tiles turned, no walk": {"features": 16, "turned": 32},
    "B loaded with every block": {"features": 32, "programs": 1, "reload": True},
}


def gradients(problem, tuning, *, sum_tokens=16, programs=1, before=None):
    """dB, dS over NaN, dA, from S of the reference's x and A; and whether counters are zero. Added
    to `before`, or to zeros."""
    pools = (problem.a, *problem.b)
    grad_a, *grad_b = [t.clone() for t in before or map(torch.zeros_like, pools)]
    arguments = (problem.blocks, problem.rows, LINEARS)
    s = torch.zeros(problem.num_tokens, problem.layout.s_width, device=DEVICE, dtype=problem.dtype)
    triton_forward.shrink(s, [problem.x] * 3, [problem.a] * 3, *arguments, name="shrink_x")
    ds = torch.full_like(s, float("nan"))
    sum_tuning = triton_forward.Tuning(tokens=sum_tokens, features=0, programs=programs)
    triton_backward.reduce_fused(
        ds, grad_b, s, problem.dy, problem.b, *arguments, tuning=tuning, sum_tuning=sum_tuning
    )
    triton_backward.reduce(
        [grad_a] * 3, ds, [problem.x] * 3, *arguments, name="reduce_a", tuning=tuning
    )
    assert not problem.blocks.finished.any(), "counters must be zero again"
    return [grad_a, *grad_b]


@runs_kernels
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_under_every_setting_match_the_reference(name, dtype):
    """More items than programs, so that each takes several; a scale off by 1 % is refused."""
    problem = Problem(CASES["odd ranks, empty segment, gaps, dropout"], dtype)
    tuning = triton_forward.Tuning(tokens=16, **SETTINGS[name])
    found = gradients(problem, tuning)
    assert all(error < LIMITS[dtype] for error in errors(found, problem.expected()[4:]))
    off = [replace(s, scale=s.scale * 1.01) for s in problem.segments]
    assert all(error > LIMITS[dtype] for error in errors(found, problem.expected(off)[4:]))


@runs_kernels
def test_which_program_takes_an_item_changes_no_bit():
    """Other chunks of tokens do: the check sees the order of a sum."""
    segments = CASES["odd ranks, empty segment, gaps, dropout"]
    problem = Problem(segments, torch.float32)
    one, many = (
        triton_forward.Tuning(tokens=16, features=32, turned=32, programs=programs)
        for programs in (0, 1)
    )
    first, second = gradients(problem, one, programs=0), gradients(problem, many)
    assert all(torch.equal(u, v) for u, v in zip(first, second, strict=True))
    other = Problem(segments, torch.float32, tiles=replace(SMALL, chunk_tokens=24))
    third = gradients(other, many)
    assert not all(torch.equal(u, v) for u, v in zip(first, third, strict=True))


@runs_kernels
@pytest.mark.parametrize("name", ["odd ranks, empty segment, gaps, dropout", "one job, all tokens"])
def test_from_whichever_end_programs_take_items_every_one_is_done_once(name):
    """Gradients are added to: an item done twice, or by nobody, would show. More items than
    programs, then fewer."""
    problem = Problem(CASES[name], torch.float32)
    for features in (16, 64):
        tuning = triton_forward.Tuning(tokens=16, features=features, programs=1)
        usual, other = (gradients(problem, replace(tuning, snake=how)) for how in (False, True))
        assert all(torch.equal(u, v) for u, v in zip(usual, other, strict=True))
        assert all(grad.any() for grad in usual)


@runs_kernels
@pytest.mark.parametrize("added", [{}, {"sent": True}], ids=str)
def test_a_gradient_known_to_be_zero_is_written_and_not_read(added):
    """NaN lies where the zeros would: the same bits, with partial sums and without. A neighbour's
    gradient is added to as ever, and without the mark the NaN would stay."""
    tuning = triton_forward.Tuning(tokens=16, features=32, programs=1, **added)
    segments = [segment(0, 14, 3, (16, 16, 16), 0), segment(20, 50, 60, (5, 7, 9), 30)]
    usual = gradients(Problem(segments, torch.float32), tuning)
    one, other = segments
    for marked in (one, other):
        both = [replace(each, zero_grad=each is marked) for each in segments]
        nan = [torch.where(right == 0, 0.0, torch.nan) for right in usual]
        for grad, rows in zip(nan, rows_of(other if marked is one else one), strict=True):
            grad[rows] = 0.0
        found = gradients(Problem(both, torch.float32), tuning, before=nan)
        assert all(torch.equal(u, v) for u, v in zip(found, usual, strict=True))
        unmarked = gradients(Problem(segments, torch.float32), tuning, before=nan)
        assert all(grad.isnan().any() for grad in unmarked)


@runs_kernels
def test_who_adds_to_a_gradient_changes_no_bit():
    """The program or the memory; nor does when B is loaded. Of jobs with sums in one part and in
    several, and of one in two segments."""
    segments = [segment(0, 14, 3, (16, 16, 16), 0), segment(14, 40, 60, (5, 7, 9), 30)]
    segments += [segment(start, start + 5, 100, (3, 2, 4), 55) for start in (40, 45)]
    problem = Problem(segments, torch.float32)
    generator = torch.Generator().manual_seed(SEED + 3)
    pools = (problem.a, *problem.b)
    before = [torch.randn(*each.shape, generator=generator).to(DEVICE) for each in pools]
    read, sent, reload, zero = (
        gradients(problem, triton_forward.Tuning(tokens=16, features=32, **added), before=start)
        for added, start in (
            ({}, before),
            ({"sent": True}, before),
            ({"reload": True}, before),
            ({"sent": True}, None),
        )
    )
    for other in (sent, reload):
        assert all(torch.equal(u, v) for u, v in zip(read, other, strict=True))
    assert not any(torch.equal(u, v) for u, v in zip(read, zero, strict=True))


def rows_of(each):
    """Of a job in A, and in the B of each linear."""
    return [
        slice(each.a_row, each.a_row + each.width),
        *(slice(row, row + rank) for row, rank in zip(each.b_rows, each.ranks, strict=True)),
    ]


@runs_kernels
def test_the_gradient_of_a_may_hold_more_rank_rows_than_the_rest():
    """Ranks that are multiples of eight: pieces of A span linears, up to `stack_rank` rows."""
    segments = [segment(0, 29, 3, (16, 8, 16), 0), segment(29, 50, 70, (8, 8, 8), 45)]
    rows = []
    for stack in (16, 64):
        tiles = replace(SMALL, chunk_rank=16, stack_rank=stack)
        problem = Problem(segments, torch.float32, tiles=tiles)
        assert all(error < 2e-6 for error in errors(problem.run(), problem.expected()))
        rows.append(int(problem.blocks.table[0, LISTS.index("reduce_a")]))
    assert rows[1] < rows[0]


@runs_kernels
def test_splitting_the_inner_dimension_changes_rounding_only():
    problem = Problem(CASES["odd ranks, empty segment, gaps, dropout"], torch.float32)
    results = []
    for splits in (1, 3):
        s = torch.zeros(problem.num_tokens, problem.layout.s_width, device=DEVICE)
        triton_forward.shrink(
            s, [problem.x] * 3, [problem.a] * 3, problem.blocks, problem.rows, LINEARS,
            name="shrink_x", tuning=triton_forward.Tuning(tokens=16, features=16), splits=splits,
        )  # fmt: skip
        results.append(s)
    assert errors(results[1:], results[:1])[0] < 1e-6
    assert not problem.blocks.finished.any(), "counters must be zero again"


@runs_kernels
def test_adding_keeps_what_was_there_and_writing_adds_the_bias():
    problem = Problem(CASES["odd ranks, empty segment, gaps, dropout"], torch.float32)
    arguments = (problem.x, problem.a, problem.b, problem.blocks, problem.rows, LINEARS)
    deltas = problem.expected()[:3]
    before = [torch.randn_like(delta) for delta in deltas]
    y = [value.clone() for value in before]
    triton_forward.add_forward(y, *arguments)
    right = [u + v for u, v in zip(before, deltas, strict=True)]
    assert all(error < 2e-6 for error in errors(y, right))
    biases = [torch.randn(problem.outs[0], device=DEVICE), None, None]
    triton_forward.add_forward(y, *arguments, write=True, biases=biases)
    right = [deltas[0] + biases[0], *deltas[1:]]
    assert all(error < 2e-6 for error in errors(y, right))


@runs_kernels
def test_dropout_masks_are_those_of_the_reference():
    rows = torch.tensor([0, 1, 5, 2**31 - 1] * 4, dtype=torch.int32, device=DEVICE)
    mask = torch.zeros(16, 64, dtype=torch.int8, device=DEVICE)
    for key, linear, dropout in ((0x9ABCDEF0, 3, 0.05), (17, 200, 0.5), (2**32 - 1, 0, 0.999)):
        threshold = streams.threshold(dropout)
        mask_kernel[(1,)](mask, rows, key, linear, threshold, 64, 16)
        expected = streams.keep_mask(
            rows, 64, key=streams.linear_key(key, linear), threshold=threshold
        )
        assert torch.equal(mask.bool(), expected)


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_twice_and_with_other_neighbours(dtype):
    """Job `mine` has 19 tokens: first at 0, then at 31 behind jobs of other ranks and dropout."""

    def mine(start):
        return segment(start, start + 19, 10, (7, 1, 2), 5, dropout=0.2, key=3)

    def outcome(start, others):
        problem = Problem(sorted([mine(start), *others], key=lambda s: s.start), dtype, seed=start)
        one = Problem([], dtype, seed=99)
        span = slice(start, start + 19)
        problem.x[span], problem.rows[span] = one.x[:19], one.rows[:19]
        for target, source in zip(problem.dy, one.dy, strict=True):
            target[span] = source[:19]
        problem.a, problem.b = one.a, one.b
        *y, dx, grad_a, grad_b0, grad_b1, grad_b2 = problem.run()
        return [
            *(v[span] for v in (*y, dx)),
            grad_a[10:20],
            grad_b0[5:12],
            grad_b1[6:7],
            grad_b2[7:9],
        ]

    first = outcome(0, [segment(19, 50, 40, (16, 16, 16), 30, dropout=0.4, key=8)])
    again = outcome(0, [segment(19, 50, 40, (16, 16, 16), 30, dropout=0.4, key=8)])
    moved = outcome(31, [segment(0, 5, 40, (9, 9, 1), 30), segment(5, 30, 70, (4, 4, 4), 50)])
    assert all(torch.equal(u, v) for u, v in zip(first, again, strict=True))
    assert all(torch.equal(u, v) for u, v in zip(first, moved, strict=True))


@runs_kernels
def test_a_nan_in_one_job_stays_there():
    segments = CASES["odd ranks, empty segment, gaps, dropout"]
    problem = Problem(segments, torch.float32)
    problem.x[:33] = float("nan")
    clean = Problem(segments, torch.float32)
    *y, dx, grad_a, _, _, _ = problem.run()
    *y_clean, dx_clean, grad_a_clean, _, _, _ = clean.run()
    assert torch.equal(dx[33:], dx_clean[33:])
    assert all(torch.equal(u[33:], v[33:]) for u, v in zip(y, y_clean, strict=True))
    assert torch.equal(grad_a[60:], grad_a_clean[60:])
    assert grad_a[3:51].isnan().all()


@runs_kernels
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_entry_goes_through_the_kernels(dtype, transposed):
    """A route of work lists gives frozen products, biases and adapters, and every gradient, twice
    in a row with the same tensors; without a gradient of x too."""
    problem = Problem(CASES["odd ranks, empty segment, gaps, dropout"], dtype)
    generator = torch.Generator().manual_seed(SEED + 5)
    weights = [torch.randn(out, problem.num_in, generator=generator) for out in problem.outs]
    weights = [weight.to(DEVICE, dtype) / problem.num_in**0.5 for weight in weights]
    biases = [None, torch.randn(problem.outs[1], generator=generator).to(DEVICE, dtype), None]
    group = Group(problem.num_in, problem.outs, max_rank=20, dropout=True)
    route = Routes(torch.device(DEVICE)).write(group, problem.segments, problem.num_tokens)
    assert not route.is_table
    *deltas, dx, grad_a, gb_0, gb_1, gb_2 = problem.expected()
    wanted_y = [
        torch.nn.functional.linear(
            problem.x.double(), w.double(), None if b is None else b.double()
        )
        + delta
        for w, b, delta in zip(weights, biases, deltas, strict=True)
    ]
    wanted_dx = dx + sum(
        dy.double() @ w.double() for dy, w in zip(problem.dy, weights, strict=True)
    )
    found_a, found_b = torch.zeros_like(problem.a), [torch.zeros_like(b) for b in problem.b]
    for times in (1, 2):
        x = problem.x.clone().requires_grad_(times == 1)
        y = multi_lora(
            x,
            [weight.T.contiguous() for weight in weights] if transposed else weights,
            biases,
            a=problem.a.detach().requires_grad_(True),
            b=problem.b,
            grad_a=found_a,
            grad_b=found_b,
            route=route,
            rows=problem.rows,
            linears=torch.tensor(LINEARS),
            transposed=transposed,
        )
        torch.autograd.backward(y, problem.dy)
        pairs = [*zip(y, wanted_y, strict=True)]
        if times == 1:
            pairs.append((x.grad, wanted_dx))
        sums = zip([found_a, *found_b], [grad_a, gb_0, gb_1, gb_2], strict=True)
        pairs += [(found, times * wanted) for found, wanted in sums]
        for found, wanted in pairs:
            error = (found.double() - wanted).norm() / wanted.double().norm()
            assert error < LIMITS[dtype]
            assert not found.isnan().any()
        assert not route.extra.any()


@runs_kernels
def test_without_segments_the_entry_gives_frozen_products():
    """Where exact isolation sends them through the kernels too: y is the product and its bias, dx
    the product's, and no gradient is touched."""
    problem = Problem(CASES["odd ranks, empty segment, gaps, dropout"], torch.float32)
    weights = [torch.randn(out, problem.num_in, device=DEVICE) for out in problem.outs]
    biases = [torch.randn(out, device=DEVICE) for out in problem.outs]
    group = Group(problem.num_in, problem.outs, max_rank=1, dropout=True)
    route = Routes(torch.device(DEVICE)).write(group, [], problem.num_tokens)
    assert not route.is_table
    grads = torch.zeros_like(problem.a), [torch.zeros_like(b) for b in problem.b]
    x = problem.x.clone().requires_grad_()
    y = multi_lora(
        x,
        weights,
        biases,
        a=problem.a.detach().requires_grad_(True),
        b=problem.b,
        grad_a=grads[0],
        grad_b=grads[1],
        route=route,
        rows=problem.rows,
        linears=torch.tensor(LINEARS),
    )
    torch.autograd.backward(y, problem.dy)
    wanted = [
        torch.nn.functional.linear(problem.x, w, b) for w, b in zip(weights, biases, strict=True)
    ]
    wanted_dx = sum(dy @ w for dy, w in zip(problem.dy, weights, strict=True))
    for found, right in [*zip(y, wanted, strict=True), (x.grad, wanted_dx)]:
        assert (found - right).norm() < LIMITS[torch.float32] * right.norm()
        assert (found - 1.01 * right).norm() > LIMITS[torch.float32] * right.norm()
    assert not any(grad.any() for grad in (grads[0], *grads[1]))


@runs_kernels
def test_an_s_that_was_kept_gives_the_same_bits():
    """Outputs and gradients of a second forward that is given S; another S is used as it is."""
    problem = Problem(CASES["odd ranks, empty segment, gaps, dropout"], torch.float32)
    weights = [torch.randn(out, problem.num_in, device=DEVICE) for out in problem.outs]
    group = Group(problem.num_in, problem.outs, max_rank=20, dropout=True)
    route = Routes(torch.device(DEVICE)).write(group, problem.segments, problem.num_tokens)

    def run(kept=None):
        grads = torch.zeros_like(problem.a), [torch.zeros_like(b) for b in problem.b]
        x = problem.x.clone().requires_grad_()
        outputs = multi_lora(
            x,
            weights,
            [None] * 3,
            a=problem.a.detach().requires_grad_(True),
            b=problem.b,
            grad_a=grads[0],
            grad_b=grads[1],
            route=route,
            rows=problem.rows,
            linears=torch.tensor(LINEARS),
            kept=kept,
            keep=kept is None,
        )
        y, s = (outputs, kept) if kept is not None else (outputs[:-1], outputs[-1])
        torch.autograd.backward(y, problem.dy)
        return s, [*y, x.grad, grads[0], *grads[1]]

    s, expected = run()
    assert not s.requires_grad
    assert all(map(torch.equal, run(s)[1], expected))
    assert not all(map(torch.equal, run(1.01 * s)[1], expected))
