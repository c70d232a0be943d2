"""The CPU paths, through the public entry, against the reference: outputs and every gradient."""

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from support.comparing import TOLERANCES, agrees, same_bits
from support.multi_lora import (
    Case,
    Job,
    errors,
    expected,
    make_case,
    mismatches,
    of_others,
    own,
    pieces,
    run,
)
from support.native import require_native

from tlora.kernels.multi_lora import native

MIXED = [
    Job(63, (5, 0, 64), 0.5, 0.1),
    Job(0, (3, 2, 1)),
    Job(1, (1, 1, 1), 2.0),
    Job(20, (16, 8, 33), 4.0, 0.3),
    Job(7, (0, 0, 7), 0.25),
    Job(9, (0, 0, 0)),
    Job(30, (3, 2, 1), -1.0),
]
JOBS = {
    "mixed": MIXED,
    "one job of 63 tokens and rank 5": [Job(63, (5, 5, 5))],
    "one token of rank 1": [Job(1, (1, 1, 1), dropout=0.2)],
    "only empty segments": [Job(0, (5, 1, 2), dropout=0.1), Job(0, (8, 8, 8))],
    "no job": [],
    "rank 64 above every width": [Job(5, (64, 64, 64), dropout=0.1), Job(4, (64, 64, 64))],
}


pytestmark = pytest.mark.usefixtures("new_tensors_hold_nan")


