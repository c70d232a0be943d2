"""Our policy, case by case."""

import math
import random
from collections.abc import Sequence

import pytest
from support.scheduling import Run, costs_of, request

from tlora.core.cluster import uniform_cluster
from tlora.core.decision import Decision, Refuse, Start
from tlora.core.event import Arrival, Completion, Event, GpuFailure, GpuRepair, Straggler, Tick
from tlora.core.request import JobRequest
from tlora.core.state import State
from tlora.costs import shipped_profiles
from tlora.costs.groups import Costs
from tlora.schedule import Settings, make_policy
from tlora.schedule.check import broken_laws
from tlora.schedule.fairness import fair_gpus
from tlora.schedule.merging import best_cut
from tlora.schedule.policy import Policy
from tlora.schedule.tlora import Tlora


def decided(gpus: int, *jobs: JobRequest, settings: Settings | None = None) -> list[Decision]:
    cluster = uniform_cluster(gpus)
    state = State(cluster)
    for job in jobs:
        state.happen(Arrival(0.0, job))
    return make_policy("tlora", costs_of(cluster), settings).decide(state, [])


def groups(decisions: list[Decision]) -> set[frozenset[str]]:
    return {frozenset(each.jobs) for each in decisions if each.kind == "start"}  # type: ignore[union-attr]


def test_where_gpus_abound_everybody_is_alone() -> None:
    """Nothing is gained by sharing."""
    found = decided(4, *(request(f"j{i}") for i in range(3)))
    assert groups(found) == {frozenset({f"j{i}"}) for i in range(3)}


def test_a_group_starts_with_the_figures_of_all_its_jobs() -> None:
    """Its reasons are those of the group as it starts, not of the first job alone on the GPU: worth
    and the largest slowdown by the plain prediction, with bounds that differ."""
    cluster = uniform_cluster(2)
    state, costs = State(cluster), costs_of(cluster)
    jobs = [request(f"j{i}", batch=1 + i % 3, slowdown_bound=1.4 + 0.1 * i) for i in range(6)]
    for job in jobs:
        state.happen(Arrival(0.0, job))
    found = make_policy("tlora", costs).decide(state, [])
    assert sum(len(each.jobs) for each in found if isinstance(each, Start)) == 6
    due = fair_gpus(state)
    for start in found:
        assert isinstance(start, Start)
        members = [state.jobs[name].request for name in start.jobs]
        plain = costs.predict(members, start.weights, start.plan, cluster.tier(start.gpus))
        slowdowns = [
            due[job.name] / job.gpus / costs.figures(job).solo_step_s / rate
            for job, rate in zip(members, plain.steps_per_s, strict=True)
        ]
        pressed = max(range(len(members)), key=lambda i: slowdowns[i] / members[i].slowdown_bound)
        assert start.reasons.after == pytest.approx(plain.worth)
        assert start.reasons.slowdown == pytest.approx(slowdowns[pressed])
        assert start.reasons.before == 0


@pytest.mark.parametrize(
    ("profile", "gpus", "batch", "length"),
    [
        ("cpu-1-thread-demo", 8, 17, 953),
        ("h200-llama-1b", 7, 16, 3551),
        ("h200-llama-8b", 7, 16, 3551),
    ],
)
def test_a_job_that_may_not_be_slowed_runs_on_its_own_gpus(profile, gpus, batch, length) -> None:
    """Its batch has room on them but for whole sequences, of which the fullest has one more than
    its nano-batch holds. As it does alone it may do here, or it would wait for ever."""
    cluster = uniform_cluster(gpus)
    job = request("a", batch=batch, length=length, gpus=gpus, slowdown_bound=1.0)
    costs = Costs({"llama": shipped_profiles()[profile]}, cluster)
    state = State(cluster)
    state.happen(Arrival(0.0, job))
    (start,) = make_policy("tlora", costs).decide(state, [])
    assert isinstance(start, Start) and start.plan == costs.figures(job).solo_plan
    assert start.reasons.slowdown == pytest.approx(1.0)


def wide(name: str, priority: float = 1e6) -> JobRequest:
    """Its six sequences fill three GPUs, and on two take more than half as long again."""
    return request(name, batch=6, length=3551, gpus=3, slowdown_bound=1.0, priority=priority)


def test_a_job_waits_for_gpus_that_are_away() -> None:
    """On what is up it would be slower than it may be; when they are back it starts at once."""
    world = [GpuFailure(0.0, (0,), "lost"), GpuRepair(2000.0, (0,))]
    run = Run("tlora", [wide("a")], gpus=3, world=world).to_the_end()
    (start,) = [d for turn in run.store.turns() for d in turn.decisions]
    assert isinstance(start, Start) and len(start.gpus) == 3
    assert run.ended_at()["a"] > 2000 and run.state.outcomes == {"a": "completed"}


