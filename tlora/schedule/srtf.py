"""Shortest remaining time first, every job alone on the GPUs it brings, with perfect knowledge of
what remains: a bound for schedulers that do not fuse. Longer jobs are paused for shorter ones, and
smaller ones fill what is left."""

from collections.abc import Sequence

from tlora.core.decision import Decision, Pause, Reasons, Refuse, Start
from tlora.core.event import Event
from tlora.core.state import JobState, State
from tlora.costs.groups import Costs
from tlora.schedule.placement import choose_gpus
from tlora.schedule.policy import Policy


class Srtf(Policy):
    name = "srtf"
    overtakes = True

    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def decide(self, state: State, events: Sequence[Event]) -> list[Decision]:
        refused = {
            job.name: bound
            for job in state.waiting()
            if (bound := self._bound(state, job)) is not None
        }
        decisions: list[Decision] = [
            Refuse(job=name, reasons=Reasons(why="it does not fit even alone", bound_by=bound))
            for name, bound in refused.items()
        ]
        jobs = [job for job in state.runnable() if job.name not in refused]
        jobs.sort(key=lambda job: (self._remaining_s(job), job.request.arrival_s, job.name))
        left = state.up_gpus
        chosen: list[JobState] = []
        for job in jobs:
            need = self.costs.figures(job.request).solo_plan.gpus
            if need <= left:
                left -= need
                chosen.append(job)
        wanted = {job.name for job in chosen}
        starting = [job for job in chosen if job.group is None]
        free = set(state.free)
        if starting:
            for job in jobs:
                if job.group is not None and job.name not in wanted:
                    free |= set(state.groups[job.group].gpus)
                    why = "shorter jobs need its GPUs"
                    decisions.append(Pause(job=job.name, group=job.group, reasons=Reasons(why=why)))
        number = state.next_group
        for job in starting:
            plan = self.costs.figures(job.request).solo_plan
            gpus = choose_gpus(state.cluster, free, plan.gpus)
            if gpus is None:
                continue
            free -= set(gpus)
            decisions.append(
                Start(
                    group=f"g{number}",
                    base=job.request.base,
                    jobs=(job.name,),
                    gpus=gpus,
                    plan=plan,
                    weights=(1.0,),
                    reasons=Reasons(why=f"{self._remaining_s(job):.0f} s remain, less than others"),
                )
            )
            number += 1
        return decisions

    def _bound(self, state: State, job: JobState) -> str | None:
        """What keeps it from ever running, if something does."""
        if not self.costs.solo(job.request).fits:
            return "memory"
        needed = self.costs.figures(job.request).solo_plan.gpus
        return "GPUs of the cluster" if needed > len(state.cluster) else None

    def _remaining_s(self, job: JobState) -> float:
        return job.remaining_steps * self.costs.figures(job.request).solo_step_s
