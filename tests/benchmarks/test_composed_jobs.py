"""What is counted about nano-batches of many jobs."""

from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install '.[test]'")


@pytest.fixture
def module(load_script) -> ModuleType:
    return load_script("composed_jobs")


def test_jobs_whose_batches_fit_all_begin_in_every_nano_batch(module: ModuleType) -> None:
    found = module.counted([100], (1,), jobs=8, budget=1024)
    assert found["jobs_mean"] == found["jobs_most"] == 8
    assert (found["with_many"], found["going_on_most"]) == (module.COUNT, 0)


def test_jobs_whose_batches_are_cut_go_on(module: ModuleType) -> None:
    """Eight turns of an eighth: two of 64 tokens of eight in a nano-batch of 1,024 tokens."""
    found = module.counted([64], (8,), jobs=8, budget=1024)
    assert found["jobs_most"] == 8
    assert found["going_on_most"] == 8


def test_lengths_that_do_not_fit_are_left_out(module: ModuleType, tmp_path) -> None:
    path = tmp_path / "lengths.npz"
    np.savez(path, short=np.array([1, 20, 30]), long=np.array([9000]), both=np.array([50, 9000]))
    assert module.read_all(str(path), 8192) == {"short": [20, 30], "both": [50]}


def test_jobs_of_a_block_are_counted(module: ModuleType) -> None:
    """Blocks of 128 tokens: the second job ends in the second block, the third begins there."""
    assert module.jobs_in_blocks([100, 100, 300]) == [2, 2, 1, 1]
    assert module.jobs_in_blocks([128, 128]) == [1, 1]
