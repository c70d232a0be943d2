"""Every job alone on the GPUs it brings, in order of arrival: the cluster without tlora.

Strictly in order: while the first one waits for GPUs, nobody overtakes it, unless it needs more of
them than are up.
"""

from collections.abc import Sequence

from tlora.core.decision import Decision, Reasons, Refuse, Start
from tlora.core.event import Event
from tlora.core.state import State
from tlora.costs.groups import Costs
from tlora.schedule.placement import choose_gpus
from tlora.schedule.policy import Policy


class Solo(Policy):
    name = "solo"

    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def decide(self, state: State, events: Sequence[Event]) -> list[Decision]:
        decisions: list[Decision] = []
        free = set(state.free)
        number = state.next_group
        for job in state.waiting():
            request = job.request
            alone = self.costs.solo(request)
            plan = self.costs.figures(request).solo_plan
            if not alone.fits or plan.gpus > len(state.cluster):
                bound = "memory" if not alone.fits else "GPUs of the cluster"
                decisions.append(
                    Refuse(
                        job=job.name,
                        reasons=Reasons(why="it does not fit even alone", bound_by=bound),
                    )
                )
                continue
            if plan.gpus > state.up_gpus:
                continue
            gpus = choose_gpus(state.cluster, free, plan.gpus)
            if gpus is None:
                break
            free -= set(gpus)
            decisions.append(
                Start(
                    group=f"g{number}",
                    base=request.base,
                    jobs=(job.name,),
                    gpus=gpus,
                    plan=plan,
                    weights=(1.0,),
                    reasons=Reasons(
                        why="it is the first in line and its GPUs are free",
                        before=0.0,
                        after=alone.worth,
                        slowdown=1.0,
                        cost_s=self.costs.start_s(request.base),
                    ),
                )
            )
            number += 1
        return decisions
