"""A pool is made for the trials that are attached together, not for all that there are."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny import spec

from tlora.runtime.sweeps.room import at_once, worker_rows
from tlora.runtime.sweeps.trials import MadeTrial
from tlora.tuning.events import TrialPlan


def trials(*ranks: int, task: str = "t") -> dict[str, MadeTrial]:
    found: dict[str, MadeTrial] = {}
    for number, rank in enumerate(ranks):
        name = f"{task}-{number}"
        plan = TrialPlan(
            name=name,
            params={},
            total_steps=1,
            total_tokens=1,
            batch_size=1,
            adapter_bytes=10.0 * rank,
        )
        data: Any = None
        found[name] = MadeTrial(spec(name, lora={"r": rank}), data, plan)
    return found


def sweep(most: int | None = None) -> Any:
    return SimpleNamespace(search=SimpleNamespace(max_parallel=most))


@pytest.mark.parametrize(
    ("room", "most", "devices", "ranks"),
    [
        (None, None, 1, [9, 8, 4, 2, 1]),
        (None, 2, 1, [9, 8]),
        (200.0, None, 1, [9, 8]),
        (50.0, None, 1, [9]),
        (None, None, 2, [9, 8, 4]),
        (None, 2, 2, [9, 8]),
        (None, None, 9, [9]),
    ],
)
def test_the_largest_that_may_be_together(
    room: float | None, most: int | None, devices: int, ranks: list[int]
) -> None:
    """By memory, by number, by devices; one trial at least."""
    found = at_once(trials(2, 9, 1, 4, 8), room, sweep(most), devices=devices)
    assert [job.lora.r for job in found] == ranks


def test_a_worker_has_rows_for_its_part_of_one_task() -> None:
    """Of several tasks one may be on one device as a whole: there is room for the largest."""
    one, two = trials(8, 8, 8, 8, task="one"), trials(2, 2, task="two")
    assert worker_rows({"one": one}, None, {"one": sweep()}, devices=2) == 16
    both = {"one": one, "two": two}
    assert worker_rows(both, None, {"one": sweep(), "two": sweep()}, devices=2) == 32
    assert worker_rows(both, None, {"one": sweep(1), "two": sweep()}, devices=2) == 8
