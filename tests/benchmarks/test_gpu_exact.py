"""The script that tries exact isolation, on a CPU and a tiny model."""

import pytest


@pytest.mark.slow
def test_bits_are_the_same_under_exact_isolation_and_not_by_default(run_script) -> None:
    """And the cost is there, with its rounds."""
    found = run_script(
        "gpu_exact", "--shape", "tiny", "--rows", "192", "--bit-steps", "1", "--cost-steps", "1",
        "--rounds", "2",
    )  # fmt: skip
    assert found["complete"] and found["bits_exact"]["all_same"]
    assert not found["bits_default"]["all_same"]
    assert len(found["cost"]["rounds"]) == 2 and found["cost"]["tokens_per_s"]["exact"] > 0


def test_what_was_measured_is_kept_when_time_runs_out(run_script) -> None:
    """A line that says that it is not complete."""
    found = run_script("gpu_exact", "--shape", "tiny", "--rows", "192", "--seconds", "1")
    assert not found["complete"] and "cost" not in found and found["seconds"] < 20
