"""The script that measures noise, on a CPU, a tiny model and real data."""

import pytest


@pytest.mark.slow
@pytest.mark.real_data
def test_noise_is_measured_and_twins_are_told_apart(run_script, real_data) -> None:
    """In float32, where the noise is small: the fused run is within it, a twin is not."""
    found = run_script(
        "bf16_noise", "--model", str(real_data / "models" / "stories260K"),
        "--data", str(real_data / "datasets"), "--jobs", "gsm8k,nl2bash", "--steps", "6",
        "--budget", "512", "--length", "48", "--rate", "2e-3", "--dtype", "float32",
    )  # fmt: skip
    assert found["complete"] and not found["left_out"]
    assert found["within_noise"] and found["all_lower"]
    assert len(found["twins_found"]) == 2 and all(found["twins_found"].values())
    assert len(found["pairs"]) == 15
