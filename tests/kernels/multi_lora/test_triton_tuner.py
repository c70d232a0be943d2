"""What the tuner launches runs, and gives the same bits whatever it tries; support/interpreter.py
says where."""

import pytest
import torch
from support.interpreter import DEVICE, runs_kernels

from tlora.kernels.multi_lora import settings, tuner

GROUP, TOKENS = (48, (64, 32)), 32


@runs_kernels
def test_every_trial_gives_the_same_under_what_is_tried():
    """And writes something, so that equal bits say something."""
    from tlora.kernels.multi_lora import trials

    dtype = torch.float32
    device = torch.empty(0, device=DEVICE).device
    made = trials.trials(device, GROUP, dtype, dtype, tokens=TOKENS)
    assert [trial.name for trial in made] == trials.names(GROUP, dtype, dtype)
    for trial in made:
        usual = settings.tuning(trial.kernel, trial.shape)
        right = trial.results(usual)
        assert all(value.any() and value.isfinite().all() for value in right), trial.name
        found = trial.results(next(tuner.other_programs(usual)))
        assert all(torch.equal(u, v) for u, v in zip(found, right, strict=True)), trial.name
        trial.run(usual)


@runs_kernels
def test_trials_take_no_random_numbers_from_training():
    from tlora.kernels.multi_lora import trials

    torch.manual_seed(3)
    device = torch.empty(0, device=DEVICE).device
    before = torch.randn(3, device=device)
    torch.manual_seed(3)
    trials.trials(device, GROUP, torch.float16, torch.float16, tokens=TOKENS)
    assert torch.equal(torch.randn(3, device=device), before)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_settings_of_small_devices_compute_the_same(dtype):
    """Gradients under the tiles of a device with 64 KB, against those of the usual ones."""
    from tlora.kernels.multi_lora import trials

    small = settings.Device(shared_bytes=65_536, capability=75)
    device = torch.empty(0, device=DEVICE).device
    limit = 2e-6 if dtype == torch.float32 else 2e-3
    different = 0
    for trial in trials.trials(device, (48, (64, 32, 16)), dtype, dtype, tokens=TOKENS)[:5]:
        usual, found = (
            settings.tuning(trial.kernel, trial.shape, limits)
            for limits in (settings.MEASURED, small)
        )
        different += found != usual
        # Of reduce_b's the last is parts of dS, whose number is that of the tiles.
        count = 3 if trial.kernel == "reduce_b" else None
        pairs = list(zip(trial.results(found)[:count], trial.results(usual)[:count], strict=True))
        for value, right in pairs:
            assert (value - right).norm() < limit * right.norm(), trial.name
            assert (1.01 * value - right).norm() > limit * right.norm(), trial.name
    assert different
