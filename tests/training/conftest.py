"""Settings of the tests that train."""

from collections.abc import Iterator

import pytest
import torch
from support.tiny import tiny_engine

from tlora.training.engine import Engine


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from a second thread, and two threads that wait for each
    other on a busy machine took up to a hundred times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def engine() -> Engine:
    return tiny_engine()
