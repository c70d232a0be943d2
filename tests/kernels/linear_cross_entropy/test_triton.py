"""The loss kernel against float64; support/interpreter.py says where it runs."""

import math

import pytest
import torch
import torch.nn.functional as F
from support.comparing import relative_error, same_bits
from support.interpreter import DEVICE, DTYPES, KERNELS_RUN, SEED, runs_kernels

from tlora.kernels.linear_cross_entropy import linear_cross_entropy
from tlora.kernels.linear_cross_entropy.reference import reference

if KERNELS_RUN:
    from tlora.kernels.linear_cross_entropy.triton_softmax import Tuning, cross_entropy, new_logits

    SMALL = Tuning(block=256, warps=1)

pytestmark = runs_kernels
NAN = math.nan
# Largest errors measured in the interpreter: losses 4e-8 in any format, for they are float32;
# errors 5e-8 in float32 and 2e-4 in float16, which is its rounding. That of bf16 is eight times so.
LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def make_case(vocabulary: int, dtype: torch.dtype, *, rows: int = 5, seed: int = 0):
    """Logits of both signs with some peaks in rows that are padded with NaN, and targets."""
    generator = torch.Generator().manual_seed(SEED + seed)
    values = 3 * torch.randn(rows, vocabulary, generator=generator)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    targets[0], targets[-1] = 0, vocabulary - 1
    logits = new_logits(rows, vocabulary, torch.empty(0, dtype=dtype, device=DEVICE))
    logits.as_strided((rows, logits.stride(0)), (logits.stride(0), 1)).fill_(NAN)
    return logits.copy_(values), targets.to(DEVICE)


def run(logits: torch.Tensor, targets: torch.Tensor, *, gradient: bool = True):
    """Losses, and what the logits have become."""
    losses = torch.full((len(logits),), NAN, device=DEVICE)
    cross_entropy(losses, logits, targets, gradient=gradient, tuning=SMALL)
    return losses, logits


def expected(logits: torch.Tensor, targets: torch.Tensor):
    """In float64."""
    logits = logits.double().requires_grad_(True)
    losses = F.cross_entropy(logits, targets, reduction="none")
    losses.sum().backward()
    return losses.detach(), logits.grad


def within(found, right, dtype: torch.dtype) -> bool:
    limits = (LIMITS[torch.float32], LIMITS[dtype])
    errors = [relative_error(*pair) for pair in zip(found, right, strict=True)]
    return all(error <= limit for error, limit in zip(errors, limits, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 2, 255, 256, 257, 300, 512, 1000])
def test_losses_and_errors_match_the_reference(vocabulary, dtype):
    """Vocabularies of whole tiles, of less than one, and with a last one of any width."""
    logits, targets = make_case(vocabulary, dtype)
    right = expected(logits, targets)
    losses, errors = run(logits, targets)
    if vocabulary == 1:
        assert not losses.any() and not errors.any()
    else:
        assert within((losses, errors), right, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("broken", ["target", "logit", "tail"])
def test_a_slightly_broken_twin_is_refused(broken, dtype):
    """A target one place off, the largest logit of a row off by 1 %, the last logit left out."""
    logits, targets = make_case(300, dtype)
    # No target in the last place, and a weight there that counts.
    targets[-1] = 7
    logits[:, -1] = 6.0
    right = expected(logits, targets)
    if broken == "target":
        targets[2] += 1 if targets[2] == 0 else -1
    elif broken == "logit":
        logits[2, logits[2].argmax()] *= 1.01
    else:
        logits[2, -1] = -math.inf
    assert not within(run(logits, targets), right, dtype)


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_a_row_that_is_not_finite_stays_alone(value):
    """Its loss is NaN; the other rows keep their bits. One logit of -inf is a chance of zero."""
    clean = run(*make_case(300, torch.float32))
    logits, targets = make_case(300, torch.float32)
    logits[2] = torch.where(torch.arange(300, device=DEVICE) == 299, value, logits[2])
    losses, errors = run(logits, targets)
    others = [0, 1, 3, 4]
    assert same_bits(losses[others], clean[0][others])
    assert same_bits(errors[others], clean[1][others])
    if value == -math.inf:
        assert losses[2].isfinite() and errors[2, 299] == 0
    else:
        assert losses[2].isnan() and errors[2].isnan().all()


def test_a_row_of_nan_or_a_target_outside_gives_nan_and_reads_nothing():
    """Neither can be told from a loss, and neither touches a neighbour."""
    clean, _ = run(*make_case(300, torch.float32))
    logits, targets = make_case(300, torch.float32)
    logits[1] = NAN
    # Read from, these places have numbers: of row 3 and of row 2.
    targets[2], targets[3] = 310, -100
    losses, _ = run(logits, targets)
    assert losses[1:4].isnan().all()
    assert same_bits(losses[[0, 4]], clean[[0, 4]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_twice_and_among_any_others(dtype):
    """In another place, with another number of rows."""
    logits, targets = make_case(1000, dtype, rows=6)
    few = new_logits(2, 1000, logits).copy_(logits[3:5])
    again = new_logits(6, 1000, logits).copy_(logits)
    losses, errors = run(logits, targets)
    for rows, other in ((slice(3, 5), run(few, targets[3:5])), (slice(0, 6), run(again, targets))):
        assert same_bits(losses[rows], other[0])
        assert same_bits(errors[rows], other[1])


def test_rows_that_are_not_given_are_not_touched():
    """A short last chunk uses the first rows of a buffer."""
    logits, targets = make_case(300, torch.float32)
    before = logits.clone()
    run(logits[:3], targets[:3])
    assert same_bits(logits[3:], before[3:])


def test_without_a_gradient_the_losses_are_the_same_and_logits_stay():
    """Evaluation."""
    logits, targets = make_case(1000, torch.float16)
    before = logits.clone()
    losses, after = run(logits, targets, gradient=False)
    assert same_bits(after, before)
    assert same_bits(losses, run(logits, targets)[0])


@pytest.mark.parametrize(("chunk_rows", "bias"), [(None, False), (7, True)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_the_entry_gives_losses_and_gradients(dtype, chunk_rows, bias):
    """With and without a bias, whole and in chunks of which the last is short; a factor off by
    5 % is refused. float64 has no kernel and is right all the same."""
    generator = torch.Generator().manual_seed(SEED + 1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    hidden, weight = normal(17, 24), normal(300, 24) / 3
    weight_bias = normal(300) if bias else None
    targets = torch.randint(0, 300, (17,), generator=generator).to(DEVICE)
    factors = normal(17).to(torch.promote_types(dtype, torch.float32))

    def results(function, factors, as_dtype, **options):
        x = hidden.to(as_dtype, copy=True).requires_grad_(True)
        b = None if weight_bias is None else weight_bias.to(as_dtype)
        losses = function(x, weight.to(as_dtype), b, targets, **options)
        losses.backward(factors.to(losses.dtype))
        return losses.detach(), x.grad

    # Logits themselves are rounded. Measured in the interpreter: float32 2.6e-7, float16 4e-4.
    limit = {torch.float64: 4e-15, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}.get(dtype, 2e-6)
    found = results(linear_cross_entropy, factors, dtype, chunk_rows=chunk_rows)
    right = results(reference, factors, torch.float64)
    twin = results(reference, factors * 1.05, torch.float64)
    for one, other in zip(found, right, strict=True):
        assert relative_error(one, other) <= limit
    assert relative_error(found[1], twin[1]) > limit
