"""At most so many jobs are runnable: who is, and who gives its turn."""

import pytest
from support.scheduling import Run, request

from tlora.control.replay import replay
from tlora.core.decision import Pause
from tlora.core.request import JobRequest
from tlora.core.state import State
from tlora.schedule import make_policy


def jobs() -> list[JobRequest]:
    """Long ones fill the limit, then short ones come."""
    found = [request(f"long{n}", steps=20_000, at=float(n)) for n in range(4)]
    found += [request(f"short{n}", steps=100, at=1000.0 + 50 * n) for n in range(3)]
    return found


def run(policy: str, limit: int | None) -> Run:
    return Run(policy, jobs(), gpus=2, max_runnable=limit)


def test_a_short_job_beyond_the_limit_takes_the_turn_of_a_long_one() -> None:
    """It would wait for hours else, as it does where jobs come in in order of arrival."""
    ours, fifo = run("tlora", 2).to_the_end(), run("solo", 2).to_the_end()
    for n in range(3):
        came = 1000.0 + 50 * n
        assert ours.ended_at()[f"short{n}"] - came < 600
        assert fifo.ended_at()[f"short{n}"] - came > 1500
    paused = [
        decision
        for turn in ours.store.turns()
        for decision in turn.decisions
        if isinstance(decision, Pause)
    ]
    assert paused and all(each.job.startswith("long") for each in paused)
    assert "may run" in str(paused[0])


def test_a_short_job_is_not_behind_long_ones_that_nobody_can_help() -> None:
    """Jobs of five sizes wait too long, and none that runs has twice as much to do. Nothing happens
    after the short one came, but its relative wait soon is the longest."""
    found = [request(f"running{n}", steps=10**6, at=float(n)) for n in range(2)]
    found += [request(f"longer{n}", steps=10**6 << n, at=10.0 + n) for n in range(1, 6)]
    run_ = Run("tlora", [*found, request("short", steps=100, at=20_000.0)], gpus=2, max_runnable=2)
    while run_.state.now < 20_500:
        run_.loop.step()
    assert {"longer1", "longer5"} <= run_.state.jobs.keys(), "they still wait"
    assert run_.ended_at()["short"] < 20_300


def test_a_job_that_is_alone_gives_its_turn_where_those_with_more_to_do_free_no_gpu() -> None:
    """The three with most to do share a GPU, of whose base the short job is not; the fourth is due
    a whole GPU, and nobody may join it."""
    found = [request(f"sharing{n}", steps=10**6, at=float(n), slowdown_bound=4.0) for n in range(3)]
    found.append(request("alone", steps=10**5, at=3.0, slowdown_bound=1.0, priority=100.0))
    short = request("short", base="qwen", steps=100, at=1000.0)
    run_ = Run("tlora", [*found, short], gpus=2, max_runnable=4)
    while run_.state.now < 1000 or not run_.state.jobs.keys() >= {"short"}:
        run_.loop.step()
    assert sorted(len(group.jobs) for group in run_.state.groups.values()) == [1, 3]
    while run_.state.now < 1300:
        run_.loop.step()
    assert run_.ended_at()["short"] < 1100
    paused = [
        decision.job
        for turn in run_.store.turns()
        for decision in turn.decisions
        if isinstance(decision, Pause)
    ]
    assert paused == ["alone"]


@pytest.mark.parametrize("policy", ["tlora", "tlora-no-kernel", "srtf", "solo", "fifo-memory"])
def test_never_more_than_the_limit_run(policy) -> None:
    """At any time, whoever waits too long; and every job ends."""
    run_ = run(policy, 3)
    most = 0
    while run_.state.jobs or not run_.executor.idle:
        run_.loop.step()
        run_.state.check()
        running = sum(len(group.jobs) for group in run_.state.groups.values())
        assert running <= 3 and len(run_.state.runnable()) <= 3
        most = max(most, running)
    assert most >= 2 and len(run_.ended_at()) == 7
    unlimited = run(policy, None)
    while len(unlimited.state.jobs) < 5:
        unlimited.loop.step()
    assert len(unlimited.state.runnable()) == 5, "without a limit all count"


def test_a_replay_lets_the_same_jobs_in() -> None:
    """The line follows from the recorded turns; with another limit decisions differ."""
    recorded = run("tlora", 2).to_the_end()
    turns = list(recorded.store.turns())

    def again(limit: int) -> object:
        policy = make_policy("tlora", recorded.costs)
        return replay(turns, state=State(recorded.cluster, max_runnable=limit), policy=policy)

    assert again(2) is None
    assert again(3) is not None
