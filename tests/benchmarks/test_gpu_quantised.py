"""The script that times linears in fewer bits, on a CPU: what it checks, and what it keeps."""

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

    def wrong(left, other, of_left, of_right, dtype, **options):
        return right(left, other, of_left.roll(1), of_right, dtype, **options)

    monkeypatch.setattr(fp8, "product", wrong)
    found = run_script(
        "gpu_quantised", "--tokens", "32", "--narrow", "64", "--rounds", "1", "--shape", "1b"
    )
    assert found["complete"] and not found["all_right"]
