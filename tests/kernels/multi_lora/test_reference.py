"""The reference is the formula, and its hand-written backward is the formula's derivative."""

import math

import pytest
import torch
from support import plain_hash
from support.comparing import agrees
from support.multi_lora import Case, Job, make_case

from tlora.kernels.multi_lora import reference

JOBS = {
    "plain": [Job(4, (2, 3)), Job(3, (1, 5), scale=-0.5)],
    "dropout": [Job(4, (2, 3), 2.0, 0.3), Job(3, (1, 4), dropout=0.5), Job(2, (3, 1))],
    "rank 0 in some linears": [Job(3, (0, 3), dropout=0.2), Job(2, (2, 0)), Job(2, (0, 0))],
    "an empty segment": [Job(2, (1, 2)), Job(0, (3, 2)), Job(3, (2, 1), dropout=0.1)],
    "one token each": [Job(1, (1, 1)), Job(1, (7, 5), dropout=0.4), Job(1, (3, 9))],
    "rank above the width": [Job(3, (11, 13), 0.25)],
    "no segment": [],
}


def small_case(jobs: list[Job]) -> Case:
    options = {"in_features": 4, "out_features": (3, 2), "padding": 1}
    return make_case(jobs, dtype=torch.float64, pool_dtype=torch.float64, **options)


def naive_delta(case: Case, linear: int, token: int) -> list[float]:
    """One token's update, by sums over single numbers and the plain hash."""
    x, b = case.x[token].tolist(), case.b[linear].tolist()
    delta = [0.0] * case.b[linear].shape[1]
    for segment in case.segments:
        if segment.start <= token < segment.stop:
            key = plain_hash.linear_key(segment.key, case.linears[linear])
            row, keep = int(case.rows[token]), 1 - segment.threshold / 2**32
            kept = [plain_hash.bits(key, row, f) >= segment.threshold for f in range(len(x))]
            a_row = segment.a_row + sum(segment.ranks[:linear])
            for r in range(segment.ranks[linear]):
                a_r, b_r = case.a[a_row + r].tolist(), b[segment.b_rows[linear] + r]
                s = math.fsum(x[f] / keep * a_r[f] for f in range(len(x)) if kept[f])
                delta = [d + segment.scale * s * value for d, value in zip(delta, b_r, strict=True)]
    return delta


class Delta(torch.autograd.Function):
    """The reference's forward and backward, joined for gradcheck."""

    @staticmethod
    def forward(ctx, case, x, a, *b):
        ctx.save_for_backward(x, a, *b)
        ctx.case = case
        return tuple(reference.forward(x, a, list(b), case.segments, case.rows, case.linears))

    @staticmethod
    def backward(ctx, *dy):
        x, a, *b = ctx.saved_tensors
        case = ctx.case
        grads = reference.backward(x, list(dy), a, b, case.segments, case.rows, case.linears)
        return None, grads.x, grads.a, *grads.b


def gradients_hold(case: Case, function: type[torch.autograd.Function] = Delta) -> bool:
    # Rows of nobody are made finite: gradcheck moves every value it is given.
    tensors = [case.x, case.a.nan_to_num(1.0), *(b_l.nan_to_num(1.0) for b_l in case.b)]
    inputs = [tensor.clone().requires_grad_(True) for tensor in tensors]
    return torch.autograd.gradcheck(
        lambda *values: function.apply(case, *values), inputs, raise_exception=False
    )


@pytest.mark.parametrize("name", JOBS)
def test_forward_is_the_formula(name: str) -> None:
    """delta = scale * drop(x) A^T B, number by number; zero where no job is."""
    case = small_case(JOBS[name])
    deltas = reference.forward(case.x, case.a, case.b, case.segments, case.rows, case.linears)
    for i, delta in enumerate(deltas):
        naive = [naive_delta(case, i, token) for token in range(len(case.x))]
        assert agrees(delta, torch.tensor(naive, dtype=torch.float64))


@pytest.mark.parametrize("name", JOBS)
def test_backward_is_the_derivative_of_forward(name: str) -> None:
    """gradcheck in float64 for x, A and every B."""
    assert gradients_hold(small_case(JOBS[name]))


class WithoutMaskInBackward(Delta):
    """A published mistake: gradients as if there had been no dropout."""

    @staticmethod
    def backward(ctx, *dy):
        for j, segment in enumerate(ctx.case.segments):
            ctx.case = ctx.case.but_segment(j, threshold=0) if segment.threshold else ctx.case
        return Delta.backward(ctx, *dy)


class WithScaleOff(Delta):
    @staticmethod
    def backward(ctx, *dy):
        ctx.case = ctx.case.but_segment(0, scale=1.01 * ctx.case.segments[0].scale)
        return Delta.backward(ctx, *dy)


class WithoutOneSegment(Delta):
    @staticmethod
    def backward(ctx, *dy):
        ctx.case = ctx.case.but(segments=ctx.case.segments[1:])
        return Delta.backward(ctx, *dy)


@pytest.mark.parametrize("twin", [WithoutMaskInBackward, WithScaleOff, WithoutOneSegment])
def test_a_broken_backward_is_refused(twin: type[torch.autograd.Function]) -> None:
    """gradcheck sees a forgotten mask, a scale off by 1 % and a dropped segment."""
    assert not gradients_hold(small_case(JOBS["dropout"]), twin)


def test_results_have_the_format_of_the_pool() -> None:
    """bfloat16 activations, float32 adapters: sums and gradients are float32."""
    case = make_case(JOBS["dropout"], out_features=(4, 5), dtype=torch.bfloat16)
    where = (case.segments, case.rows, case.linears)
    deltas = reference.forward(case.x, case.a, case.b, *where)
    grads = reference.backward(case.x, case.dy, case.a, case.b, *where)
    assert {t.dtype for t in (*deltas, grads.x, grads.a, *grads.b)} == {torch.float32}
