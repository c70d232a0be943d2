"""The script that measures what a base in fewer bits does to jobs, on a CPU, a tiny model and real
data."""

import pytest


@pytest.mark.slow
@pytest.mark.real_data
def test_every_way_of_holding_the_base_is_compared_with_full(run_script, real_data) -> None:
    """In float32; four bits are seen before the first step, and nothing differs from itself."""
    found = run_script(
        "quantised_quality", "--model", str(real_data / "models" / "stories260K"),
        "--data", str(real_data / "datasets"), "--jobs", "gsm8k,nl2bash", "--steps", "4",
        "--budget", "512", "--length", "48", "--rate", "2e-3", "--dtype", "float32",
    )  # fmt: skip
    assert found["complete"]
    for of_job in found["held_out"].values():
        assert set(of_job) == {"none", "fp8", "nf4"}
        assert of_job["none"]["worse_than_full"] == 0
        assert of_job["nf4"]["before"] != of_job["none"]["before"]
        assert all(way["after"] < way["before"] for way in of_job.values())
