"""Fixtures for all tests."""

import os
from pathlib import Path

import pytest

# Before torch is imported, here and in every process a test starts: the models are so small that a
# second thread costs more than it brings, and many times more on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with real models and datasets."""
    folder = os.environ.get("TLORA_TEST_DATA")
    if not folder:
        pytest.skip("TLORA_TEST_DATA is not set: it names the folder with real models and datasets")
    return Path(folder)
