"""Frozen weights in fewer bits under the same adapters: as with what they stand for, in full."""

import pytest
import torch
from support.comparing import relative_error, same_bits
from support.multi_lora import S_WIDTH, Case, Job, Results, expected, make_case, run

from tlora.kernels.multi_lora import multi_lora
from tlora.kernels.multi_lora.routes import table_route
from tlora.kernels.quantised import QuantisedWeight, dense, fp8, quantise

JOBS = [Job(9, (3, 0, 4), 0.5, 0.2), Job(0, (2, 2, 1)), Job(6, (1, 5, 2), 2.0), Job(1, (4, 4, 4))]
WIDTHS = {"in_features": 48, "out_features": (32, 64, 16)}

# Of the norm of a job's rows. Measured with X or dY, and the weight, rounded to FP8: 2.3e-2 to
# 4.6e-2.
OF_BOTH_SIDES = 7e-2


def case_in(how: str, dtype: torch.dtype) -> tuple[Case, list[QuantisedWeight]]:
    """Weights that are what the quantised ones stand for."""
    case = make_case(JOBS, **WIDTHS, dtype=dtype)
    kept = [quantise(weight, how) for weight in case.weights]
    full = [
        dense(*each, (weight.shape[0], weight.shape[1]), dtype)
        for each, weight in zip(kept, case.weights, strict=True)
    ]
    return case.but(weights=full), kept


def run_quantised(case: Case, kept: list[QuantisedWeight], *, turned: bool = False) -> Results:
    values = [each.values for each in kept]

    def entry(x, weights, biases, **keywords):
        return multi_lora(
            x,
            values,
            biases,
            scales=[each.scales for each in kept],
            turned=fp8.turned(values) if turned else None,
            **keywords,
        )

    return run(case, entry=entry)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", ["nf4", "fp8"])
def test_unpacked_weights_give_the_bits_of_full_ones(how: str, dtype: torch.dtype) -> None:
    """Output and every gradient; where products are not of FP8 values themselves."""
    if (how, dtype) == ("fp8", torch.bfloat16):
        pytest.skip("products of FP8 values: the tests below")
    case, kept = case_in(how, dtype)
    found, wanted = run_quantised(case, kept), run(case)
    assert all(map(same_bits, [*found.y, found.dx], [*wanted.y, wanted.dx]))
    assert same_bits(found.grad_a.nan_to_num(), wanted.grad_a.nan_to_num())
    assert all(
        same_bits(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(found.grad_b, wanted.grad_b, strict=True)
    )
    twin = run_quantised(case, [each._replace(scales=each.scales * 1.01) for each in kept])
    assert not any(map(same_bits, twin.y, wanted.y))


@pytest.mark.parametrize("turned", [False, True])
def test_products_in_fp8(turned: bool) -> None:
    """What X, dY and the weight lose by it, and no more; the adapters lose nothing."""
    case, kept = case_in("fp8", torch.bfloat16)
    found, right = run_quantised(case, kept, turned=turned), expected(case)
    for one, other in zip([*found.y, found.dx], [*right.y, right.dx], strict=True):
        assert 1e-3 < relative_error(one, other) < OF_BOTH_SIDES
    # In bfloat16 throughout, the frozen products aside.
    adapters = run(case)
    assert same_bits(found.grad_a.nan_to_num(), adapters.grad_a.nan_to_num())
    assert all(
        same_bits(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(found.grad_b, adapters.grad_b, strict=True)
    )
    twin = [kept[0]._replace(scales=kept[0].scales.roll(1)), *kept[1:]]
    assert relative_error(run_quantised(case, twin).y[0], right.y[0]) > OF_BOTH_SIDES


def test_a_jobs_rows_do_not_depend_on_its_neighbours() -> None:
    """Other values in another job's rows, as large as they may be: the same bits in this one's."""
    case, kept = case_in("fp8", torch.bfloat16)
    first = slice(0, JOBS[0].tokens)
    before = run_quantised(case, kept)
    loud = case.x.clone()
    loud[first.stop :] *= 1e3
    after = run_quantised(case.but(x=loud), kept)
    for one, other in zip([*before.y, before.dx], [*after.y, after.dx], strict=True):
        assert same_bits(one[first], other[first])
    assert not same_bits(before.y[0], after.y[0])


@pytest.mark.parametrize(("how", "dtype"), [("nf4", torch.float32), ("fp8", torch.bfloat16)])
def test_the_operators_declare_what_they_do(how: str, dtype: torch.dtype) -> None:
    """Shapes without data: nothing in a quantised weight tells its width."""
    case, kept = case_in(how, dtype)
    a, b = case.a.nan_to_num(), [b_l.nan_to_num() for b_l in case.b]
    where = (*table_route(*case.table(), S_WIDTH), case.rows, torch.tensor(case.linears))
    values, scales = [each.values for each in kept], [each.scales for each in kept]
    keywords = {"scales": scales}
    forward = (case.x, values, case.biases, False, a, b, *where)
    # The other check multiplies values with random numbers, which FP8 cannot.
    checks = ("test_schema", "test_faketensor") if how == "nf4" else ("test_faketensor",)
    torch.library.opcheck(
        torch.ops.tlora.multi_lora_forward.default, forward, keywords, test_utils=checks
    )
    *_, s = torch.ops.tlora.multi_lora_forward(*forward, scales=scales)
    grads = (case.grad_a.nan_to_num(), [grad.nan_to_num() for grad in case.grad_b])
    backward = (case.x, case.dy, s, values, False, a, b, *grads, *where, True)
    torch.library.opcheck(
        torch.ops.tlora.multi_lora_backward.default, backward, keywords, test_utils=checks
    )


def test_nothing_keeps_weights_in_full_for_backward() -> None:
    """What autograd holds from forward on is what was given."""
    case, kept = case_in("nf4", torch.float32)
    shapes: list[torch.Size] = []

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        run_quantised(case, kept)
    assert case.x.shape in shapes
    assert not {weight.shape for weight in case.weights} & set(shapes)
