"""The line that is said every few seconds."""

import io
from types import SimpleNamespace

import pytest

from tlora.runtime.progress import MANY_JOBS, ProgressLines
from tlora.training.driver import Status
from tlora.training.outcome import Outcome


def job(name: str, step: int, status: Status = Status.RUNNING, loss: float | None = 1.5):
    return SimpleNamespace(name=name, step=step, total_steps=10, status=status, loss=loss)


WAITING = job("late", 0, Status.WAITING, None)


@pytest.mark.parametrize(
    ("drivers", "rest"),
    [
        ([job("a", 3)], "a 3/10 loss 1.500"),
        ([job("a", 3), job("b", 0, loss=None)], "a 3/10 loss 1.500 | b 0/10"),
        ([job("a", 3), WAITING, WAITING], "a 3/10 loss 1.500 | 2 waiting"),
        # Its steps are done, and its adapter is on the way to the disk.
        ([job("a", 10), WAITING], "1 waiting"),
        ([job("a", 10)], None),
        (
            [job(str(i), 1, loss=None) for i in range(8)] + [WAITING],
            " | ".join(f"{i} 1/10" for i in range(6)) + " (+2 more) | 1 waiting",
        ),
        (
            [job(str(i), 1) for i in range(MANY_JOBS)],
            f"{MANY_JOBS} of {MANY_JOBS} jobs running, step {MANY_JOBS}/{10 * MANY_JOBS}, "
            "median loss 1.500",
        ),
    ],
)
def test_a_line_has_what_there_is_to_say(drivers, rest: str | None) -> None:
    out = io.StringIO()
    lines = ProgressLines(out, every_seconds=0.0)
    lines.start(drivers, 64)
    lines.on_nano_batch(Outcome(tokens={"a": 40}))
    said = out.getvalue().splitlines()[-1]
    head, bar, more = said.partition(" | ")
    assert head.startswith("[") and head.endswith("tokens/s")
    assert (bar, more) == (("", "") if rest is None else (" | ", rest))
