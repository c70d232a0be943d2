"""The tuner on a device: in seconds, the same bits, once.

python -m pytest tests/gpu/test_tuner.py -q -s      # prints what it chose and how long it took
"""

import time

import pytest
import torch

from tlora.kernels import cache
from tlora.kernels.multi_lora import choices, devices, settings, settling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
GROUPS = [(2048, (2048, 512, 512)), (2048, (2048,)), (2048, (8192, 8192)), (8192, (2048,))]
MOST_SECONDS = 60.0
"""Ten, and the compiling of what was begun before and of the usual settings, which a run needs."""


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path))
    monkeypatch.setenv("TLORA_TUNE_KERNELS", "1")
    monkeypatch.setattr(devices, "_settled", {})
    devices.tuning_of.cache_clear()
    yield tmp_path
    devices.tuning_of.cache_clear()


def settle() -> float:
    began = time.monotonic()
    settling.settle_kernels(torch.device("cuda"), torch.bfloat16, GROUPS)
    torch.cuda.synchronize()
    return time.monotonic() - began


def test_a_device_is_tuned_once_and_in_seconds(fresh, monkeypatch):
    device = torch.device("cuda", torch.cuda.current_device())
    held = torch.cuda.memory_allocated()
    first = settle()
    found = choices.read(cache.directory(), settling.key_of(device))
    assert len(found) == 8, "one for every kernel, and two with dropout"
    assert devices.settled(device) == set(found)
    assert torch.cuda.memory_allocated() == held
    monkeypatch.setattr(devices, "_settled", {})
    second = settle()
    print(f"\ntuned in {first:.1f} s, read in {second:.2f} s")
    for name, choice in found.items():
        usual = settings.TUNINGS[name.split(",")[0]]
        print(f"{name}: {choice}, usual {usual.warps} {usual.stages} {usual.programs}")
    assert first < MOST_SECONDS
    assert second < 1.0


def test_every_trial_gives_the_same_bits_under_what_is_tried(fresh):
    """What other_code and other_programs try is equal by design; the tuner's own check is spare."""
    from tlora.kernels.multi_lora import trials, tuner

    device = torch.device("cuda", torch.cuda.current_device())
    limits, half = devices.limits(device), torch.bfloat16
    tried = 0
    for trial in trials.trials(device, (2048, (2048, 512, 512)), half, half):
        usual = settings.tuning(trial.kernel, trial.shape, limits)
        right = trial.results(usual)
        assert all(value.any() for value in right)
        for other in (*tuner.other_programs(usual), *tuner.other_code(usual)):
            needed = settings.shared_bytes(trial.kernel, trial.shape, other, limits.capability)
            if needed <= limits.shared_bytes:
                found = trial.results(other)
                assert all(torch.equal(u, v) for u, v in zip(found, right, strict=True)), other
                tried += 1
    assert tried > 16


def test_the_settings_of_smaller_devices_run_here():
    """Tiles that an sm_75, 80 or 86 gets, against those of this device: float16 noise apart."""
    from tlora.kernels.multi_lora import trials

    device, half = torch.device("cuda", torch.cuda.current_device()), torch.float16
    for trial in trials.trials(device, (2048, (2048, 512, 512)), half, half):
        usual = settings.tuning(trial.kernel, trial.shape, devices.limits(device))
        right = trial.results(usual)
        for shared, capability in ((65_536, 75), (166_912, 80), (101_376, 86)):
            small = settings.Device(shared_bytes=shared, capability=capability)
            tuning = settings.tuning(trial.kernel, trial.shape, small)
            # Of reduce_b's the last is parts of dS, whose number is that of the tiles.
            count = 3 if trial.kernel == "reduce_b" else None
            if trial.kernel == "reduce_b" and tuning.features != usual.features:
                continue  # Its parts have no room in this trial.
            for value, expected in zip(trial.results(tuning)[:count], right[:count], strict=True):
                error = (value.float() - expected.float()).norm() / expected.float().norm()
                assert error < 2e-3, (trial.name, tuning)