def test_one_that_the_whole_cluster_is_too_small_for_is_refused_by_name() -> None:
    """With the numbers; and only when nobody else is there, for beside others it is due less."""
    alone = Run("tlora", [wide("a")], gpus=2).to_the_end()
    (refused,) = [d for turn in alone.store.turns() for d in turn.decisions]
    assert isinstance(refused, Refuse) and refused.job == "a"
    assert "brings 3 GPUs, and on 2" in refused.reasons.why and "bound of 1" in refused.reasons.why
    jobs = [wide("a", priority=1.0), request("b", steps=10**4)]
    assert set(Run("tlora", jobs, gpus=2).to_the_end().state.outcomes.values()) == {"completed"}


@pytest.mark.parametrize("limit", [None, 8])
def test_many_that_can_only_wait_hold_up_nobody(limit) -> None:
    """All GPUs are slow. A turn tries few jobs that find no place, makes way for few, and looks at
    few: those that cannot run now are not among them."""
    world = [Straggler(0.0, gpu, 0.1) for gpu in range(3)]
    world += [Straggler(90_000.0, gpu, 1.0) for gpu in range(3)]
    jobs = [wide(f"w{i}") for i in range(9)]
    jobs += [request(f"j{i}", at=2000.0, slowdown_bound=4.0) for i in range(4)]
    run = Run("tlora", jobs, gpus=3, world=world, max_runnable=limit).to_the_end()
    ended = run.ended_at()
    assert max(ended[f"j{i}"] for i in range(4)) < 20_000
    assert min(ended[f"w{i}"] for i in range(9)) > 90_000


def test_where_they_do_not_small_jobs_share() -> None:
    """Four jobs on two GPUs, two and two; jobs of another base keep apart."""
    found = groups(decided(2, *(request(f"j{i}") for i in range(4))))
    assert sorted(map(len, found)) == [2, 2]
    found = groups(decided(2, request("a"), request("b"), request("c", base="qwen")))
    assert found == {frozenset("ab"), frozenset("c")}


def test_a_wide_job_gives_gpus_to_those_that_wait() -> None:
    """It arrives first and takes all four; when two others come it goes on with two."""
    jobs = [request("wide", batch=4, gpus=4, steps=10**5)]
    jobs += [request(f"j{i}", at=100.0, base="qwen", slowdown_bound=1.2) for i in range(2)]
    run = Run("tlora", jobs, gpus=4)
    while len(run.state.jobs) < 3:
        run.loop.step()
    widths = {group.base: len(group.gpus) for group in run.state.groups.values()}
    assert widths["llama"] < 4
    assert all(job.group is not None for job in run.state.jobs.values())


def test_no_group_is_wider_than_what_executors_can_run() -> None:
    """max_replicas = 1: every plan is of one GPU, at first and later."""
    jobs = [request(f"j{i}", batch=8, gpus=8, steps=100, at=10.0 * i) for i in range(6)]
    cluster = uniform_cluster(3)
    run = Run("tlora", jobs, gpus=3)
    run.loop.policy = Tlora(costs_of(cluster), Settings(max_replicas=1))
    run.to_the_end()
    plans = [
        d.plan for t in run.store.turns() for d in t.decisions if d.kind in ("start", "resize")
    ]
    assert {plan.gpus for plan in plans} == {1}


def test_a_job_that_fits_nowhere_is_refused_with_the_figure() -> None:
    """And the others run."""
    found = decided(1, request("huge", rank=4096), request("a"))
    assert [str(each) for each in found if each.kind == "refuse"] == [
        "huge is refused: alone it would take 196.0 GiB of a GPU; bound by memory"
    ]
    assert groups(found) == {frozenset("a")}


def test_what_the_others_are_due_does_not_count_who_is_refused() -> None:
    """Beside ten that fit nowhere, of great weight, two strict jobs would be due next to nothing
    and share a GPU; without them each is due half of it, which both together are too slow for."""
    cluster = uniform_cluster(1)
    state, costs = State(cluster), costs_of(cluster)
    for i in range(10):
        state.happen(Arrival(0.0, request(f"huge{i}", rank=4096, priority=1e6)))
    for name in "ab":
        job = request(name, batch=8, length=2048, slowdown_bound=1.0, rank=64)
        state.happen(Arrival(0.0, job))
    found = make_policy("tlora", costs).decide(state, [])
    assert [each.kind for each in found].count("refuse") == 10
    assert broken_laws(state, found, costs) == []


