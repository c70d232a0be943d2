"""The planner for known tasks."""

import itertools
import os
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduling import Run, request

from tlora.core.decision import Start
from tlora.schedule.makespan import Task, longest_first, lower_bound, plan

pytest.importorskip("ortools", reason="the plan extra is not installed")


def peak(tasks: list[Task], starts: tuple[float, ...]) -> int:
    spans = [(at, at + task.seconds, task.gpus) for at, task in zip(starts, tasks, strict=True)]
    return max(sum(gpus for begin, end, gpus in spans if begin <= at < end) for at, _, _ in spans)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 100)), min_size=1, max_size=7),
    st.integers(4, 6),
)
def test_plans_fit_and_are_no_longer_than_any_list_order(
    drawn: list[tuple[int, int]], gpus: int
) -> None:
    """Against all orders of up to seven tasks; the greedy plan fits too, and both respect the
    bound that nothing can beat."""
    tasks = [Task(f"t{i}", need, float(length)) for i, (need, length) in enumerate(drawn)]
    found = plan(tasks, gpus)
    greedy = longest_first(tasks, gpus)
    for each in (found, greedy):
        assert peak(tasks, each.starts) <= gpus
        assert each.makespan >= lower_bound(tasks, gpus) - 1e-9
    assert found.makespan <= greedy.makespan + 1e-9
    if len(tasks) <= 5 and found.optimal:
        best = min(_in_order(order, gpus) for order in itertools.permutations(tasks))
        # The solver counts in thousandths of the longest task.
        assert found.makespan <= best * 1.001 + 0.2


def _in_order(tasks: tuple[Task, ...], gpus: int) -> float:
    """Each as early as it fits, in this order."""
    spans: list[tuple[float, float, int]] = []
    for task in tasks:
        for at in sorted({0.0, *(end for _, end, _ in spans)}):
            inside = [at, *(begin for begin, _, _ in spans if at < begin < at + task.seconds)]
            used = max(sum(g for b, e, g in spans if b <= now < e) for now in inside)
            if used + task.gpus <= gpus:
                spans.append((at, at + task.seconds, task.gpus))
                break
    return max(end for _, end, _ in spans)


def test_it_beats_the_greedy_plan_where_that_is_not_the_best() -> None:
    """A case made for it: longest first takes 14 where 12 are enough."""
    tasks = [Task(f"t{i}", 1, float(seconds)) for i, seconds in enumerate([7, 6, 5, 4, 2])]
    tasks = [Task("a", 1, 5.0), Task("b", 1, 5.0), *(Task(f"c{i}", 1, 4.0) for i in range(3))]
    assert longest_first(tasks, 2).makespan == pytest.approx(13.0)
    found = plan(tasks, 2)
    assert found.solver == "cp-sat"
    assert found.makespan == pytest.approx(12.0)
    assert found.optimal


def test_without_room_to_search_the_greedy_plan_stands_and_always_alike() -> None:
    """A limit of no work; and the same tasks give the same plan."""
    tasks = [Task(f"t{i}", 1 + i % 3, 10.0 + 7 * i % 50) for i in range(30)]
    starved = plan(tasks, 4, limit=1e-9)
    assert starved.makespan <= longest_first(tasks, 4).makespan
    assert plan(tasks, 4, limit=0.05) == plan(tasks, 4, limit=0.05)


def test_nothing_is_solved_where_nobody_can_start_or_all_can(monkeypatch) -> None:
    """And the decisions are those of a plan that was solved: a cluster that is full when jobs
    arrive, and one with room for all of them."""
    jobs = [request(f"j{i}", steps=1000 * (1 + i % 3), at=10.0 * i) for i in range(7)]
    solved: list[int] = []
    # The module needs the extra.
    from tlora.schedule.cp_sat import solved_starts

    def told(seconds, *rest, **options):
        solved.append(len(seconds))
        return solved_starts(seconds, *rest, **options)

    monkeypatch.setattr("tlora.schedule.cp_sat.solved_starts", told)
    run = Run("makespan", jobs, gpus=3).to_the_end()
    # Four arrive when three run, and three of the four ends leave more than one to choose from.
    assert len(solved) == 3
    planned = [
        decision.reasons.why
        for turn in run.store.turns()
        for decision in turn.decisions
        if turn.time < 50
    ]
    assert len(planned) == 3 and all("the least possible" in why for why in planned)


def test_what_runs_stays_and_ends_that_come_early_are_used() -> None:
    """As a policy: planned again when a job exits at a tenth of its steps."""
    jobs = [request(f"j{i}", steps=1000 * (i + 1), gpus=1) for i in range(6)]
    calm = Run("makespan", jobs, gpus=2).to_the_end()
    early = Run("makespan", jobs, gpus=2, exits={"j5": (600.0, "patience")}).to_the_end()
    assert max(early.ended_at().values()) < max(calm.ended_at().values())
    assert set(early.state.outcomes.values()) == {"completed", "exited"}
    moved = [d for turn in early.store.turns() for d in turn.decisions if d.kind != "start"]
    assert moved == []


def test_who_comes_in_for_a_job_that_is_refused_starts_at_once() -> None:
    """Beyond the limit until then, so no event tells of it."""
    jobs = [request("wide", gpus=4, batch=4), request("a"), request("b", at=2000.0)]
    run = Run("makespan", jobs, gpus=1, max_runnable=1).to_the_end()
    assert run.state.outcomes == {"wide": "refused", "a": "completed", "b": "completed"}
    starts = [
        turn.time for turn in run.store.turns() for d in turn.decisions if isinstance(d, Start)
    ]
    assert starts[0] == 0.0


def test_ctrl_c_is_left_to_whoever_asked_for_a_plan() -> None:
    """The solver's own handler would leave the default one behind, and the next Ctrl-C would end
    the process at once."""
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        assert plan([Task("a", 1, 3.0), Task("b", 1, 2.0)], 1).makespan == 5.0
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]
