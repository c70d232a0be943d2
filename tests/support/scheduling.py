"""Jobs, clusters and costs that scheduling tests share."""

from collections.abc import Iterable

from support.costs import new_profile
from tlora.control import Loop, Turn
from tlora.core.clock import ManualClock
from tlora.core.cluster import Cluster, uniform_cluster
from tlora.core.load import JobLoad
from tlora.core.request import JobRequest
from tlora.core.state import State
from tlora.costs.groups import Costs
from tlora.schedule import POLICIES, make_policy
from tlora.simulation.executor import SimulatedExecutor
from tlora.store.memory import MemoryStore

PROFILE = new_profile()


def request(
    name: str,
    *,
    base: str = "llama",
    rank: int = 8,
    batch: int = 1,
    length: int = 512,
    steps: int = 1000,
    gpus: int = 1,
    at: float = 0.0,
    **others: object,
) -> JobRequest:
    load = JobLoad(rank=rank, batch_size=batch, lengths=(length,))
    return JobRequest(
        name=name,
        base=base,
        load=load,
        total_steps=steps,
        gpus=gpus,
        arrival_s=at,
        **others,  # type: ignore[arg-type]
    )


def costs_of(cluster: Cluster, **options: object) -> Costs:
    return Costs({"llama": PROFILE, "qwen": PROFILE}, cluster, **options)  # type: ignore[arg-type]


class Run:
    """A policy over simulated time, and what came of it."""

    def __init__(
        self,
        policy: str,
        jobs: Iterable[JobRequest],
        *,
        gpus: int = 2,
        per_node: int = 8,
        error: float = 0.0,
        max_runnable: int | None = None,
        **world: object,
    ) -> None:
        self.cluster = uniform_cluster(gpus, per_node=per_node)
        kernel = POLICIES[policy].kernel
        self.state = State(self.cluster, max_runnable=max_runnable)
        self.store: MemoryStore[Turn] = MemoryStore()
        clock = ManualClock()
        self.executor = SimulatedExecutor(
            clock=clock,
            costs=costs_of(self.cluster, kernel=kernel),
            arrivals=jobs,
            **world,  # type: ignore[arg-type]
        )
        self.costs = costs_of(self.cluster, kernel=kernel, error=error)
        self.policy = make_policy(policy, self.costs)
        self.loop = Loop(
            state=self.state,
            policy=self.policy,
            executor=self.executor,
            store=self.store,
            clock=clock,
        )

    def to_the_end(self, *, check: bool = True) -> "Run":
        while self.state.jobs or not self.executor.idle:
            self.loop.step()
            if check:
                self.state.check()
        return self

    def ended_at(self) -> dict[str, float]:
        return {
            event.job: event.time
            for turn in self.store.turns()
            for event in turn.events
            if event.kind in ("completion", "early_exit")
        }
