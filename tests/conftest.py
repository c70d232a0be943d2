"""Fixtures for all tests."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with real models and datasets."""
    folder = os.environ.get("TLORA_TEST_DATA")
    if not folder:
        pytest.skip("TLORA_TEST_DATA is not set: it names the folder with real models and datasets")
    return Path(folder)
