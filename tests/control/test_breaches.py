"""A job beyond its bound is told of, in a simulation as in a real run."""

from support.scheduling import costs_of, request

from tlora.control.breaches import FEWEST_STEPS, NOISE, WINDOW_S
from tlora.core.clock import ManualClock
from tlora.core.cluster import Tier, uniform_cluster
from tlora.core.decision import Reasons, Start
from tlora.core.event import Arrival, Event, SlowdownBreach
from tlora.core.plan import Plan
from tlora.runtime.executors.rates import RateWatch, Running
from tlora.simulation.executor import SimulatedExecutor

CLUSTER = uniform_cluster(1)
JOBS = (request("a", steps=10**6), request("b", batch=2, steps=10**6))
PLAN = Plan(bucket=1024)
WEIGHTS = (0.2, 1.0)
FOUND = costs_of(CLUSTER).predict(JOBS, WEIGHTS, PLAN, Tier.GPU)


def due(slowdown: float) -> dict[str, float]:
    """With which the first job's slowdown is so much."""
    solo = costs_of(CLUSTER).figures(JOBS[0]).solo_step_s
    fair = slowdown * solo * FOUND.steps_per_s[0]
    assert fair < 1, "nobody is due more than it brings"
    return {"a": fair, "b": 0.0}


class Simulated:
    def __init__(self, fair: dict[str, float]) -> None:
        self.fair = fair
        self.clock = ManualClock()
        self.executor = SimulatedExecutor(
            clock=self.clock,
            costs=costs_of(CLUSTER),
            arrivals=JOBS,
            fair_gpus=lambda: self.fair,
        )
        assert all(isinstance(event, Arrival) for event in self.executor.wait(0.0))
        self.executor.apply(
            Start(
                group="g0",
                base="llama",
                jobs=("a", "b"),
                gpus=(0,),
                plan=PLAN,
                weights=WEIGHTS,
                reasons=Reasons(why="a test"),
            )
        )
        self.starts = costs_of(CLUSTER).start_s("llama")

    def until(self, time: float) -> list[Event]:
        """All that happens until then."""
        found: list[Event] = []
        while events := self.executor.wait(time):
            found += events
        return found


def test_a_simulation_tells_when_the_first_window_is_over_and_once() -> None:
    """Not before a real run could have seen it."""
    world = Simulated(due(2.5))
    seen = world.starts + max(WINDOW_S, FEWEST_STEPS / sum(FOUND.steps_per_s))
    assert world.until(seen - 0.1) == []
    assert world.until(seen + 1000) == [SlowdownBreach(seen, "a", 2.5)]


def test_dues_that_rise_later_are_seen_at_the_end_of_a_window() -> None:
    """Though nothing else happens."""
    world = Simulated(due(1.0))
    assert world.until(500.0) == []
    world.fair = due(2.5)
    (event,) = world.until(1000.0)
    assert isinstance(event, SlowdownBreach) and 500 <= event.time <= 500 + WINDOW_S


def test_both_worlds_draw_the_line_at_the_same_slowdown() -> None:
    """Just above the bound and the noise it is told of, just below it is not."""
    line = NOISE * JOBS[0].slowdown_bound
    for slowdown, is_told in ((line * 0.99, False), (line * 1.01, True)):
        watch = RateWatch(costs_of(CLUSTER), fair_gpus=lambda slowdown=slowdown: due(slowdown))
        watch.check(0.0, {0: Running(JOBS, WEIGHTS, PLAN.bucket, (0.0, 0.0))})
        made = tuple(100 * rate for rate in FOUND.steps_per_s)
        seen = watch.check(100.0, {0: Running(JOBS, WEIGHTS, PLAN.bucket, made)})
        simulated = Simulated(due(slowdown)).until(1000.0)
        told = [[(event.job, event.slowdown) for event in each] for each in (seen, simulated)]  # type: ignore[union-attr]
        assert told[0] == told[1] and bool(told[0]) == is_told
