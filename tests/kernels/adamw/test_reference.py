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
