"""How many threads torch has on a CPU, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def using_threads(count: int | None) -> Iterator[None]:
    """So many, or as many as there are for None; afterwards as before, whatever was set inside."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
