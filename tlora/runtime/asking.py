"""Asking a run for something from another process, through its store, and waiting for the answer.
No torch."""

import fcntl
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from tlora.core.errors import SpecError
from tlora.store.requests import Requests

POLL_S = 0.1
REFUSED = "error: "
"""So begins the answer to what cannot be done."""


class Asked(NamedTuple):
    number: int
    """Of the request."""

    answer: str | None
    """None if there was none by then, or nobody is at work to give it."""


def put_and_wait(
    requests: Requests, root: Path, kind: str, job: str, body: dict[str, Any], *, patience_s: float
) -> Asked:
    """Raises SpecError for what cannot be done."""
    number = requests.request(kind, job, body)
    end = time.monotonic() + patience_s
    while is_at_work(root) and time.monotonic() < end:
        if requests.answer_to(number) is not None:
            break
        time.sleep(POLL_S)
    # Whoever was at work may have answered with its last breath.
    return Asked(number, read_answer(requests, number))


def read_answer(requests: Requests, number: int) -> str | None:
    """Raises SpecError for what cannot be done."""
    answer = requests.answer_to(number)
    if answer is not None and answer.startswith(REFUSED):
        raise SpecError(answer.removeprefix(REFUSED))
    return answer


def is_at_work(root: Path) -> bool:
    """A process holds the directory."""
    handle = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
