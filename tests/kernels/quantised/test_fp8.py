"""Eight bits a value: scales by row, and products whose rows do not depend on each other."""

import pytest
import torch

from tlora.kernels.quantised import dense, devices, fp8, quantise, quantised_bytes

BF16 = torch.bfloat16

# Of one value against its row's largest: FP8 keeps four bits, so 1/16 of a value, but 2^-10 of the
# scale for values that are small.
HALF_A_STEP = 1 / 16

# Of the norm. Measured for values rounded to FP8 on both sides: whole products 2.7e-2 to 3.8e-2,
# one column of 37 values 2.4e-2 to 5.1e-2; scales of the neighbouring rows give 1.3.
OF_BOTH_SIDES = 7e-2

# Of the norm, in bfloat16. Measured: 1.6e-3 to 1.8e-3.
ROUNDED_ONCE = 4e-3


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def test_a_rows_largest_value_is_the_formats_largest():
    x = values(6, 48) * torch.tensor([1e-6, 1e-3, 1.0, 1e3, 1e6, 0.0])[:, None]
    found, scales = fp8.quantise_rows([x])
    assert found.float().abs().amax(1).tolist() == [fp8.LARGEST] * 5 + [0.0]
    back = fp8.dense(found, scales, torch.float32)
    limit = (HALF_A_STEP * x.abs()).maximum(scales[:, None] * 2**-10)
    assert ((back - x).abs() <= limit * 1.0001).all()
    assert ((back - x).abs() > limit / 4).any()


def test_a_row_of_no_number_does_not_reach_the_others():
    x = values(3, 48)
    clean, clean_scales = fp8.quantise_rows([x])
    x[1, 7] = float("nan")
    found, scales = fp8.quantise_rows([x])
    assert found[1].float().isnan().all()
    assert torch.equal(found[::2].float(), clean[::2].float())
    assert torch.equal(scales[::2], clean_scales[::2])


@pytest.mark.parametrize("size", [1e-36, 1e-40, 1e-45])
def test_a_row_that_is_nearly_nothing_stays_a_number(size: float) -> None:
    """As dY of a token that hardly counts: its scale must not round to zero, for dX would be lost
    with the whole sequence."""
    x = values(3, 48)
    x[1] *= size
    x[1, ::2] = 0
    found, scales = fp8.quantise_rows([x])
    back = fp8.dense(found, scales, torch.float32)
    assert back.isfinite().all()
    assert (back[1] - x[1]).abs().max() <= max(HALF_A_STEP * size * 4, 2.0**-135)
    weight, scale = quantise(0.02 * values(32, 48, seed=1), "fp8")
    dy = x[:, :32].to(BF16)
    assert fp8.input_gradient([dy], [scale], fp8.turned([weight])).isfinite().all()


def test_matrices_side_by_side_have_one_scale_a_row():
    parts, factors = [values(4, 16), values(4, 32, seed=1)], values(48, seed=2)
    found, scales = fp8.quantise_rows(parts, factors)
    whole, whole_scales = fp8.quantise_rows([torch.cat(parts, 1) * factors])
    assert torch.equal(found.float(), whole.float())
    assert torch.equal(scales, whole_scales)


def test_linears_and_their_input_gradient():
    """Against float64 products of the values in full, for weights of rows that differ by far."""
    sizes = values(64, seed=8).mul(3).exp()
    full = [values(64, 48, seed=1) * sizes[:, None], values(16, 48, seed=2)]
    kept = [quantise(weight, "fp8") for weight in full]
    weights, scales = [each.values for each in kept], [each.scales for each in kept]
    x = values(37, 48, seed=3).to(BF16)
    biases = [None, values(16, seed=4).to(BF16)]
    assert fp8.multiplies(x, weights)
    y = fp8.linears(x, weights, scales, biases)
    wanted = [x.double() @ full[0].double().t(), x.double() @ full[1].double().t() + biases[1]]
    # By column: the weight's rows, as different as they are, are each as good.
    assert all(error(*pair) < OF_BOTH_SIDES for pair in zip(y[0].t(), wanted[0].t(), strict=True))
    assert error(y[1], wanted[1]) < OF_BOTH_SIDES
    assert error(y[0], wanted[0]) > 1e-3
    dy = [values(37, 64, seed=5).to(BF16), values(37, 16, seed=6).to(BF16)]
    dx = fp8.input_gradient(dy, scales, fp8.turned(weights))
    right = sum(d.double() @ weight.double() for d, weight in zip(dy, full, strict=True))
    assert error(dx, right) < OF_BOTH_SIDES
    twin = fp8.input_gradient(dy, [scales[0].roll(1), scales[1]], fp8.turned(weights))
    assert error(twin, right) > 0.3


