"""The script that measures memory, on a CPU and a tiny model: it says all that it should."""

import pytest


@pytest.mark.slow
def test_every_part_gives_its_figures(run_script) -> None:
    """But for running out of memory, which needs a device."""
    found = run_script(
        "gpu_memory", "--shape", "tiny", "--rows", "192", "--steps", "1", "--rounds", "1",
        "--residents", "17", "--layers", "1",
    )  # fmt: skip
    assert found["complete"]
    assert list(found["peaks"]) == ["plain", "recomputed, S kept", "recomputed, S too"]
    assert set(found["residents"]["tokens_per_s"]) == {"8", "16"}
