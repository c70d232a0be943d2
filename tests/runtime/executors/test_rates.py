"""Who is slower than expected: devices against each other, jobs against their due."""

from support.scheduling import costs_of, request

from tlora.core.cluster import Tier, uniform_cluster
from tlora.core.event import SlowdownBreach, Straggler
from tlora.core.plan import Plan
from tlora.runtime.executors.rates import RateWatch, Running

CLUSTER = uniform_cluster(2)
JOBS = {0: (request("a"), request("b", batch=2)), 1: (request("c"), request("d", rank=16))}
BUCKET = 4096


class World:
    """Two devices that run at some part of what the costs predict."""

    def __init__(self, **due: float) -> None:
        self.costs = costs_of(CLUSTER)
        self.watch = RateWatch(self.costs, fair_gpus=lambda: due)
        self.steps = {device: [0.0, 0.0] for device in JOBS}
        self.now = 0.0
        self.watch.check(self.now, self.running())

    def running(self) -> dict[int, Running]:
        return {
            device: Running(jobs, (1.0, 1.0), BUCKET, tuple(self.steps[device]))
            for device, jobs in JOBS.items()
        }

    def after(self, seconds: float, *speeds: float) -> list:
        for (device, jobs), speed in zip(JOBS.items(), speeds, strict=True):
            found = self.costs.predict(jobs, (1.0, 1.0), Plan(bucket=BUCKET), Tier.GPU)
            for place, rate in enumerate(found.steps_per_s):
                self.steps[device][place] += rate * speed * seconds
        self.now += seconds
        return self.watch.check(self.now, self.running())


def test_a_device_is_slow_against_its_neighbour_not_against_the_profile() -> None:
    """A profile that is off everywhere alike says nothing; one device at half speed is told of
    once, and once more when it is well again."""
    world = World()
    assert world.after(40.0, 0.2, 0.2) == []
    assert world.after(40.0, 0.2, 0.15) == []
    assert world.after(10.0, 0.2, 0.1) == [], "too short to tell"
    assert world.after(30.0, 0.2, 0.1) == [Straggler(world.now, 1, 0.5)]
    assert world.after(40.0, 0.2, 0.1) == []
    assert world.after(40.0, 0.2, 0.2) == [Straggler(world.now, 1, 1.0)]


def test_a_job_far_below_its_due_is_told_of_once() -> None:
    """Beyond its bound and the noise; one just beyond its bound is not."""
    costs = costs_of(CLUSTER)
    found = costs.predict(JOBS[0], (1.0, 1.0), Plan(bucket=BUCKET), Tier.GPU)
    fair = 1.0 / costs.figures(JOBS[0][0]).solo_step_s
    alone = fair / found.steps_per_s[0]
    world = World(a=1.6 / alone)
    assert world.after(40.0, 1.0, 1.0) == []
    world = World(a=2.5 / alone)
    assert world.after(40.0, 1.0, 1.0) == [SlowdownBreach(world.now, "a", 2.5)]
    assert world.after(40.0, 1.0, 1.0) == []


def test_a_change_of_company_begins_anew() -> None:
    """Steps made before it do not count."""
    world = World()
    world.after(29.0, 1.0, 0.1)
    jobs = {**world.running(), 1: Running(JOBS[1][:1], (1.0,), BUCKET, (5.0,))}
    assert world.watch.check(world.now + 5.0, jobs) == []
