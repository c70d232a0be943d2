"""The plan between tasks that can have more or fewer devices."""

from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlora.schedule import tasks as planner
from tlora.schedule.tasks import (
    TaskWork,
    balanced,
    dealt,
    dealt_fixed,
    lanes,
    longest_part,
    plan_tasks,
    seconds_on,
)

works_drawn = st.lists(
    st.lists(st.integers(1, 40).map(float), min_size=1, max_size=5), min_size=1, max_size=4
)


def made(drawn: list[list[float]]) -> list[TaskWork]:
    return [TaskWork(f"t{at}", (tuple(each),)) for at, each in enumerate(drawn)]


def overlaps(plan: planner.TaskPlan, devices: int) -> bool:
    """More devices at once than there are."""
    return any(
        sum(each.devices for each in plan.spans if each.start <= at < each.start + each.seconds)
        > devices
        for at in (span.start + 1e-9 for span in plan.spans)
    )


def least(works: list[TaskWork], devices: int) -> float:
    """Of all numbers of devices and all orders, each task as early as it fits."""
    found = float("inf")
    for ways in product(range(1, devices + 1), repeat=len(works)):
        for order in permutations(range(len(works))):
            spans: list[tuple[float, float, int]] = []
            for i in order:
                length = seconds_on(works[i], ways[i])
                for at in sorted({0.0, *(end for _, end, _ in spans)}):
                    times = [at, *(b for b, _, _ in spans if at < b < at + length)]
                    used = max(sum(g for b, e, g in spans if b <= now < e) for now in times)
                    if used + ways[i] <= devices:
                        spans.append((at, at + length, ways[i]))
                        break
            found = min(found, max(end for _, end, _ in spans))
    return found


def test_a_task_is_dealt_longest_first_and_waits_between_its_phases():
    """By hand: 5+3 and 4+4 in the warm-up, then 6 beside 2."""
    assert longest_part([3, 4, 4, 5], 2) == 8
    work = TaskWork("t", ((3.0, 4.0, 4.0, 5.0), (2.0, 6.0)))
    assert [seconds_on(work, devices) for devices in (1, 2, 4)] == [24, 14, 11]


@settings(max_examples=25, deadline=None)
@given(works_drawn, st.integers(2, 3))
def test_plans_fit_and_none_is_sooner(drawn, devices):
    """Against all numbers of devices and orders of up to three tasks; never later than one task
    after another. A plan that runs all at once on every device is refused."""
    works = made(drawn[:3])
    found = plan_tasks(works, devices)
    assert not overlaps(found, devices)
    assert found.makespan <= found.one_after_another + 1e-9
    if found.optimal:
        # The solver counts in thousandths of the longest.
        assert found.makespan <= least(works, devices) * 1.001 + 0.1 * len(works)
    wrong = planner.TaskPlan(
        tuple(planner.Span(work.name, 0.0, 1.0, devices) for work in works),
        1.0,
        1.0,
        "greedy",
        False,
    )
    assert overlaps(wrong, devices) == (len(works) > 1)


def test_it_is_sooner_than_one_after_another_where_trials_are_not_to_be_cut():
    """Two tasks of one long trial each: side by side they take half."""
    found = plan_tasks(made([[10.0], [10.0]]), 2)
    assert (found.makespan, found.one_after_another) == (pytest.approx(10), pytest.approx(20))


def test_without_the_solver_or_time_for_it_the_greedy_plan_stands(monkeypatch):
    """And the same tasks always give the same plan."""
    works = made([[9.0, 8.0, 1.0], [7.0, 7.0], [5.0, 4.0, 4.0, 3.0], [2.0]])
    best = plan_tasks(works, 3)
    assert plan_tasks(works, 3) == best
    starved = plan_tasks(works, 3, limit=1e-9)
    assert not overlaps(starved, 3) and starved == plan_tasks(works, 3, limit=1e-9)
    monkeypatch.setattr(planner.importlib.util, "find_spec", lambda name: None)
    greedy = plan_tasks(works, 3)
    assert greedy.solver == "greedy" and not overlaps(greedy, 3)
    assert best.makespan <= greedy.makespan <= 1.5 * best.makespan


def test_what_runs_stays_and_idle_devices_are_used():
    """A task keeps the device that its trials are on; the other one goes to whoever waits, and to
    nobody who has no trial for it."""
    works = [TaskWork("a", ((5.0,),), devices=1), TaskWork("b", ((4.0, 4.0),))]
    plan = plan_tasks(works, 2)
    assert next(span for span in plan.spans if span.name == "a").start == 0
    assert dealt(plan, works, {0: "a", 1: None}) == {0: "a", 1: "b"}
    alone = [TaskWork("a", ((5.0,),), devices=1)]
    assert dealt(plan_tasks(alone, 2), alone, {0: None, 1: "a"}) == {1: "a"}
    grows = [TaskWork("a", ((5.0, 5.0, 5.0),), devices=1)]
    assert dealt(plan_tasks(grows, 2), grows, {0: None, 1: "a"}) == {0: "a", 1: "a"}
    assert dealt_fixed({0: None, 1: "b"}, {"a": 0, "b": 1, "c": 0}) == {0: "a", 1: "b"}


def test_the_devices_that_are_said_are_free_then():
    """No device has two tasks at a time, in the plan that a person reads."""
    plan = plan_tasks(made([[9.0, 8.0], [7.0, 7.0, 2.0], [5.0], [3.0, 3.0]]), 3)
    where, spans = lanes(plan, 3), {span.name: span for span in plan.spans}
    for one, other in permutations(spans, 2):
        a, b = spans[one], spans[other]
        if a.start < b.start + b.seconds - 1e-6 and b.start < a.start + a.seconds - 1e-6:
            assert not set(where[one]) & set(where[other])
    assert all(len(where[name]) == span.devices for name, span in spans.items())


def test_trials_move_only_to_a_device_that_idles():
    """Half of what is there, and not for the last of a second."""
    loads = {0: {"x": 4.0, "y": 3.0, "z": 2.0}, 1: {}}
    moves = balanced(loads)
    assert moves == [("y", 1), ("z", 1)]
    assert balanced({0: {"x": 4.0}, 1: {}}) == []
    assert balanced({0: {"x": 4.0, "y": 3.0}, 1: {"z": 0.1}}) == []
    assert balanced({0: {"x": 0.2, "y": 0.2}, 1: {}}, worth_s=0.5) == []
