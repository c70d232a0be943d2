"""Fixtures for the tests of the arithmetic."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.interpreter import KERNELS_RUN, SEED


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without a GPU test_in_the_interpreter.py runs these files. One that is named on the command
    line is collected all the same."""
    return True if collection_path.match("test_triton*.py") and not KERNELS_RUN else None


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The matrices here are tiny: waiting for a second thread takes longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def inputs_of_this_run() -> None:
    """What is drawn without a generator of its own."""
    torch.manual_seed(SEED)


@pytest.fixture
def new_tensors_hold_nan() -> Iterator[None]:
    """Memory that is new holds NaN, so that a forgotten write shows."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before
