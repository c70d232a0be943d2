"""A profile on a CUDA device: memory is measured there, and times are steady enough to check."""

import pytest
import torch

from tlora.costs import JobLoad, predict, read_profile
from tlora.runtime.profiling.__main__ import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def test_a_profile_of_the_demo_base_knows_its_memory(tmp_path) -> None:
    """The line through the peaks bounds every one of them, and grows with the rows."""
    file = tmp_path / "p.json"
    args = ["--shape", "demo", "--device", "cuda", "--tokens", "2048", "--seconds", "60"]
    assert main([*args, "--output", str(file)]) == 0
    profile = read_profile(file)
    memory = profile.memory
    assert memory.row_bytes and memory.device_bytes and memory.outside_bytes is not None
    assert memory.fixed_bytes is not None and memory.reserve_bytes is not None
    for point in profile.points:
        assert point.peak_bytes is not None
        bound = memory.fixed_bytes + memory.row_bytes * point.batch.rows + memory.reserve_bytes
        assert point.peak_bytes <= bound * (1 + 1e-9)
    group = predict(profile, [JobLoad(rank=8, batch_size=4, lengths=(100,))] * 4)
    assert group.fits is True and group.memory_bytes and group.memory_bytes > memory.weights_bytes
    assert profile.heldout_error_pct < 30