def test_many_that_are_refused_one_behind_the_other_are_refused_in_one_turn() -> None:
    """Each comes in for the one before it, and there are more than Python calls within calls."""
    jobs = [request(f"huge{i}", rank=2**14) for i in range(1200)]
    run = Run("tlora", [*jobs, request("a")], gpus=1, max_runnable=1)
    run.loop.step()
    assert len(run.state.outcomes) == 1200 and run.state.jobs["a"].group is not None


def test_who_comes_in_by_an_arrival_beyond_the_limit_is_looked_at_where_nothing_runs() -> None:
    """The line is in another order by then: one that can only wait has left the first place."""
    cluster = uniform_cluster(3)
    state = State(cluster, max_runnable=1)
    state.overtake()
    policy = make_policy("tlora", costs_of(cluster))
    for gpu in range(3):
        state.happen(Straggler(0.0, gpu, 0.1))
    state.happen(Arrival(0.0, wide("first")))
    state.happen(Arrival(0.0, request("a", steps=10, slowdown_bound=100.0)))
    assert [job.name for job in state.runnable()] == ["first"] and policy.decide(state, []) == []
    state.advance(5.0, {}, {})
    last = Arrival(5.0, request("last", slowdown_bound=100.0))
    state.happen(last)
    assert [job.name for job in state.runnable()] == ["a"]
    (start,) = policy.decide(state, [last])
    assert isinstance(start, Start) and start.jobs == ("a",)


def test_bases_that_cannot_share_one_gpu_take_turns() -> None:
    """Nobody starves: each waits for some tens of minutes at most while the other runs."""
    jobs = [
        request("a", steps=200_000),
        request("b", steps=200_000, base="qwen"),
    ]
    run = Run("tlora", jobs, gpus=1)
    longest = {"a": 0.0, "b": 0.0}
    while run.state.jobs or not run.executor.idle:
        run.loop.step()
        for job in run.state.jobs.values():
            if job.group is None:
                longest[job.name] = max(longest[job.name], run.state.now - job.since_s)
    ended = run.ended_at()
    assert abs(ended["a"] - ended["b"]) < 0.2 * max(ended.values())
    assert max(longest.values()) < 5_000


def test_a_straggler_is_left_by_jobs_that_can_go_elsewhere() -> None:
    """Its GPU runs at a tenth; another is free."""
    run = Run("tlora", [request("a", steps=10**5)], gpus=2, world=[Straggler(500.0, 0, 0.1)])
    while run.state.now < 2000:
        run.loop.step()
    (group,) = run.state.groups.values()
    assert group.gpus == (1,)


def test_decisions_do_not_depend_on_what_was_asked_before() -> None:
    """A policy that has seen another cluster's jobs decides like a new one."""
    cluster = uniform_cluster(2)
    used = make_policy("tlora", costs_of(cluster))
    other = State(cluster)
    other.happen(Arrival(0.0, request("x", batch=2, gpus=2)))
    used.decide(other, [Tick(0.0)])
    state = State(cluster)
    for i in range(5):
        state.happen(Arrival(0.0, request(f"j{i}", rank=2**i)))
    fresh = make_policy("tlora", costs_of(cluster))
    assert used.decide(state, []) == fresh.decide(state, [])


class Doubted(Policy):
    """A policy whose every turn is also put to a new one, which has seen nothing."""

    name = "doubted"
    overtakes = True

    def __init__(self, used: Tlora) -> None:
        self.used = used
        self.quiet = 0

    def decide(self, state: State, events: Sequence[Event]) -> list[Decision]:
        found = self.used.decide(state, events)
        assert found == Tlora(self.used.costs).decide(state, events)
        self.quiet += self.used.is_quiet and isinstance(events[0], Tick)
        return found

    def look_by(self, state: State) -> float:
        return self.used.look_by(state)


class Sleepy(Tlora):
    """Takes every tick for one that can find nothing."""

    def decide(self, state: State, events: Sequence[Event]) -> list[Decision]:
        found = super().decide(state, events)
        return [] if isinstance(events[0], Tick) else found


@pytest.mark.parametrize("max_runnable", [None, 8])
def test_a_policy_that_knows_nothing_decides_the_same_in_every_turn(
    max_runnable: int | None,
) -> None:
    """Whatever was kept: prices, loads, and that a tick can find nothing. One that sleeps at ticks
    is told."""
    draw = random.Random(3)
    jobs = [
        request(
            f"j{i}",
            base=draw.choice(["llama", "qwen"]),
            rank=draw.choice([2, 8, 16]),
            batch=(batch := draw.choice([1, 2, 4])),
            gpus=draw.choice([1, batch]),
            steps=int(10 ** draw.uniform(2, 5)),
            at=draw.uniform(0, 4000),
        )
        for i in range(24)
    ]

    def run_by(kind: type[Tlora]) -> Doubted:
        run = Run("tlora", jobs, gpus=6, per_node=2, error=0.2, max_runnable=max_runnable)
        doubted = run.loop.policy = Doubted(kind(run.costs))
        run.to_the_end()
        return doubted

    with pytest.raises(AssertionError):
        run_by(Sleepy)
    doubted = run_by(Tlora)
    assert doubted.quiet > 10, "ticks that could find nothing were among them"


