"""How many threads torch has on a CPU, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tlora.runtime.environment import threads_are_chosen, usable_cores
from tlora.runtime.quota import cpu_quota


def set_threads(count: int | None) -> None:
    """So many. For None as many as there are, but in a container that may not use all cores at once
    no more than it may, unless a person has said how many."""
    if count is None:
        if threads_are_chosen() or cpu_quota() is None:
            return
        count = min(torch.get_num_threads(), usable_cores())
    torch.set_num_threads(count)


@contextmanager
def using_threads(count: int | None) -> Iterator[None]:
    """The same for a while; afterwards as before, whatever was set inside."""
    before = torch.get_num_threads()
    set_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
