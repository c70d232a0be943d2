"""The reference is torch's AdamW after torch's clipping."""

from dataclasses import replace

import pytest
import torch
from support.adamw import Job, Torch, gradients

from tlora.kernels.adamw import reference

WIDTHS = (48, 7)


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.4, 0.9), (0.0, 0.0)])
def test_three_steps_equal_torchs(betas: tuple[float, float], max_norm: float | None) -> None:
    """Values, moments and norms in float64; a decay that is a little off shows."""
    job = Job((5, 3), seed=4, betas=betas, decay=0.1, max_norm=max_norm)
    theirs = Torch(job, WIDTHS)
    ours = [
        (value.clone(), *(torch.zeros_like(value) for _ in range(3)))
        for value in (parameter.detach() for parameter in theirs.parameters)
    ]
    off = Torch(replace(job, decay=0.101), WIDTHS)
    for number in (1, 2, 3):
        for (_, grad, _, _), new in zip(ours, gradients(job, WIDTHS, number), strict=True):
            grad.copy_(new)
        norm = float(reference.step(ours, job.order(0, number)))
        assert norm == pytest.approx(theirs.step(number), rel=1e-12)
        off.step(number)
        theirs.finish()
        off.finish()
    for (value, grad, exp_avg, exp_avg_sq), right, twin in zip(
        ours, theirs.tensors(), off.tensors(), strict=True
    ):
        for tensor, wanted in zip((value, exp_avg, exp_avg_sq), right, strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=1e-11, atol=1e-14)
        assert not grad.any()
        assert (value - twin[0]).abs().max() > 1e-6


def test_copies_follow_the_values_and_hold_finite_numbers_only() -> None:
    """A weight that a copy does not hold is 0 there and makes the norm NaN; without it the norm is
    that of the gradients. A gradient that is no number leaves copies as they are."""
    order = Job((2,), seed=1).order(0, 1)
    for weight, held in ((6e4, 6e4), (7e4, 0.0), (torch.inf, 0.0), (torch.nan, 0.0)):
        matrix = [torch.full((2, 3), number) for number in (1.0, 0.5, 0.0, 0.0)]
        matrix[0][1, 2] = weight
        copy = torch.zeros(2, 3, dtype=torch.float16)
        norm = reference.step([matrix], order, [copy])
        assert copy[1, 2] == pytest.approx(held, rel=1e-3) and bool(norm.isnan()) == (held == 0)
        assert torch.equal(copy[0], matrix[0][0].half()) and copy[0].all()
        kept = copy.clone()
        matrix[1].fill_(torch.inf)
        reference.step([matrix], order, [copy])
        assert torch.equal(copy, kept)
    matrix[0][1, 2] = 7e4
    matrix[1].fill_(0.5)
    assert reference.step([matrix], order).isfinite()