@pytest.fixture(autouse=True, params=["native", "plain"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, which serves float32 alone, and the products of cpu.py."""
    if request.param == "native":
        require_native()
    else:
        monkeypatch.setattr(native, "serving", lambda *tensors: None)


def test_new_tensors_do_hold_nan() -> None:
    """Else these tests would miss forgotten writes."""
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.zeros(2, dtype=torch.bfloat16)).isnan().all()


# Right.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", JOBS)
def test_outputs_and_gradients_are_the_reference(name: str, dtype: torch.dtype) -> None:
    """y, dx, and grad_a and grad_b added to what they held; rows of nobody are NaN and reach no
    one."""
    case = make_case(JOBS[name], dtype=dtype)
    assert mismatches(run(case), expected(case), case) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transposed_weights_are_the_reference(dtype: torch.dtype) -> None:
    """GPT-2 keeps its weights as [in, out]."""
    case = make_case(MIXED, dtype=dtype, transposed=True)
    assert mismatches(run(case), expected(case), case) == []


def test_a_single_linear_is_the_reference() -> None:
    """A group of one, with fewer outputs than inputs."""
    case = make_case([Job(8, (3,), dropout=0.1), Job(5, (2,))], out_features=(7,))
    assert mismatches(run(case), expected(case), case) == []


def test_a_hundred_adapters_of_ranks_1_to_64_are_the_reference() -> None:
    """Many neighbours, every rank, dropout of each its own, some without a token."""
    jobs = [
        Job(j % 4, (1 + j % 64, (7 * j) % 65), 2.0 ** (j % 5 - 2), (j % 3) * 0.1)
        for j in range(100)
    ]
    case = make_case(jobs, in_features=64, out_features=(32, 48))
    assert mismatches(run(case), expected(case), case) == []


def test_segments_of_one_job_add_up() -> None:
    """A job cut at its sequences has several segments with the same rows: their gradients add."""
    whole = make_case([Job(20, (4, 0, 3), 1.5, 0.2), Job(11, (2, 2, 2))])
    first, *rest = whole.segments
    parts = [
        dataclasses.replace(first, start=start, stop=stop)
        for start, stop in itertools.pairwise([first.start, 7, 8, first.stop])
    ]
    found = run(whole.but(segments=[*parts, *rest]))
    assert mismatches(found, expected(whole), whole) == []


def test_an_input_without_gradient_still_trains_the_adapters() -> None:
    """The first layer of a frozen model: no dx is computed, grad_a and grad_b are as ever."""
    case = make_case(MIXED)
    found = run(case, needs_dx=False)
    assert found.dx is None
    assert mismatches(found, expected(case), case) == []


def test_an_adapter_that_adds_nothing_leaves_the_frozen_output_bit_by_bit() -> None:
    """Dropout belongs to the adapter's input, never to the frozen path: with B = 0 it cannot be
    seen."""
    case = make_case([Job(40, (4, 4, 4), dropout=0.9)])
    case = case.but(b=[b_l.nan_to_num(0.0) * 0 for b_l in case.b])
    frozen = run(case.but(segments=[]))
    assert all(map(same_bits, run(case).y, frozen.y))


def test_bfloat16_rounds_what_the_adapters_give_only_once() -> None:
    """Adapters are float32 whatever the base: over a base of zeros y and dx are the exact values
    rounded, where rounding the factors as well would show in the small ones."""
    case = make_case(MIXED, dtype=torch.bfloat16)
    case = case.but(weights=[w * 0 for w in case.weights], biases=[None] * 3)
    found, right = run(case), expected(case)
    half_a_step = 2.0**-8
    for value, wanted in [*zip(found.y, right.y, strict=True), (found.dx, right.dx)]:
        assert ((value - wanted).abs() <= half_a_step * wanted.abs() + 1e-5).all()


def test_a_job_gets_the_same_update_alone_and_among_many() -> None:
    """Neither scale nor mask depends on the neighbours, nor on where in the row the job lies."""
    case = make_case(MIXED)
    found = own(run(case), case, job=3)
    segment = case.segments[3]
    tokens = slice(segment.start, segment.stop)
    solo = case.but(
        x=case.x[tokens], dy=[dy_l[tokens] for dy_l in case.dy], rows=case.rows[tokens]
    ).but_segment(3, start=0, stop=segment.stop - segment.start)
    solo = solo.but(segments=[solo.segments[3]])
    alone = own(run(solo), solo, job=0)
    assert [name for name, value in alone.items() if not agrees(found[name], value)] == []


# Nobody else's.


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["x", "dy", "adapter"])
@pytest.mark.parametrize("job", [0, 2, 3])
def test_a_poisoned_job_leaves_the_others_bit_by_bit(job: int, where: str, poison: float) -> None:
    """NaN or Inf in one job's rows shows in its own results and in no one else's."""
    case = make_case(MIXED)
    segment = case.segments[job]
    tokens = slice(segment.start, segment.stop)
    x, a, dy = case.x.clone(), case.a.clone(), [dy_l.clone() for dy_l in case.dy]
    match where:
        case "x":
            x[tokens] = poison
        case "dy":
            for dy_l in dy:
                dy_l[tokens] = poison
        case "adapter":
            a[segment.a_row : segment.a_row + segment.width] = poison
    clean, found = run(case), run(case.but(x=x, a=a, dy=dy))
    assert all(map(same_bits, of_others(found, case, job), of_others(clean, case, job)))
    assert any(not value.isfinite().all() for value in own(found, case, job).values())
    assert mismatches(found, expected(case), case) != []


def test_frozen_weights_and_biases_get_no_gradient() -> None:
    """Not even if somebody left requires_grad on."""
    case = make_case(MIXED)
    frozen = [t.requires_grad_(True) for t in (*case.weights, *case.biases) if t is not None]
    run(case)
    assert all(tensor.grad is None for tensor in frozen)


def test_neither_inputs_nor_the_pool_are_changed() -> None:
    """Only the pool's gradients are written."""
    case = make_case(MIXED)
    tensors = [case.x, *case.dy, *case.weights, case.a, *case.b]
    before = [tensor.clone() for tensor in tensors]
    run(case)
    assert all(map(same_bits, tensors, before))


def test_the_same_call_gives_the_same_bits() -> None:
    """No order of sums is left to chance."""
    case = make_case(MIXED)
    first, second = run(case), run(case)
    for (_, left), (_, right) in zip(pieces(first, case), pieces(second, case), strict=True):
        assert same_bits(left, right)


# The comparison itself.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tolerance_lies_above_the_measured_noise(dtype: torch.dtype) -> None:
    """Noise: the error of right results against float64. It must not reach the tolerance, and a
    tolerance of twenty times the noise would be too wide."""
    worst: dict[torch.dtype, float] = {}
    for seed in range(4):
        case = make_case(MIXED, dtype=dtype, seed=seed)
        found = run(case)
        for (_, value), error in zip(
            pieces(found, case), errors(found, expected(case), case).values(), strict=True
        ):
            worst[value.dtype] = max(worst.get(value.dtype, 0.0), error)
    for kind, error in worst.items():
        assert 0.05 * TOLERANCES[kind] < error < 0.7 * TOLERANCES[kind], (kind, error)


def scale_off(case: Case) -> Case:
    return case.but_segment(3, scale=1.01 * case.segments[3].scale)


def segment_dropped(case: Case) -> Case:
    return case.but(segments=case.segments[:3] + case.segments[4:])


def masks_swapped(case: Case) -> Case:
    first, second, third = case.linears
    return case.but(linears=[second, first, third])


def rows_shifted(case: Case) -> Case:
    return case.but(rows=case.rows + 1)


def no_dropout(case: Case) -> Case:
    return case.but_segment(3, threshold=0)


def key_of_another_step(case: Case) -> Case:
    return case.but_segment(3, key=case.segments[3].key ^ 1)


def boundary_shifted(case: Case) -> Case:
    start = case.segments[3].start + 1
    return case.but_segment(2, stop=start).but_segment(3, start=start)


def neighbours_rows(case: Case) -> Case:
    return case.but_segment(3, a_row=case.segments[0].a_row)


def alpha_for_scale(case: Case) -> Case:
    return case.but_segment(3, scale=16 * case.segments[3].scale)


def one_row_of_a_off(case: Case) -> Case:
    a = case.a.clone()
    a[case.segments[3].a_row + 5] *= 1.01
    return case.but(a=a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "twin",
    [
        scale_off,
        segment_dropped,
        masks_swapped,
        rows_shifted,
        no_dropout,
        key_of_another_step,
        boundary_shifted,
        neighbours_rows,
        alpha_for_scale,
    ],
)
def test_a_broken_twin_is_refused(twin: Callable[[Case], Case], dtype: torch.dtype) -> None:
    """Each slight fault shows in an output, in dx and in both gradients of the job it befalls."""
    case = make_case(MIXED, dtype=dtype)
    wrong = mismatches(run(twin(case)), expected(case), case)
    for kind in ("y", "dx", "grad_a", "grad_b"):
        assert [name for name in wrong if name.startswith(f"job 3: {kind}")] != [], kind


def test_one_row_off_by_a_per_cent_is_refused() -> None:
    """In float32 even one rank row of one job, for all that depend on it."""
    case = make_case(MIXED)
    wrong = mismatches(run(one_row_of_a_off(case)), expected(case), case)
    assert wrong == ["job 3: y0", "job 3: dx", "job 3: grad_b0"]


def test_gradients_without_the_mask_are_refused() -> None:
    """Right outputs with a backward that forgot dropout: a published mistake."""
    case = make_case(MIXED)
    found, unmasked = run(case), run(no_dropout(case))
    wrong = mismatches(unmasked._replace(y=found.y), expected(case), case)
    assert {name.split()[2][:-1] for name in wrong} >= {"grad_a", "grad_b"}
    assert "job 3: dx" in wrong


def test_zeros_and_unwritten_results_are_refused() -> None:
    """What an all-zero kernel or one that writes nothing would give."""
    case = make_case(MIXED)
    found, right = run(case), expected(case)
    for value in (0.0, math.nan):
        y, dx = [torch.full_like(y_l, value) for y_l in found.y], torch.full_like(right.dx, value)
        twin = found._replace(y=y, dx=dx.float())
        # All but those of the job without tokens: three outputs and dx, padding included.
        assert len(mismatches(twin, right, case)) == 4 * len(MIXED)
    untouched = found._replace(grad_a=case.grad_a, grad_b=case.grad_b)
    assert "job 3: grad_a0" in mismatches(untouched, right, case)


def test_a_gradient_written_into_rows_of_nobody_is_refused() -> None:
    """By a bit."""
    case = make_case(MIXED)
    found = run(case)
    found.grad_b[1][0, 0] = torch.nextafter(found.grad_b[1][0, 0], torch.tensor(9.0))
    assert mismatches(found, expected(case), case) == ["nobody: gradient 2"]
