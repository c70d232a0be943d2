"""The loss on a CUDA device, at the size of a real vocabulary in bfloat16."""

import pytest
import torch
from support.comparing import relative_error, same_bits
from support.interpreter import SEED

from tlora.kernels.linear_cross_entropy import function, linear_cross_entropy
from tlora.kernels.linear_cross_entropy.reference import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
ROWS, WIDTH = 601, 512
# bfloat16 keeps 8 bits, of every logit and of every error.
LOSS_LIMIT, GRADIENT_LIMIT = 2e-3, 1e-2


def make_case(vocabulary: int, rows: int = ROWS):
    torch.manual_seed(SEED)
    hidden = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(vocabulary, WIDTH, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, vocabulary, (rows,), device="cuda")
    return hidden, weight * (2.5 / WIDTH**0.5), targets, torch.randn(rows, device="cuda")


def results(function, case, dtype: torch.dtype = torch.bfloat16, **options):
    """Losses, and the gradient of the hidden rows."""
    hidden, weight, targets, factors = case
    hidden = hidden.to(dtype, copy=True).requires_grad_(True)
    losses = function(hidden, weight.to(dtype), None, targets, **options)
    losses.backward(factors.to(losses.dtype))
    return losses.detach(), hidden.grad


@pytest.mark.parametrize("chunk_rows", [None, 128, 250])
@pytest.mark.parametrize("vocabulary", [32_000, 50_257, 128_256, 262_144])
def test_losses_and_gradients_are_those_of_float64(vocabulary, chunk_rows):
    """Even and odd vocabularies, whole and in chunks; a twin with a few targets off is refused."""
    case = make_case(vocabulary)
    found = results(linear_cross_entropy, case, chunk_rows=chunk_rows)
    right = results(reference, case, torch.float64)
    hidden, weight, targets, factors = case
    off = targets.clone()
    off[::100] = (off[::100] + 1) % vocabulary
    twin = results(reference, (hidden, weight, off, factors), torch.float64)
    for one, other, wrong, limit in zip(
        found, right, twin, (LOSS_LIMIT, GRADIENT_LIMIT), strict=True
    ):
        assert relative_error(one, other) <= limit < relative_error(one, wrong)


def test_two_runs_give_the_same_bits():
    """Losses and gradients."""
    case = make_case(128_256)
    first, second = results(linear_cross_entropy, case), results(linear_cross_entropy, case)
    assert all(same_bits(u, v) for u, v in zip(first, second, strict=True))


def test_a_row_of_nan_stays_alone():
    """Losses and gradients of the others keep their bits."""
    case = make_case(128_256)
    clean = results(linear_cross_entropy, case)
    case[0][20] = torch.nan
    found = results(linear_cross_entropy, case)
    others = torch.arange(ROWS, device="cuda") != 20
    for one, other in zip(found, clean, strict=True):
        assert one[20].isnan().all()
        assert same_bits(one[others], other[others])


def test_evaluation_gives_the_losses_of_training():
    """Without a gradient, and with no row."""
    hidden, weight, targets, factors = make_case(128_256)
    losses, _ = results(linear_cross_entropy, (hidden, weight, targets, factors))
    assert same_bits(linear_cross_entropy(hidden, weight, None, targets), losses)
    assert len(linear_cross_entropy(hidden[:0], weight, None, targets[:0])) == 0


def test_memory_is_one_chunk_of_logits(monkeypatch):
    """Nothing of the logits' size beside them."""
    monkeypatch.setattr(function, "FUSED_BYTES", 128 * 2 * 128_256)
    case = make_case(128_256)
    results(linear_cross_entropy, case)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results(linear_cross_entropy, case)
    held = torch.cuda.max_memory_allocated() - before
    # The weight's copy by `.to` is none: it has the type. Hidden, gradient, its product: small.
    assert held <= 128 * 2 * 128_256 + 16 * ROWS * WIDTH