def test_products_are_those_of_the_rounded_values():
    """In float64, rounded once: one per cent is less than FP8 itself loses, and is seen."""
    full = [values(64, 48, seed=1), values(16, 48, seed=2)]
    kept = [quantise(weight, "fp8") for weight in full]
    weights, scales = [each.values for each in kept], [each.scales for each in kept]
    held = [dense(*each, (len(each.values), 48), torch.float32).double() for each in kept]
    x = values(37, 48, seed=3).to(BF16)
    rounded = fp8.dense(*fp8.quantise_rows_plainly([x]), torch.float32).double()
    for y, weight in zip(fp8.linears(x, weights, scales, [None, None]), held, strict=True):
        assert error(y, rounded @ weight.t()) < ROUNDED_ONCE
        assert error(1.01 * y, rounded @ weight.t()) > ROUNDED_ONCE
    dy = [values(37, 64, seed=5).to(BF16), values(37, 16, seed=6).to(BF16)]
    of_columns = torch.cat(scales)
    rounded = fp8.dense(*fp8.quantise_rows_plainly(dy, of_columns), torch.float32).double()
    right = rounded @ torch.cat([weight.double() for weight in weights])
    dx = fp8.input_gradient(dy, scales, fp8.turned(weights))
    assert error(dx, right) < ROUNDED_ONCE
    assert error(1.01 * dx, right) > ROUNDED_ONCE


def test_no_row_of_a_product_depends_on_another():
    """Rows that come later, or are huge: those before keep their bits."""
    weight, scale = quantise(values(32, 48), "fp8")
    x = values(20, 48, seed=1).to(BF16)
    (y,) = fp8.linears(x, [weight], [scale], [None])
    changed = x.clone()
    changed[7:] *= 1e4
    (other,) = fp8.linears(changed, [weight], [scale], [None])
    assert torch.equal(other[:7], y[:7])
    assert not torch.equal(other[7:], y[7:])


@pytest.mark.parametrize(
    ("dtype", "shape", "multiplied"),
    [
        (BF16, (32, 48), True),
        (BF16, (32, 40), False),
        (BF16, (24, 48), False),
        (torch.float16, (32, 48), False),
        (torch.float32, (32, 48), False),
    ],
)
def test_what_is_multiplied_in_fp8(dtype, shape, multiplied):
    """Only bfloat16, and widths that cuBLAS takes; the rest is unpacked."""
    weight, _ = quantise(values(*shape), "fp8")
    assert fp8.multiplies(torch.zeros(3, shape[1], dtype=dtype), [weight]) is multiplied


def test_a_device_that_was_seen_to_be_wrong_is_not_asked(monkeypatch):
    monkeypatch.setattr(devices, "_without_products", set())
    weight, _ = quantise(values(32, 48), "fp8")
    x = torch.zeros(3, 48, dtype=BF16)
    assert fp8.multiplies(x, [weight])
    devices.refuse_products(x.device)
    assert not fp8.multiplies(x, [weight])


@pytest.mark.parametrize(("rows", "held"), [(1, 256), (255, 256), (256, 256), (257, 512)])
def test_products_may_read_behind_the_last_scale(rows: int, held: int) -> None:
    """Whole tiles of scales; those that have room are not copied."""
    scales = values(rows).abs()
    roomy = fp8.in_room(scales)
    assert torch.equal(roomy, scales)
    assert roomy.untyped_storage().nbytes() >= 4 * held
    assert fp8.in_room(roomy).data_ptr() == roomy.data_ptr()
    assert (roomy.data_ptr() == scales.data_ptr()) is (rows == held)
    # The beginning of a tile may lie anywhere, too.
    inside = torch.zeros(600)[100:][:rows]
    assert fp8.in_room(inside).untyped_storage().nbytes() >= 4 * held
    ones = fp8._ones(rows, scales.device)
    assert len(ones) == rows and fp8.in_room(ones) is ones


def test_bytes_are_counted_with_the_turned_copy():
    weight, scales = quantise(values(32, 48), "fp8")
    kept = weight.nbytes + scales.nbytes + fp8.turned([weight]).nbytes
    assert quantised_bytes(32, 48, "fp8") == kept


def test_a_weight_in_full():
    x = values(32, 48)
    kept = quantise(x, "fp8")
    assert error(dense(*kept, (32, 48), torch.float32), x) < HALF_A_STEP / 2
    assert torch.equal(dense(*kept, (32, 48), BF16), dense(*kept, (32, 48), torch.float32).to(BF16))
