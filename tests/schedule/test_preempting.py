"""How long a job waits before others make way for it, and when that is looked at."""

from support.costs import new_profile
from support.scheduling import Run, costs_of, request

from tlora.core.cluster import uniform_cluster
from tlora.core.event import Arrival
from tlora.core.state import State
from tlora.costs.groups import Costs
from tlora.schedule import Settings
from tlora.schedule.preempting import LEAST_PATIENCE_S, next_patience_end, patience_s

SETTINGS = Settings()


def waiting(*steps: int) -> tuple[State, Costs]:
    jobs = [request(f"j{i}", steps=count) for i, count in enumerate(steps)]
    state = State(uniform_cluster(1))
    for job in jobs:
        state.happen(Arrival(0.0, job))
    return state, Costs({job.base: new_profile() for job in jobs}, state.cluster)


def patience(steps: int) -> float:
    state, costs = waiting(steps)
    job = state.jobs["j0"]
    return patience_s(job, costs.figures(job.request), SETTINGS)


def test_a_job_waits_half_of_its_own_time_within_limits() -> None:
    state, costs = waiting(1)
    step_s = costs.figures(state.jobs["j0"].request).solo_step_s
    middle = round(200 / step_s)
    assert patience(1) == LEAST_PATIENCE_S
    assert abs(patience(middle) - 0.5 * middle * step_s) < 1e-6
    assert patience(round(1e5 / step_s)) == SETTINGS.patience_s


def test_the_next_look_is_when_the_first_has_waited_enough_and_always_later() -> None:
    """Half as long again if it found nobody; a look that is not after now would never end."""
    state, costs = waiting(1, 10**9)
    assert next_patience_end(state, costs, SETTINGS) == LEAST_PATIENCE_S
    state.advance(LEAST_PATIENCE_S, {}, {})
    assert next_patience_end(state, costs, SETTINGS) == 1.5 * LEAST_PATIENCE_S
    for _ in range(200):
        end = next_patience_end(state, costs, SETTINGS)
        assert end > state.now
        state.advance(end, {}, {})


def test_a_wait_makes_a_short_job_urgent_by_its_own_time() -> None:
    """A long job has the only GPU, which it got no more of than its due, and nobody may join it.
    The short one's wait is next to nothing against five minutes, and long against its own time."""
    long = request("long", steps=10**6, slowdown_bound=1.0)
    short = request("short", base="qwen", steps=50, at=1000.0, slowdown_bound=1.0)
    run = Run("tlora", [long, short], gpus=1)
    while "short" not in run.state.outcomes:
        run.loop.step()
    costs = costs_of(run.cluster)
    alone_s = costs.start_s("qwen") + 50 * costs.figures(short).solo_step_s
    waited_s = run.ended_at()["short"] - 1000.0 - alone_s
    assert waited_s < 1.2 * LEAST_PATIENCE_S


def test_nobody_waits_no_look() -> None:
    state, costs = waiting()
    assert next_patience_end(state, costs, SETTINGS) == float("inf")
