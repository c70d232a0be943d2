"""The steps that are due: in one call where a device takes all jobs at once, and each by itself
where that call breaks, so that whoever broke it fails alone."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tlora.core.errors import JobFailed
from tlora.model.memory import is_out_of_memory
from tlora.training import optimiser
from tlora.training.in_flight import to_host
from tlora.training.optimiser import DueStep, PooledRows

JOB_ERRORS = (RuntimeError, OverflowError, ValueError, OSError)
"""What one job may bring about: a row that can no longer be read, a rate beyond what float32 holds,
no room for its lists."""


@dataclass(frozen=True, slots=True, eq=False)
class Stepped:
    """Jobs whose step is under way."""

    together: list[DueStep]
    norms: torch.Tensor
    """float32 [jobs]; they reach the host later."""


def take_steps(
    rows: PooledRows, due: list[DueStep], *, make_room: Callable[[], object]
) -> Iterator[Stepped | JobFailed]:
    """One after the other, as the caller asks for them. A step that fails has touched no weight.
    `make_room` is asked once where memory is short."""
    calls = deque(rows.in_calls(due))
    while calls:
        together = calls.popleft()
        try:
            norms = _step(rows, together, make_room)
        except JOB_ERRORS as error:
            if len(together) > 1:
                # Whose fault it is shows when each steps by itself.
                calls.extend([each] for each in together)
            else:
                yield JobFailed(f"step {together[0].number}: {error}", job=together[0].job)
        else:
            yield Stepped(together, norms)


def _step(
    rows: PooledRows, together: list[DueStep], make_room: Callable[[], object]
) -> torch.Tensor:
    try:
        return to_host(optimiser.step_jobs(rows, together))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    make_room()
    return to_host(optimiser.step_jobs(rows, together))
