"""What all tests of models share."""

from collections.abc import Iterator

import pytest
from support.runs import quiet_single_thread


@pytest.fixture(scope="package", autouse=True)
def single_thread() -> Iterator[None]:
    yield from quiet_single_thread()
