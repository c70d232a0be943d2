"""The scripts about bases in fewer bits, on a CPU: what they check, and what they keep."""

import pytest


def test_groups_are_checked_and_timed(run_script) -> None:
    """Every step of every group has a time; what is quoted is of their sums."""
    found = run_script(
        "gpu_quantised", "--tokens", "32", "--narrow", "64", "--rounds", "1", "--shape", "1b"
    )
    assert found["complete"] and found["all_right"]
    assert set(found["right"]) == set(found["groups_us"]) == {"qkv", "o", "gate_up", "down"}
    for step, us in found["layer_us"].items():
        parts = [group[step] for group in found["groups_us"].values()]
        assert sum(parts) == pytest.approx(us, abs=0.5) and min(parts) > 0
    layer = found["layer_us"]
    share = (layer["y nf4"] + layer["dx nf4"]) / (layer["y"] + layer["dx"])
    assert found["nf4_over_full"] == pytest.approx(share, rel=1e-2)


def test_a_product_that_is_wrong_is_not_called_right(run_script, monkeypatch) -> None:
    """By the scales of other rows."""
    from tlora.kernels.quantised import fp8

    right = fp8.product

    def wrong(left, other, of_left, of_right, dtype):
        return right(left, other, of_left.roll(1), of_right, dtype)

    monkeypatch.setattr(fp8, "product", wrong)
    found = run_script(
        "gpu_quantised", "--tokens", "32", "--narrow", "64", "--rounds", "1", "--shape", "1b"
    )
    assert found["complete"] and not found["all_right"]


@pytest.mark.slow
@pytest.mark.real_data
def test_jobs_on_three_bases_are_compared(run_script, real_data) -> None:
    """Each with its own figures, the one in full as what the others are compared with."""
    found = run_script(
        "quantised_quality", "--model", str(real_data / "models" / "stories260K"),
        "--data", str(real_data / "datasets"), "--jobs", "nl2bash", "--steps", "4",
        "--budget", "512", "--length", "48", "--rate", "2e-3", "--dtype", "float32",
    )  # fmt: skip
    assert found["complete"]
    held_out = found["held_out"]["nl2bash"]
    assert set(held_out) == {"none", "fp8", "nf4"}
    assert held_out["none"]["worse_than_full"] == 0
    before = [held_out[way]["before"] for way in ("none", "fp8", "nf4")]
    assert len(set(before)) == 3
    assert all(each["after"] < each["before"] for each in held_out.values())
