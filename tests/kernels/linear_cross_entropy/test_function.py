"""Linear cross-entropy is the head followed by the cross-entropy, whatever the chunks."""

import math

import pytest
import torch
from support.comparing import TOLERANCES, relative_error, same_bits

from tlora.kernels.linear_cross_entropy import linear_cross_entropy
from tlora.kernels.linear_cross_entropy.function import rows_at_a_time
from tlora.kernels.linear_cross_entropy.reference import reference

ROWS, WIDTH, VOCABULARY = 37, 24, 91
pytestmark = pytest.mark.usefixtures("new_tensors_hold_nan")


def make_case(dtype: torch.dtype, *, rows: int = ROWS, bias: bool = False, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    targets = torch.randint(0, VOCABULARY, (rows,), generator=generator)
    factors = normal(rows).to(torch.promote_types(dtype, torch.float32))
    return (
        normal(rows, WIDTH),
        normal(VOCABULARY, WIDTH),
        normal(VOCABULARY) if bias else None,
        targets,
        factors,
    )


def results(function, case, dtype: torch.dtype | None = None, **options):
    """Losses, and the gradient of the hidden rows."""
    hidden, weight, bias, targets, factors = case
    if dtype is not None:
        hidden, weight, factors = hidden.to(dtype), weight.to(dtype), factors.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    hidden = hidden.clone().requires_grad_(True)
    losses = function(hidden, weight, bias, targets, **options)
    losses.backward(factors.to(losses.dtype))
    return losses.detach(), hidden.grad


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_rows", [None, 1, 7, 36, 37, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_losses_and_gradients_are_the_reference(dtype, chunk_rows, bias):
    """Whole, row by row, and with a last chunk that is short; against float64."""
    case = make_case(dtype, bias=bias)
    found = results(linear_cross_entropy, case, chunk_rows=chunk_rows)
    right = results(reference, case, torch.float64)
    # Logits themselves are rounded to bfloat16: 4e-3 of the largest was measured.
    tolerance = 1.5e-2 if dtype == torch.bfloat16 else TOLERANCES[dtype]
    for one, other in zip(found, right, strict=True):
        assert one.shape == other.shape
        assert relative_error(one, other) <= tolerance


@pytest.mark.parametrize("broken", ["target", "factor", "weight"])
def test_a_slightly_broken_twin_is_refused(broken):
    """One wrong target, one factor off by 1 %, one weight row off by 1 %."""
    hidden, weight, bias, targets, factors = make_case(torch.float32)
    right = results(reference, (hidden, weight, bias, targets, factors), torch.float64)
    if broken == "target":
        targets = targets.clone()
        targets[5] = (targets[5] + 1) % VOCABULARY
    elif broken == "factor":
        factors = factors.clone()
        factors[5] *= 1.01
    else:
        weight = weight.clone()
        weight[targets[5]] *= 1.01
    found = results(linear_cross_entropy, (hidden, weight, bias, targets, factors))
    errors = [relative_error(one, other) for one, other in zip(found, right, strict=True)]
    assert max(errors) > TOLERANCES[torch.float32]


def test_a_row_of_nan_stays_alone():
    """Losses and gradients of the other rows keep their bits."""
    case = make_case(torch.float32)
    clean = results(linear_cross_entropy, case, chunk_rows=16)
    case[0][20] = math.nan
    found = results(linear_cross_entropy, case, chunk_rows=16)
    others = [row for row in range(ROWS) if row != 20]
    for one, other in zip(found, clean, strict=True):
        assert one[20].isnan().any()
        assert same_bits(one[others], other[others])


def test_without_a_gradient_none_is_computed():
    """Evaluation makes the losses alone."""
    hidden, weight, bias, targets, _ = make_case(torch.float32)
    losses = linear_cross_entropy(hidden, weight, bias, targets)
    assert not losses.requires_grad
    assert relative_error(losses, reference(hidden, weight, bias, targets)) <= 1e-6


def test_no_row_is_fine():
    """A nano-batch may have no trained token of a kind."""
    hidden, weight, bias, targets, factors = make_case(torch.float32, rows=0)
    losses, gradient = results(linear_cross_entropy, (hidden, weight, bias, targets, factors))
    assert len(losses) == len(gradient) == 0


def test_wrong_shapes_are_named():
    """Before anything is computed."""
    hidden, weight, bias, targets, _ = make_case(torch.float32)
    with pytest.raises(ValueError, match=r"\[rows, 24\]"):
        linear_cross_entropy(hidden[:, :5], weight, bias, targets)
    with pytest.raises(ValueError, match="36 targets for 37 rows"):
        linear_cross_entropy(hidden, weight, bias, targets[1:])


def test_chunks_shrink_with_the_vocabulary():
    """But never below what makes a product worth its while."""
    cpu = torch.device("cpu")
    assert rows_at_a_time(1024, cpu) == 256
    assert rows_at_a_time(150_000, cpu) == 64
    cuda = torch.device("cuda")
    assert rows_at_a_time(128_256, cuda) == 1046
    assert rows_at_a_time(128_256, cuda, fused_itemsize=2) == 4096
    assert rows_at_a_time(128_256, cuda, fused_itemsize=4) == 2048
    assert rows_at_a_time(10**8, cuda, fused_itemsize=2) == 128