class Watched:
    """A policy of single GPUs and its state, turn by turn."""

    def __init__(self, *jobs: JobRequest) -> None:
        self.state = State(uniform_cluster(2))
        self.costs = costs_of(self.state.cluster)
        self.policy = self.new_policy()
        self.turn(0.0, *(Arrival(0.0, job) for job in jobs))

    def new_policy(self) -> Tlora:
        return Tlora(self.costs, Settings(max_replicas=1))

    def happen(self, now: float, *events: Event) -> None:
        self.state.advance(now, {}, fair_gpus(self.state))
        for event in events:
            self.state.happen(event)

    def turn(self, now: float, *events: Event) -> list[Decision]:
        self.happen(now, *events)
        decisions = self.policy.decide(self.state, events)
        for decision in decisions:
            self.state.apply(decision)
        return decisions


def test_a_tick_that_brings_an_event_is_not_quiet() -> None:
    """All jobs ran and nothing was to be done; the job that came since is placed. A policy that
    takes its last look for one at this state leaves it waiting."""
    watched = Watched(request("a", steps=10**6))
    assert watched.turn(100.0, Tick(100.0)) == []
    assert watched.policy.is_quiet
    quiet = watched.policy._quiet
    assert quiet is not None
    events = (Arrival(200.0, request("b", at=200.0)), Tick(200.0))
    watched.happen(200.0, *events)
    found = watched.policy.decide(watched.state, events)
    assert found == watched.new_policy().decide(watched.state, events)
    assert groups(found) == {frozenset("b")}
    watched.policy._quiet = quiet._replace(revision=watched.state.revision)
    assert watched.policy.decide(watched.state, events) != found


@pytest.mark.parametrize(("moves", "still", "then"), [(0, 50.0, 70.0), (3, 800.0, 1000.0)])
def test_it_is_quiet_until_one_more_job_may_be_moved(moves: int, still: float, then: float) -> None:
    """Two jobs share a GPU when the other becomes free, and both were moved or placed too recently
    to leave. When they may, one does, though nothing has happened. A policy that is quiet for
    ever lets the GPU idle."""
    jobs = [request(name, steps=10**6) for name in "ab"]
    watched = Watched(*jobs, request("c", base="qwen", steps=10**6))
    state, policy = watched.state, watched.policy
    assert state.jobs["a"].group == state.jobs["b"].group
    for name in "ab":
        state.jobs[name].moves = moves
    assert watched.turn(30.0, Completion(30.0, "c")) == []
    for now in (40.0, still):
        assert watched.turn(now, Tick(now)) == []
        assert policy.is_quiet
    quiet = policy._quiet
    assert quiet is not None
    watched.happen(then, Tick(then))
    found = policy.decide(state, [Tick(then)])
    assert found == watched.new_policy().decide(state, [Tick(then)])
    assert any(each.kind == "start" for each in found)
    policy._quiet = quiet._replace(until=math.inf)
    assert policy.decide(state, [Tick(then)]) == []


def test_the_cut_is_found_where_gains_rise_and_fall() -> None:
    """And not where they do not, which is what is counted."""
    hill = [1.0, 3.0, 4.0, 4.5, 4.4, 1.0, -2.0]
    assert best_cut(lambda count: hill[count - 1], len(hill)) == 4
    valley = [5.0, 1.0, 0.5, 0.4, 0.3, 0.6, 9.0]
    assert best_cut(lambda count: valley[count - 1], len(valley)) != 7
    assert best_cut(lambda count: 1.0, 1) == 1


def test_a_wrong_predictor_costs_little() -> None:
    """All jobs end, and not much later, with predictions 30 % off."""
    jobs = [request(f"j{i}", steps=5000 + 1000 * i, at=30.0 * i) for i in range(12)]
    right = max(Run("tlora", jobs, gpus=3).to_the_end().ended_at().values())
    wrong = max(Run("tlora", jobs, gpus=3, error=0.3).to_the_end().ended_at().values())
    assert wrong < right * 1.3
    assert wrong == pytest.approx(right, rel=0.3)
