"""Groups in order of arrival while memory permits, as mLoRA does: no bounds, no speed predicted.

A job starts alone where the GPUs it brings are free; else it is attached to the group of its base
that has the fewest jobs and memory for one more (kinder than the first that fits). Nobody overtakes
the first that can do neither, unless it needs more GPUs than are up, and nobody is moved.
"""

from collections.abc import Sequence

from tlora.core.decision import Decision, Join, Reasons, Refuse, Start
from tlora.core.event import Event
from tlora.core.plan import Plan
from tlora.core.request import JobRequest
from tlora.core.state import State
from tlora.costs.groups import Costs, narrowest
from tlora.schedule.placement import choose_gpus
from tlora.schedule.policy import Policy
from tlora.schedule.settings import Settings


class FifoMemory(Policy):
    def __init__(self, costs: Costs, settings: Settings | None = None, name: str = "fifo-memory"):
        self.name = name
        self.costs = costs
        self.widest = (settings or Settings()).max_replicas

    def decide(self, state: State, events: Sequence[Event]) -> list[Decision]:
        decisions: list[Decision] = []
        free = set(state.free)
        members = {
            group.name: [state.jobs[name].request for name in group.jobs]
            for group in state.groups.values()
        }
        plans = {group.name: group.plan for group in state.groups.values()}
        number = state.next_group
        for job in state.waiting():
            request = job.request
            plan = self._plan(request)
            fits = self._fits([request], plan)
            if not fits or plan.gpus > len(state.cluster):
                bound = "memory" if not fits else "GPUs of the cluster"
                reasons = Reasons(why="it does not fit even alone", bound_by=bound)
                decisions.append(Refuse(job=job.name, reasons=reasons))
                continue
            gpus = choose_gpus(state.cluster, free, plan.gpus)
            if gpus is not None:
                free -= set(gpus)
                name = f"g{number}"
                number += 1
                members[name], plans[name] = [request], plan
                decisions.append(
                    Start(
                        group=name,
                        base=request.base,
                        jobs=(job.name,),
                        gpus=gpus,
                        plan=plan,
                        weights=(1.0,),
                        reasons=Reasons(why="it is the first in line and its GPUs are free"),
                    )
                )
                continue
            rooms = [
                (len(jobs), name)
                for name, jobs in members.items()
                if jobs[0].base == request.base and self._fits([*jobs, request], plans[name])
            ]
            if not rooms:
                if plan.gpus > state.up_gpus:
                    continue
                break
            _, name = min(rooms)
            members[name].append(request)
            reasons = Reasons(why=f"it is the first in line and {name} has memory for it")
            decisions.append(Join(job=job.name, group=name, weight=1.0, reasons=reasons))
        return decisions

    def _plan(self, request: JobRequest) -> Plan:
        """With the largest nano-batches that fit."""
        replicas = self.costs.figures(request).solo_plan.replicas
        replicas = min(replicas, self.widest or replicas)
        buckets = self.costs.base(request.base).buckets
        plans = [Plan(replicas=replicas, bucket=bucket) for bucket in reversed(buckets)]
        return next((plan for plan in plans if self._fits([request], plan)), plans[0])

    def _fits(self, requests: list[JobRequest], plan: Plan) -> bool:
        tier = narrowest(self.costs.cluster, plan.gpus)
        weights = [1.0] * len(requests)
        return self.costs.predict(requests, weights, plan, tier).fits
